"""A live look that nothing comes of: it ends, says why, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.errors import ConfigError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.launch.diagnose.live_check import (
    LiveWish,
    live_job,
    live_script,
    look_live,
)
from slurm_forge.launch.diagnose.live_meeting import (
    AGAIN,
    CARD,
    HERE,
    LOGIN_LOCK,
    ONCE,
    OVER,
    REPORT,
    answer,
    meet,
)
from slurm_forge.launch.diagnose.live_node import (
    inspect_node,
    knock,
    look_at_storage,
    open_door,
)
from slurm_forge.lock import exclusive
from slurm_forge.recovery.live_observations import JobSeen
from slurm_forge.site.model import Site
from slurm_forge.slurm.process import Completed
from slurm_forge.slurm.records import JobRecord, QueueRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping

SITE = Site.model_validate({"name": "here"})


class Slurm:
    """One job; ``lives`` is called whenever somebody asks for it."""

    def __init__(self, state: JobState = JobState.PENDING, reason: str | None = None) -> None:
        self.state, self.reason = state, reason
        self.cancelled = False
        self.ended: list[str] = []
        self.folder = Path()
        self.lives: Callable[[], None] = lambda: None

    def submit(self, script: Path, args: Any = ()) -> str:
        self.folder = script.parent
        return "7"

    def show_job(self, job: str) -> JobRecord | None:
        self.lives()
        state = JobState.CANCELLED if self.cancelled else self.state
        return JobRecord(
            job_id=7, name="forge-doctor", state=state, state_text=state.value, reason=self.reason
        )

    def cancel(self, job: str, **_: Any) -> None:
        self.ended.append(job)
        self.cancelled = True


class Clock:
    """Time that passes by being slept away."""

    def __init__(self) -> None:
        self.now = time.time()

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wish(runs: Path, **more: Any) -> LiveWish:
    job = live_job(None, nodes=1, partition="debug", qos=None, account=None)
    return LiveWish(job=job, site=SITE, runs=runs, python=sys.executable, **more)


def looked(
    slurm: Slurm,
    runs: Path,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
    **more: Any,
) -> Any:
    clock = Clock()
    return look_live(
        wish(runs, **more),
        slurm,  # type: ignore[arg-type]
        say=say,
        wall=clock.wall,
        sleep=clock.sleep,
        interrupted=interrupted,
    )


def test_a_job_that_never_starts_is_cancelled_and_says_why(tmp_path: Path) -> None:
    slurm = Slurm(reason="QOSMaxJobsPerUserLimit")
    seen = looked(slurm, tmp_path / "runs", start_within=timedelta(minutes=2))
    assert seen.report is None
    assert "did not start within 2 min (QOSMaxJobsPerUserLimit)" in seen.problem
    assert slurm.cancelled
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_cancels_the_job_and_takes_the_folder_away(tmp_path: Path) -> None:
    slurm = Slurm()
    runs = tmp_path / "runs"
    runs.mkdir()
    came: list[bool] = []
    slurm.lives = lambda: came.append(True)
    with pytest.raises(KeyboardInterrupt):
        looked(slurm, runs, interrupted=lambda: bool(came))
    assert slurm.cancelled
    assert list(runs.iterdir()) == []


def test_a_ctrl_c_in_the_middle_of_sbatch_leaves_no_job(tmp_path: Path) -> None:
    class Slow(Slurm):
        def submit(self, script: Path, args: Any = ()) -> str:
            came.append(True)
            return super().submit(script, args)

    came: list[bool] = []
    slurm = Slow()
    with pytest.raises(KeyboardInterrupt):
        looked(slurm, tmp_path / "runs", interrupted=lambda: bool(came))
    assert slurm.cancelled and list(tmp_path.iterdir()) == []


def test_nothing_is_submitted_after_a_ctrl_c(tmp_path: Path) -> None:
    slurm = Slurm()
    with pytest.raises(KeyboardInterrupt):
        looked(slurm, tmp_path / "runs", interrupted=lambda: True)
    assert slurm.folder == Path() and list(tmp_path.iterdir()) == []


LATE = SlurmUnreachableError(("sbatch",), 124, "no answer within 120 s.")
NO_NUMBER = SlurmCommandError(("sbatch",), 0, "its answer was not understood")


@pytest.mark.parametrize("error", [LATE, NO_NUMBER, KeyboardInterrupt()])
def test_a_job_of_which_sbatch_has_not_told_is_found_and_no_other_one_cancelled(
    tmp_path: Path, error: BaseException
) -> None:
    class Silent(Slurm):
        def submit(self, script: Path, args: Any = ()) -> str:
            super().submit(script, args)
            raise error

        def queue(self, user: str) -> tuple[QueueRecord, ...]:
            return tuple(
                QueueRecord(
                    job_ref=ref,
                    job_id=int(ref),
                    state=JobState.PENDING,
                    reason=None,
                )
                for ref in ("6", "7", "8")
            )

        def show_job(self, job: str) -> JobRecord | None:
            record = super().show_job(job)
            assert record is not None
            mine = str(self.folder / "job.sbatch") if job == "7" else "/home/somebody/job.sbatch"
            return replace(record, command=mine)

    slurm = Silent()
    with pytest.raises(type(error)):
        looked(slurm, tmp_path / "runs")
    assert slurm.ended == ["7"]
    assert list(tmp_path.iterdir()) == []


def test_what_sbatch_refuses_is_not_looked_for(tmp_path: Path) -> None:
    class Refusing(Slurm):
        def submit(self, script: Path, args: Any = ()) -> str:
            raise SlurmCommandError(("sbatch",), 1, "Invalid partition")

    slurm = Refusing()  # it has no queue: asking would fail
    with pytest.raises(SlurmCommandError, match="Invalid partition"):
        looked(slurm, tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_a_controller_that_does_not_answer_is_told_all_the_same_to_cancel(tmp_path: Path) -> None:
    slurm = Slurm()

    def busy() -> None:
        if not slurm.cancelled:
            raise SlurmUnreachableError(("scontrol",), 124, "no answer within 20 s.")

    slurm.lives = busy
    seen = looked(slurm, tmp_path / "runs", start_within=timedelta(minutes=1))
    assert seen.report is None and slurm.cancelled


def test_a_job_that_can_not_be_cancelled_is_told_by_its_number(tmp_path: Path) -> None:
    class Deaf(Slurm):
        def cancel(self, job: str, **_: Any) -> None:
            raise SlurmUnreachableError(("scancel",), 124, "no answer within 20 s.")

    told: list[str] = []
    looked(Deaf(), tmp_path / "runs", start_within=timedelta(minutes=1), say=told.append)
    assert "scancel 7" in told[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_comes_back_while_it_is_cancelled_is_cancelled_again(tmp_path: Path) -> None:
    class Coming(Slurm):
        def cancel(self, job: str, **_: Any) -> None:
            self.ended.append(job)
            # The first one meets a job that has just asked for its requeue.
            self.cancelled = len(self.ended) > 1

    slurm = Coming()
    looked(slurm, tmp_path / "runs", start_within=timedelta(minutes=1))
    assert slurm.ended == ["7", "7"] and slurm.cancelled


def test_the_job_is_told_not_to_come_back_before_it_is_cancelled(tmp_path: Path) -> None:
    class Watching(Slurm):
        def cancel(self, job: str, **_: Any) -> None:
            assert (self.folder / OVER).exists()
            super().cancel(job)

    slurm = Watching()
    looked(slurm, tmp_path / "runs", start_within=timedelta(minutes=1))
    assert slurm.cancelled


def test_a_folder_that_is_still_written_into_goes_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, failed = shutil.rmtree, iter([True, True])

    def late(path: Path, ignore_errors: bool = False) -> None:
        if not next(failed, False):
            remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", late)
    looked(Slurm(JobState.FAILED), tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_only_folders_that_were_made_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    looked(Slurm(JobState.FAILED), tmp_path / "there" / "a" / "b")
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
    assert list((tmp_path / "there").iterdir()) == []

    def full(**_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="No space left"):
        looked(Slurm(), tmp_path / "there" / "a" / "b")
    assert list((tmp_path / "there").iterdir()) == []


def test_a_job_that_is_preempted_before_it_begins_is_no_fault_of_the_folder(tmp_path: Path) -> None:
    slurm = Slurm(JobState.COMPLETED)

    def begins_again() -> None:
        if slurm.folder.exists():
            (slurm.folder / AGAIN).touch()

    slurm.lives = begins_again
    seen = looked(slurm, tmp_path / "runs")
    assert "preempted" in seen.problem and "share" not in seen.problem


def test_a_job_that_slurm_has_forgotten_is_over(tmp_path: Path) -> None:
    class Forgetting(Slurm):
        def show_job(self, job: str) -> JobRecord | None:
            known, self.known = self.known, False
            return super().show_job(job) if known else None

        known = True

    slurm = Forgetting(JobState.RUNNING)
    seen = looked(slurm, tmp_path / "runs")
    assert "forgotten by Slurm" in seen.problem


def test_a_job_that_slurm_forgets_for_a_moment_is_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    class Flickering(Slurm):
        def show_job(self, job: str) -> JobRecord | None:
            self.asked += 1
            return None if self.asked == 2 else super().show_job(job)

        asked = 0

    slurm = Flickering(reason="Priority")
    seen = looked(slurm, tmp_path / "runs", start_within=timedelta(minutes=2))
    assert "did not start within 2 min" in seen.problem and slurm.cancelled


def test_a_job_that_ends_without_a_trace_points_at_the_folder(tmp_path: Path) -> None:
    seen = looked(Slurm(JobState.FAILED), tmp_path / "runs")
    assert "do not share that folder" in seen.problem and str(tmp_path) in seen.problem


def test_what_the_job_has_printed_is_told_where_it_fails(tmp_path: Path) -> None:
    slurm = Slurm(JobState.FAILED)

    def prints() -> None:
        (slurm.folder / "submissions" / "forge-doctor-7.out").write_text("no such module: torch\n")

    slurm.lives = prints
    seen = looked(slurm, tmp_path / "runs")
    assert "no such module: torch" in seen.problem


def test_a_report_of_another_look_is_not_believed(tmp_path: Path) -> None:
    slurm = Slurm(JobState.FAILED)
    foreign = JobSeen(
        nonce="not ours", job="7", host="n1", started_at=0, ended_at=1, end_time=None, rounds=(),
        nodes=(),
    )  # fmt: skip

    def plants() -> None:
        if not slurm.cancelled and slurm.folder.exists():
            for name, content in ((HERE, {"at": 0}), (REPORT, asdict(foreign))):
                path = slurm.folder / name
                path.write_text(json.dumps(content))
                path.chmod(0o600)

    slurm.lives = plants
    seen = looked(slurm, tmp_path / "runs")
    assert seen.report is None and "cut off (FAILED)" in seen.problem


def test_the_folder_stays_where_it_is_wanted(tmp_path: Path) -> None:
    seen = looked(Slurm(JobState.FAILED), tmp_path / "runs", keep=True)
    assert (Path(seen.folder) / "job.sbatch").is_file()


# --- the script -----------------------------------------------------------------------------------


def script(site: Site = SITE, **more: Any) -> str:
    job = job_from_mapping(
        {
            "name": "big",
            "command": ["true"],
            "setup": ["export A=b"],
            "resources": {
                "nodes": 64, "tasks_per_node": 8, "gpus_per_node": 8, "time": "2-0",
                "partition": "gpu", "account": "me",
            },
        }
    )  # fmt: skip
    asked = live_job(job, nodes=2, partition=None, qos="low", account=None)
    wanted = LiveWish(job=asked, site=site, runs=Path("/runs"), python="/opt/my python", **more)
    return live_script(wanted, Path("/runs/.x"))


def test_the_job_asks_for_its_place_and_not_for_its_size() -> None:
    text = script()
    for line in ("--partition=gpu", "--account=me", "--qos=low", "--nodes=2", "--time=00:04:00"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --ntasks-per-node=1\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --signal=USR2@200\n" in text
    assert text.index("export A=b") < text.index("exec '/opt/my python' -u -m")


def test_a_quick_look_asks_for_no_warning() -> None:
    text = script(quick=True)
    assert "--signal" not in text and "--quick" in text


def test_a_site_that_refuses_the_warning_is_looked_at_without_it() -> None:
    entry = {"option": "--signal", "why": "not here."}
    text = script(Site.model_validate({"name": "here", "rejected_options": [entry]}))
    assert "--signal" not in text and "--quick" in text


def test_what_the_site_requires_is_missed_before_anything_is_submitted(tmp_path: Path) -> None:
    entry = {"option": "--account", "why": "always."}
    site = Site.model_validate({"name": "here", "required_options": [entry]})
    slurm = Slurm()
    asked = LiveWish(
        job=live_job(None, nodes=1, partition=None, qos=None, account=None),
        site=site,
        runs=tmp_path / "runs",
        python=sys.executable,
    )
    with pytest.raises(ConfigError, match="account"):
        look_live(asked, slurm)  # type: ignore[arg-type]
    assert slurm.folder == Path() and list(tmp_path.iterdir()) == []


# --- meeting, and one node ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in ((CARD, b"the nonce"), (ONCE, b"")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    return tmp_path


@contextmanager
def answering(folder: Path) -> Iterator[None]:
    job = threading.Thread(target=answer, args=(folder,))
    job.start()
    try:
        yield
    finally:
        (folder / OVER).touch()
        job.join(30)
        assert not job.is_alive(), "the job goes on although it is over"


def test_two_sides_on_one_clock_find_no_difference(folder: Path) -> None:
    with answering(folder):
        found = meet(folder, lambda: True)
    assert found.clock_ahead_s is not None and found.clock_give_s is not None
    assert abs(found.clock_ahead_s) <= found.clock_give_s + 0.01
    assert found.seen_after_s is not None and found.seen_after_s < 20


def test_a_clock_that_is_ahead_is_measured(folder: Path) -> None:
    with answering(folder):
        found = meet(folder, lambda: True, wall=lambda: time.time() - 100.0)
    assert found.clock_ahead_s is not None and found.clock_give_s is not None
    assert abs(found.clock_ahead_s - 100.0) <= found.clock_give_s + 0.01


def test_nobody_answers_once_the_job_is_over(folder: Path) -> None:
    assert meet(folder, lambda: False).clock_ahead_s is None


def test_only_who_knows_the_nonce_is_let_in() -> None:
    with open_door("right") as addresses:
        port = addresses.rpartition(":")[2]
        (welcome,) = knock(f"127.0.0.1:{port}", "right")
        (foreign,) = knock(f"127.0.0.1:{port}", "wrong")
    assert welcome.connected_s is not None
    assert foreign.connected_s is None and foreign.problem


def test_a_node_without_srun_is_told_with_the_next_step(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurm_forge.process", "live_job", str(folder), "--quick"],
        env={"PATH": str(folder), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "srun can't be started: No such file or directory" in done.stderr
    assert "PATH" in done.stderr
    assert (folder / HERE).exists() and not (folder / REPORT).exists()


def test_storage_that_holds_what_it_promises(folder: Path) -> None:
    with exclusive(folder / LOGIN_LOCK, timedelta(0)):
        found = look_at_storage(folder, "n1")
    assert found.visible and found.writable and not found.problem
    assert (found.exclusive, found.lock_refused, found.no_locks) == (True, True, False)
    assert (folder / "from-n1").read_bytes() == b"the nonce"


def test_a_lock_that_is_not_seen_and_a_name_that_is_free_are_told(folder: Path) -> None:
    (folder / ONCE).unlink()
    found = look_at_storage(folder, "n1")
    assert (found.exclusive, found.lock_refused) == (False, False)


def test_a_folder_that_is_not_there_is_no_crash(tmp_path: Path) -> None:
    found = look_at_storage(tmp_path / "elsewhere", "n1")
    assert not found.visible and "No such file" in found.problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_only_be_read_is_told(folder: Path) -> None:
    folder.chmod(0o500)
    try:
        found = look_at_storage(folder, "n1")
    finally:
        folder.chmod(0o700)
    assert found.visible and not found.writable and found.problem


def test_commands_that_are_missing_are_told_from_those_that_do_not_answer(folder: Path) -> None:
    programs = folder / "bin"
    programs.mkdir()
    for name in ("scontrol", "squeue", "sbatch"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)

    def runner(argv: Any, timeout: timedelta, environment: Any) -> Completed:
        code = {"scontrol": 0, "squeue": None, "sbatch": 1}.get(argv[0], 1)
        return Completed(tuple(argv), code, "", "")

    environ = {"PATH": str(programs), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    found = inspect_node(folder, environ=environ, runner=runner)
    assert found.host == "n1"
    assert (found.commands, found.silent) == (("scontrol",), ("squeue",))
    assert (found.missing, found.may_submit, found.torch) == (("sacct",), False, None)


@pytest.mark.parametrize(
    ("given", "asked"),
    [({"SLURM_MEM_PER_NODE": "4000"}, 4000 << 20),
     ({"SLURM_MEM_PER_CPU": "1500", "SLURM_CPUS_ON_NODE": "4"}, 6000 << 20),
     ({"SLURM_MEM_PER_CPU": "1500"}, None), ({}, None)],
)  # fmt: skip
def test_memory_is_what_the_job_was_given(
    folder: Path, given: dict[str, str], asked: int | None
) -> None:
    def runner(argv: Any, timeout: timedelta, environment: Any) -> Completed:
        return Completed(tuple(argv), 1, "", "")

    assert inspect_node(folder, environ={"PATH": "", **given}, runner=runner).memory_asked == asked
