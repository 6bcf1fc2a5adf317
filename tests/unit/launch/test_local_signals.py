from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.launch.attempt.stop_request import StopRequest
from slurm_forge.launch.local import runner as here
from slurm_forge.launch.local import tasks
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.spec.run_file import read_run_file

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    # Whatever started the tests: nohup has SIGHUP ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ALL)
def test_the_first_signal_asks_and_another_one_insists(number: signal.Signals) -> None:
    now = [100.0]
    with StopRequest(lambda: now[0]) as asked:
        assert not asked
        signal.raise_signal(number)
        assert (bool(asked), asked.name, asked.number, asked.insists) == (
            True,
            number.name,
            number,
            False,
        )
        now[0] = 100.2
        signal.raise_signal(number)
        said = [asked.insists]  # timeout(1) sends each of its signals twice
        now[0] = 102.0
        signal.raise_signal(signal.SIGTERM)
        said.append(asked.insists)
        assert (said, asked.name) == ([False, True], number.name)


def test_afterwards_signals_do_what_they_did_before() -> None:
    with StopRequest():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with StopRequest() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert not asked


def test_on_another_thread_it_changes_nothing() -> None:
    found = []

    def enter() -> None:
        with StopRequest() as asked:
            found.append(bool(asked))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [False]


def test_who_trains_from_python_is_interrupted_once_the_run_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "run_locally", lambda *given: 128 + signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        here.train_here("a.b:train", {"name": "run"}, runs=tmp_path)


def test_ranks_that_are_killed_before_they_begin_an_attempt_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(run: object, **given: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["false"], start_new_session=True)

    monkeypatch.setattr(here, "start_tasks", killed)
    run = here.train_here("m:train", {"name": "tiny"}, runs=tmp_path / "runs")
    said: list[str] = []
    file = read_run_file(run.spec_file)
    assert here.run_locally(run, file, 1, lambda: None, say=said.append) == 1
    (text,) = said
    assert "ended before they began an attempt" in text and "_0_log.err" in text
    assert run_state(run).status is RunStatus.SUBMITTED


def tasks_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tasks._Tasks:
    """Above the tasks of a run whose job sets a variable; without torch."""
    job = {"name": "tiny", "env": {"FORGE_TEST_COLOUR": "red"}}
    monkeypatch.setattr(here, "run_locally", lambda *given: 0)
    run = here.train_here("m:train", job, runs=tmp_path / "runs")
    return tasks._Tasks(run, ())


def test_a_sigterm_while_nothing_runs_yet_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds to import torch, and there is no task yet to pass the signal on to."""
    above = tasks_of(tmp_path, monkeypatch)

    def fork() -> int:
        raise AssertionError("a task was started")

    monkeypatch.setattr(os, "fork", fork)
    signal.raise_signal(signal.SIGTERM)
    assert not above.supervise(2)


def test_a_start_finds_no_variable_of_the_job_as_it_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that was taken out of the job meanwhile, or that the site has changed."""
    above = tasks_of(tmp_path, monkeypatch)
    preloaded: list[str | None] = []

    def preload(environ: Mapping[str, str], more: tuple[str, ...]) -> str:
        preloaded.append(environ.get("FORGE_TEST_COLOUR"))
        return ""

    monkeypatch.setattr(above._preload, "preload", preload)
    monkeypatch.setattr(above._preload, "why_not_forkable", str)
    above.prepare()
    assert preloaded == ["red"], "torch reads some when it is imported"
    assert "FORGE_TEST_COLOUR" not in os.environ
