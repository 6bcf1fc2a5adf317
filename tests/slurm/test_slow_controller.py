"""Whatever ends a job while Slurm answers late: never dead, never revived after a scancel.

The real counterpart of tests/unit/launch/test_evidence_matrix.py: scontrol is slow, fails, or is
not answered at all from the moment of the notice on.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from pathlib import Path

import pytest

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.launch.requeue.reconcile import reconcile
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from tests.slurm.harness import REPOSITORY, Watched, environment, submit

pytestmark = [pytest.mark.slurm]

STEPS = 160


class End(str, Enum):
    PREEMPTION = "preemption"
    SCANCEL = "scancel"
    ADMIN_REQUEUE = "requeue"
    TIME_LIMIT = "time-limit"
    NODE_DOWN = "node-down"


class Front(str, Enum):
    RANKS = "ranks"
    EXEC = "exec"


#: What scontrol does: sleeps so many seconds first, or fails as it does without a controller.
ERROR = "error"
RIGHT = {
    End.PREEMPTION: {Cause.PREEMPTED},
    End.SCANCEL: {Cause.USER_CANCELLED},
    End.ADMIN_REQUEUE: {Cause.ADMIN_REQUEUE},
    End.TIME_LIMIT: {Cause.TIME_LIMIT},
    # What a rank that is gone looks like before Slurm itself has given the node up.
    End.NODE_DOWN: {Cause.NODE_FAIL, Cause.CRASH},
}
IN_CI = {(End.SCANCEL, "4", Front.EXEC)}
CELLS = [
    pytest.param(*cell, id="-".join(cell), marks=() if cell in IN_CI else (pytest.mark.slow,))
    for cell in itertools.product(End, ("4", "20", ERROR), Front)
]


class SlowScontrol:
    """A folder for the front of a job's PATH; ``become`` says how its scontrol answers from now."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder = folder / "slow"
        self.folder.mkdir(parents=True)
        self._how = folder / "how"
        real = shutil.which("scontrol", path=path)
        assert real is not None
        script = self.folder / "scontrol"
        script.write_text(
            "#!/bin/bash\n"
            f"how=$(cat {shlex.quote(str(self._how))} 2>/dev/null)\n"
            f'if [ "$how" = {ERROR} ]; then\n'
            '    echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1\n'
            "fi\n"
            '[ -z "$how" ] || sleep "$how"\n'
            f'exec {real} "$@"\n'
        )
        script.chmod(0o755)

    def become(self, how: str) -> None:
        self._how.write_text(how)

    def recover(self) -> None:
        self._how.unlink()


def started(
    cluster: SlurmCluster, folder: Path, slow: SlowScontrol, end: End, front: Front
) -> Watched:
    """The run, training, of ranks of ours or of a program that knows nothing of us."""
    partition = "preempt" if end is End.PREEMPTION else "normal"
    minutes = 1 if end is End.TIME_LIMIT else 10
    if front is Front.RANKS:
        watched = submit(
            cluster, folder, name="run", partition=partition, nodes=2, minutes=minutes,
            args={"steps": STEPS, "pace": 0.5, "later_pace": 0.02},
            setup=[f"export PATH={slow.folder}:$PATH"],
        )  # fmt: skip
        watched.wait_step(3)
        return watched
    out, runs = folder / "out", folder / "runs"
    job = cluster.sbatch(
        REPOSITORY / "examples" / "exec" / "loop.sbatch",
        f"--partition={partition}", f"--output={folder}/slurm-%j.out", f"--time={minutes}",
        cwd=REPOSITORY,
        settings={
            "PATH": f"{slow.folder}:{Path(sys.executable).parent}:{cluster.env['PATH']}",
            "OUT": str(out), "STEPS": "60", "SLURM_FORGE_RUNS": str(runs),
            "SLURM_FORGE_NODES": "off",
        },
    )  # fmt: skip
    cluster.wait_for((out / "done").exists, 60, "the program's first steps")
    run = RunDirectory.at(runs / "loop-demo")
    return Watched(cluster, run, read_run_file(run.spec_file), job)


def strike(cluster: SlurmCluster, watched: Watched, end: End) -> None:
    match end:
        case End.PREEMPTION:
            cluster.preempt(watched.job)
        case End.SCANCEL:
            cluster.run("scancel", watched.job)
        case End.ADMIN_REQUEUE:
            cluster.run("scontrol", "requeue", watched.job)
        case End.NODE_DOWN:
            cluster.kill_node(cluster.nodes_of(watched.job)[-1])
        case End.TIME_LIMIT:
            pass


