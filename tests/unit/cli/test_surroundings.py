"""What ``status`` and ``explain`` find beside the journal: notes of failed starts, Slurm's word."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.cli.observe import status as looking
from slurm_forge.cli.observe import surroundings
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.process import Completed
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.cli.conftest import Shell
from tests.unit.report.journals import Scribe

HELD = (Path(__file__).parents[1] / "slurm" / "data" / "job_held.txt").read_text()


@dataclass
class Scontrol:
    """Answers with a canned text, or not at all; remembers every question and its patience."""

    text: str = HELD
    silent: bool = False
    asked: list[tuple[tuple[str, ...], timedelta]] = field(default_factory=list)

    def __call__(
        self, argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]
    ) -> Completed:
        del environment
        self.asked.append((tuple(argv), timeout))
        return Completed(tuple(argv), None if self.silent else 0, self.text, "")


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    answers = Scontrol()
    client = SubprocessSlurm(environment={}, runner=answers)
    monkeypatch.setattr(SubprocessSlurm, "of_this_process", classmethod(lambda cls: client))
    monkeypatch.setattr(surroundings.shutil, "which", lambda name: f"/usr/bin/{name}")
    return answers


def requeued(scribe: Scribe) -> None:
    scribe.now = time.time() - 700
    scribe.begin(job="40")
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.incident(Cause.PREEMPTED, Action.REQUEUE, step=20)
    scribe.requeued("40")


def note(scribe: Scribe, job: str, text: str, *, age: float = 0.0, mode: int = 0o600) -> Path:
    path = scribe.run.submissions / f"not-started-{job}.txt"
    path.write_text(text)
    path.chmod(mode)
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("verb", ["status", "explain"])
def test_slurm_is_asked_once_and_briefly_why_a_job_waits(
    shell: Shell, scribe: Scribe, scontrol: Scontrol, verb: str
) -> None:
    requeued(scribe)
    result = shell(verb, "tiny-gpt")
    assert "waiting to start again: held in the queue\n" in result.stdout
    assert "scontrol release 40, or slurm-forge requeue tiny-gpt" in result.stdout
    assert scontrol.asked == [(("scontrol", "show", "job", "40"), timedelta(seconds=3))]


@pytest.mark.parametrize("verb", ["status", "explain"])
def test_a_slurm_that_says_nothing_keeps_no_report_from_being_made(
    shell: Shell, scribe: Scribe, scontrol: Scontrol, verb: str
) -> None:
    requeued(scribe)
    scontrol.silent = True
    assert "Slurm does not answer" in shell(verb, "tiny-gpt").stdout
    scontrol.silent, scontrol.text = False, "a message of the day"
    result = shell(verb, "tiny-gpt")
    assert result.exit_code == 0
    assert "requeued" in result.stdout


def test_nobody_is_asked_where_there_is_no_scontrol(
    shell: Shell, scribe: Scribe, scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued(scribe)
    monkeypatch.setattr(surroundings.shutil, "which", lambda name: None)
    assert "waiting to start again\n" in shell("status", "tiny-gpt").stdout
    assert scontrol.asked == []


def test_nobody_is_asked_in_a_list_and_of_a_run_that_trains_each_time(
    shell: Shell, scribe: Scribe, scontrol: Scontrol
) -> None:
    requeued(scribe)
    assert "requeued" in shell("status").stdout
    scribe.later(5).begin(job="40")
    scribe.resume(20)
    assert scontrol.asked == []
    # A supervisor that was killed leaves a journal that says that it runs.
    shell("status", "tiny-gpt")
    shell("explain", "tiny-gpt")
    assert [words for words, _ in scontrol.asked] == [("scontrol", "show", "job", "40")] * 2


def test_following_asks_once(
    shell: Shell, scribe: Scribe, scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued(scribe)
    turns = iter(range(3))

    def later(seconds: float) -> None:
        """Three looks at a run that waits; then it is finished."""
        del seconds
        if next(turns, None) is None:
            scribe.begin(job="40")
            scribe.finish(400)

    monkeypatch.setattr(time, "sleep", later)
    monkeypatch.setattr(looking, "_LOOK_EVERY_S", 0.0)
    told = shell("status", "tiny-gpt", "--follow").stdout
    assert "held in the queue" in told
    assert "status      finished" in told
    assert len(scontrol.asked) == 1


@pytest.mark.parametrize("words", [("status", "tiny-gpt"), ("explain", "tiny-gpt")])
def test_a_start_that_failed_is_told(
    shell: Shell, scribe: Scribe, scontrol: Scontrol, words: tuple[str, ...]
) -> None:
    scontrol.silent = True
    requeued(scribe)
    text = "No module named \x1b[31m'slurm_forge'\n"
    note(scribe, "40", "x" * 9000 + f"\n2026-08-11T10:00:00Z job 40 on n03\n{text}")
    told = shell(*words).stdout
    assert "job 40 could not start: on n03: No module named ?[31m'slurm_forge'\n" in told
    assert "to continue: slurm-forge requeue tiny-gpt" in told


def test_a_note_that_others_could_have_written_is_not_believed(
    shell: Shell, scribe: Scribe, scontrol: Scontrol
) -> None:
    requeued(scribe)
    scontrol.silent = True
    path = note(scribe, "40", "run this: curl evil", mode=0o666)
    assert "curl" not in shell("status", "tiny-gpt").stdout
    path.unlink()
    path.symlink_to(shell.folder / "train.yaml")
    assert "could not start" not in shell("status", "tiny-gpt").stdout
    path.unlink()
    os.mkfifo(path)
    assert "could not start" not in shell("status", "tiny-gpt").stdout


def test_a_note_from_before_the_newest_attempt_is_over(
    shell: Shell, scribe: Scribe, scontrol: Scontrol
) -> None:
    requeued(scribe)
    scontrol.silent = True
    note(scribe, "40", "old trouble", age=3600)
    note(scribe, "40; rm", "no job")
    assert "could not start" not in shell("status", "tiny-gpt").stdout


@pytest.mark.parametrize(
    ("resources", "unit"),
    [
        ("{}", "8.0 rank-minutes lost"),
        ("{gpus_per_task: 1}", "8.0 GPU-minutes lost"),
        ('{gpus_per_node: "a100:8", tasks_per_node: 4}', "16 GPU-minutes lost"),
        ('{gres: "gpu:a100:4", tasks_per_node: 8}', "4.0 GPU-minutes lost"),
        ('{gres: "shard:4"}', "8.0 rank-minutes lost"),
    ],
)
def test_ranks_are_counted_in_gpus_where_the_job_asks_for_some(
    shell: Shell, scribe: Scribe, resources: str, unit: str
) -> None:
    scribe.run.spec_file.write_text(f"job: {{name: x, entry: a.b:f, resources: {resources}}}\n")
    scribe.begin()
    scribe.later(60).incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.end("hold")
    assert unit in shell("explain", "tiny-gpt").stdout
