"""Two attempts on nodes whose clocks differ by an hour: every wall clock that Python reads is off.

Not by libfaketime: under that of Debian (0.9.10) either ``time.sleep`` fails with EINVAL or
``threading.Event.wait`` never returns, by whether it leaves the monotonic clock alone.

The time limit is shorter than the clocks differ: by a clock that is ahead it is over at once.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from slurm_forge.journal import RunState
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.records import AccountingRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.trust import Trust
from tests.jobs import consumed
from tests.slurm.harness import Watched, environment, submit

pytestmark = [pytest.mark.slurm]

STEPS = 80
#: Bad samples: the run rolls back once, halves the learning rate and leaves them out.
POISON = "nan:samples=480-527"
#: Of supervisor and ranks, which are all interpreters of the job.
CLOCK = """
import datetime, os, time
_time, _ahead = time.time, float(os.environ["CLOCK_AHEAD_S"])
time.time = lambda: _time() + _ahead
class _Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = _Datetime
"""


def started(
    cluster: SlurmCluster, folder: Path, *, pace: float, ahead_s: tuple[int, int] = (0, 0)
) -> Watched:
    """The run; ``ahead_s`` is by how much the clocks of its first and later starts are ahead."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK)
    first, later = ahead_s
    return submit(
        cluster, folder, name="clocks", nodes=2, partition="preempt", minutes=30,
        setup=[
            f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}",
            f"export CLOCK_AHEAD_S=$([ ${{SLURM_RESTART_COUNT:-0}} = 0 ] && echo {first}"
            f" || echo {later})",
        ],
        args={"steps": STEPS, "pace": pace, "later_pace": 0.01}, inject=[POISON],
        checkpoint={"every_steps": 10, "every_minutes": None, "good_after_steps": 15},
    )  # fmt: skip


def suspects(state: RunState) -> set[str]:
    return {str(each.name) for each in state.known if each.trust is Trust.SUSPECT}


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [(3600, 0), (0, 3600)], ids=["first-ahead", "first-behind"])
def test_clocks_that_differ_by_an_hour_change_nothing(
    slurm: SlurmCluster, tmp_path: Path, ahead_s: tuple[int, int]
) -> None:
    undisturbed = started(slurm, tmp_path / "undisturbed", pace=0.0)
    reference = undisturbed.wait_finished()
    watched = started(slurm, tmp_path / "disturbed", pace=0.2, ahead_s=ahead_s)
    before = watched.wait_step(45, seconds=120)
    slurm.preempt(watched.job)
    state = watched.wait_finished()

    first, second = state.attempts
    assert (second.started < first.started) is (ahead_s[0] > 0), "the clocks were not off"
    assert abs(second.started - first.started) > 3000
    assert [each.cause for _, each in first.incidents] == [Cause.NON_FINITE, Cause.PREEMPTED]
    assert second.incidents == ()
    assert state.fenced == ()
    assert before.plan.lr_factor == 0.5 and before.spent
    # What was spent is free again once training is past the trouble.
    assert (state.plan, state.spent) == (reference.plan, reference.spent)
    assert suspects(before)
    still_known = {str(each.name) for each in state.known}
    assert suspects(before) & still_known <= suspects(state)
    assert consumed(watched.run.path) == consumed(undisturbed.run.path)
    assert watched.digest() == undisturbed.digest()
    told = subprocess.run(
        [sys.executable, "-m", "slurm_forge.cli.main", "explain", str(watched.run.path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    # A second attempt that is ahead looks like one that has waited for an hour.
    assert ("the clocks of attempts 1 and 2 differ by" in told) is (ahead_s[0] > 0), told


def is_running(slurm: SlurmCluster, job: str, restarts: int) -> bool:
    record = slurm.job(job)
    return (record.state, record.restarts) == ("RUNNING", restarts)


def test_accounting_tells_the_starts_of_a_job_apart_by_their_submit_time(
    slurm: SlurmCluster,
) -> None:
    """What recovery.endings rests on: the earliest first, and the last row is the record's."""
    job = slurm.sbatch("sleep 600", "--requeue", "--partition=normal")
    for restarts in range(3):
        slurm.wait_for(partial(is_running, slurm, job, restarts), 60, f"start {restarts + 1}")
        if restarts < 2:
            slurm.run("scontrol", "requeue", job)
    with environment(slurm):
        client = SubprocessSlurm.of_this_process()

        def starts() -> list[AccountingRecord]:
            return [row for row in client.accounting(job) if row.step is None]

        slurm.wait_for(lambda: starts()[-1].state is JobState.RUNNING, 30, "accounting")
        rows, record = starts(), client.show_job(job)
    assert record is not None and record.restarts == 2
    assert [row.state for row in rows] == [JobState.REQUEUED, JobState.REQUEUED, JobState.RUNNING]
    submitted = [row.submit_time for row in rows if row.submit_time is not None]
    assert len(rows) == len(set(submitted)) and submitted == sorted(submitted)
    assert submitted[-1] == record.submit_time