def carried_out(watched: Watched) -> bool:
    """What a watcher on the login node does once Slurm answers."""
    if watched.state.open_intent is None:
        return False
    with environment(watched.cluster):
        slurm = SubprocessSlurm.of_this_process()
        return reconcile(watched.run, slurm, by_person=False).changed


@pytest.mark.parametrize(("end", "how", "front"), CELLS)
def test_a_stop_while_scontrol_answers_late(
    slurm: SlurmCluster, tmp_path: Path, end: End, how: str, front: Front
) -> None:
    if front is Front.EXEC and end is End.NODE_DOWN:
        pytest.skip("the program runs on one node, whose end nobody outlives")
    slow = SlowScontrol(tmp_path, slurm.env["PATH"])
    watched = started(slurm, tmp_path, slow, end, front)
    slow.become(how)
    strike(slurm, watched, end)

    def is_over() -> bool:
        record = slurm.job(watched.job)
        again = len(watched.state.attempts) > 1
        return again or (record.state not in ("RUNNING", "COMPLETING") and record.restarts == 0)

    slurm.wait_for(is_over, 150, "the end of the first attempt")
    slow.recover()
    if end is End.SCANCEL:
        assert not carried_out(watched)
        slurm.wait_state(watched.job, ["CANCELLED"], 30)
        assert watched.state.status is RunStatus.CANCELLED, watched.story()
        assert len(watched.state.attempts) == 1, watched.story()
    else:
        _comes_back(watched)
    for attempt in watched.state.attempts:
        for _, incident in attempt.incidents:
            known = incident.confidence is not Confidence.GUESS
            assert not known or incident.cause in RIGHT[end], watched.story()


def _comes_back(watched: Watched) -> None:
    def finished(state: RunState) -> bool:
        # Whoever left the intent open may have been killed before it could say so.
        over = watched.cluster.job(watched.job).state not in ("RUNNING", "COMPLETING", "PENDING")
        if state.open_intent is not None and over:
            carried_out(watched)
        return state.status is RunStatus.FINISHED

    watched.wait(finished, 150, "the end of the run")


@pytest.mark.parametrize("how", ["controller", "grace-of-5-s"])
@pytest.mark.slow
def test_a_controller_that_is_away_at_the_notice(
    slurm: SlurmCluster, tmp_path: Path, how: str
) -> None:
    """slurmctld no progress for most of the grace time, right after it has sent the notice."""
    grace = timedelta(seconds=30 if how == "controller" else 5)
    partitions = tuple(
        replace(each, grace_time=grace) if each.name == "preempt" else each
        for each in slurm.spec.partitions
    )
    with slurm.configured(replace(slurm.spec, partitions=partitions)):
        watched = submit(
            slurm, tmp_path, name="run", partition="preempt", nodes=2,
            args={"steps": STEPS, "pace": 0.2, "later_pace": 0.02},
        )  # fmt: skip
        watched.wait_step(3)
        seen: Callable[[RunState], bool] = lambda s: bool(s.attempts[0].notices)  # noqa: E731
        slurm.preempt(watched.job)
        watched.wait(seen, 30, "the notice")
        with slurm.frozen_controller():
            watched.wait(lambda s: s.open_intent is not None, 20, "the durable intent")
        _comes_back(watched)
    causes = [incident.cause for _, incident in watched.state.attempts[0].incidents]
    assert causes == [Cause.PREEMPTED], watched.story()


@pytest.mark.slow
def test_a_scancel_in_the_moment_of_the_notice(slurm: SlurmCluster, tmp_path: Path) -> None:
    """PreemptTime stays set, and the job is the person's to end all the same."""
    watched = submit(
        slurm, tmp_path, name="run", partition="preempt", nodes=2,
        args={"steps": STEPS, "pace": 0.2, "later_pace": 0.02},
    )  # fmt: skip
    watched.wait_step(3)
    slurm.preempt(watched.job)
    slurm.run("scancel", watched.job)
    slurm.wait_state(watched.job, ["CANCELLED"], 60)
    watched.wait(lambda s: s.status is RunStatus.CANCELLED, 30, "the run to be cancelled")
    assert slurm.job(watched.job).restarts == 0
    assert len(watched.state.attempts) == 1, watched.story()
