from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.errors import FencedError, RunDirectoryError
from slurm_forge.run_directory import (
    Fence,
    RunDirectory,
    claim_attempt,
    list_claims,
    mark_launch,
    newest_claim,
)
from slurm_forge.run_directory import claims as claims_module


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.at(tmp_path / "tiny")
    run.create(b"name: tiny\n")
    return run


def claim(run: RunDirectory, **changes: Any) -> int:
    given: dict[str, Any] = {
        "job": "42",
        "restart_count": 0,
        "host": "n1",
        "pid": os.getpid(),
        "nodes": ("n1", "n2"),
        "time": 1_700_000_000.5,
    }
    return claim_attempt(run, **{**given, **changes}).attempt


def test_attempts_are_numbered_from_one_and_remember_who_they_are(run: RunDirectory) -> None:
    assert newest_claim(run) is None
    assert [claim(run), claim(run, job="43", restart_count=1)] == [1, 2]
    found = newest_claim(run)
    assert found is not None
    assert (found.attempt, found.job, found.restart_count) == (2, "43", 1)
    assert (found.nodes, found.time) == (("n1", "n2"), 1_700_000_000.5)
    assert run.attempt(2).is_dir()


def test_a_newer_claim_fences_every_older_one_and_never_itself(run: RunDirectory) -> None:
    fences = [Fence(run, claim(run)) for _ in range(3)]
    fences[2]()
    for fence in fences[:2]:
        with pytest.raises(FencedError, match="attempt 3 has taken over"):
            fence()


def test_a_newer_launch_fences_the_older_ones_of_its_attempt(run: RunDirectory) -> None:
    """A rank of theirs may live on a node that was given up."""
    attempt = claim(run)
    fences = [Fence(run, attempt, number) for number in (1, 2, 3)]
    supervisor = Fence(run, attempt)
    for number in (1, 2, 3):
        mark_launch(run, attempt, number)
    fences[2]()
    supervisor()
    for fence in fences[:2]:
        with pytest.raises(FencedError, match="has taken over"):
            fence()


def _race(path: Path, barrier: Any, out: Any) -> None:
    run = RunDirectory.at(path)
    barrier.wait()
    out.put([claim(run, host=f"n{os.getpid()}") for _ in range(4)])


def test_eight_processes_that_race_all_get_numbers_of_their_own(run: RunDirectory) -> None:
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(8), context.Queue()
    racers = [context.Process(target=_race, args=(run.path, barrier, out)) for _ in range(8)]
    for racer in racers:
        racer.start()
    taken = sorted(number for _ in racers for number in out.get(timeout=20))
    for racer in racers:
        racer.join(20)
    assert taken == list(range(1, 33))
    assert list_claims(run) == taken
    # Each file is whole and says what its own racer wrote.
    bodies = [json.loads((run.attempts / f"{number}.json").read_text()) for number in taken]
    assert [body["attempt"] for body in bodies] == taken


def test_junk_beside_the_claims_is_no_claim(run: RunDirectory) -> None:
    claim(run)
    for name in ("007.json", "0.json", "٣.json", "-5.json", "9999999999.json", "x.json", "5.json~"):
        (run.attempts / name).write_text("{}")
    (run.attempts / ".7.json.00aa.tmp").write_text("")
    (run.attempts / "8").mkdir()
    (run.attempts / "rendezvous-42-0.json").write_text("{}")
    assert list_claims(run) == [1]
    found = newest_claim(run)
    assert found is not None
    assert found.attempt == 1
    assert claim(run) == 2


def test_a_damaged_claim_says_which_file_it_is_and_still_fences(run: RunDirectory) -> None:
    first = Fence(run, claim(run))
    for damaged in (b"", b"{}"):
        (run.attempts / "2.json").write_bytes(damaged)
        with pytest.raises(RunDirectoryError, match=r"2\.json") as caught:
            newest_claim(run)
        assert caught.value.next_step.startswith("Leave it where it is")
    with pytest.raises(FencedError):
        first()
    assert claim(run) == 3


def test_a_listing_that_lags_behind_does_not_stop_a_claim(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a listing may be older than what creating a file finds there."""
    for _ in range(5):
        claim(run)
    monkeypatch.setattr(claims_module, "list_claims", lambda run: [1])
    assert claim(run, tries=10) == 6


def test_a_run_that_is_started_in_a_loop_is_told_so(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "create_exclusive", lambda path, body: False)
    with pytest.raises(RunDirectoryError, match="after 3 tries"):
        claim(run, tries=3)


def test_a_run_directory_is_made_once_and_marked_done_durably(run: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match="already exists"):
        run.create(b"name: other\n")
    assert run.spec_file.read_bytes() == b"name: tiny\n"
    assert not run.is_done()
    run.mark_done(400, 2)
    run.mark_done(400, 2)
    assert run.is_done()
    assert json.loads(run.done_file.read_text()) == {"attempt": 2, "step": 400}


def test_a_folder_without_a_run_is_not_taken_for_one(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"run\.yaml is missing"):
        RunDirectory.existing(tmp_path)


def test_the_run_is_private_to_its_user(run: RunDirectory) -> None:
    claim(run)
    for path in (run.path, run.journal, run.attempts, run.checkpoints, run.submissions):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (run.attempts / "1.json").stat().st_mode & 0o777 == 0o600


def test_git_ignores_a_folder_of_runs_that_was_made_for_them_and_no_other(tmp_path: Path) -> None:
    made = RunDirectory.at(tmp_path / "runs" / "sums")
    made.create(b"{}")
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"
    (tmp_path / "given").mkdir(mode=0o700)
    RunDirectory.at(tmp_path / "given" / "sums").create(b"{}")
    assert {each.name for each in (tmp_path / "given").iterdir()} == {"sums"}
