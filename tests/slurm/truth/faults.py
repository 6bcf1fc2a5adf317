"""What goes wrong, done to a job on a real Slurm: whoever trains in it, and however.

A fault knows the cluster, the job and two things about training (``Target``): so the same one
strikes a run of ours and a job of stock submitit.  What a rank does to itself is not here: that
is in the words under ``misbehave`` of the training's arguments (``tests.jobs.misbehave``).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.cluster.processes import ProcessRef, kill
from tests.slurm.harness import worker_of

#: Training is this far when most faults strike: behind a checkpoint, and not at one.
STEP = 15
_HELD_S = 60.0


class Target(Protocol):
    """A job that a fault strikes."""

    @property
    def cluster(self) -> SlurmCluster:
        """Where it runs."""

    @property
    def job(self) -> str:
        """The job's id; that of the successor once there is one."""

    @property
    def folder(self) -> Path:
        """A folder of its own: what it writes goes into ``runs_folder(folder)``."""

    @property
    def over(self) -> contextlib.ExitStack:
        """What is put back to order when the job is over, for good."""

    def stop(self) -> None:
        """A person asks for the run to save and stop."""

    def wait_step(self, step: int, *, start: int = 1) -> None:
        """Until the ``start``-th start of the job has done ``step`` steps."""

    def wait_start(self, start: int = 1) -> None:
        """Until the ``start``-th start of the job runs and its ranks have been started."""

    def wait_reaction(self, seconds: float) -> bool:
        """Until something has come of the fault (a restart, an end); False if nothing has."""


#: What happens; back when it is done.
Fault = Callable[[Target], None]
#: Surroundings that have to be there before the job is submitted.
Preparation = Callable[[SlurmCluster, Path], "contextlib.AbstractContextManager[None]"]


def runs_folder(folder: Path) -> Path:
    """Where a job keeps what must outlive it: the file system that storage faults strike."""
    return folder / "runs"


def nothing(target: Target) -> None:
    """Nobody does anything from outside."""


# --- preemption ---------------------------------------------------------------------------------


def preempted(target: Target) -> None:
    """In the middle of training."""
    target.wait_step(STEP)
    target.cluster.preempt(target.job)


def preempted_early(target: Target) -> None:
    """While ranks start up: no step was done."""
    target.wait_start()
    target.cluster.preempt(target.job)


def preempted_late(target: Target) -> None:
    """In the last fifth of the time limit."""
    target.wait_start()
    record = target.cluster.job(target.job)
    begin, end = (
        datetime.datetime.fromisoformat(record.field(name) or "").timestamp()
        for name in ("StartTime", "EndTime")
    )
    late = begin + 0.8 * (end - begin)
    target.cluster.wait_for(lambda: time.time() >= late, end - begin, "the last fifth of the limit")
    target.cluster.preempt(target.job)


def preempted_in_a_long_step(target: Target) -> None:
    """While a step runs that outlasts all that is given: see ``long_step`` of the arguments."""
    target.wait_step(STEP)
    target.cluster.preempt(target.job)


def preempted_not_requeueable(target: Target) -> None:
    """The job's Requeue flag is off, as where a site forbids it: nobody can requeue it."""
    target.wait_step(3)
    target.cluster.run("scontrol", "update", f"JobId={target.job}", "Requeue=0")
    preempted(target)


def preempted_before_any_step(target: Target, times: int = 3) -> None:
    """Again and again, each time as soon as ranks run."""
    for number in range(1, times + 1):
        target.wait_start(number)
        target.cluster.preempt(target.job)


# --- the time limit -----------------------------------------------------------------------------


def limit_shortened(target: Target) -> None:
    """An administrator gives the running job two minutes in all."""
    target.wait_step(3)
    target.cluster.run("scontrol", "update", f"JobId={target.job}", "TimeLimit=2")


# --- nodes --------------------------------------------------------------------------------------


def _other_node(target: Target) -> str:
    """The last node of the job: not the one that its batch script runs on."""
    return target.cluster.nodes_of(target.job)[-1]


def _batch_host(target: Target) -> str:
    return target.cluster.job(target.job).field("BatchHost") or ""


def node_killed(target: Target) -> None:
    """A node loses power."""
    target.wait_step(STEP)
    node = _other_node(target)
    target.over.callback(target.cluster.restart_node, node)
    target.cluster.kill_node(node)


def batch_node_killed(target: Target) -> None:
    """The node of the batch script loses power."""
    target.wait_step(STEP)
    node = _batch_host(target)
    target.over.callback(target.cluster.restart_node, node)
    target.cluster.kill_node(node)


def node_drained(target: Target) -> None:
    """An administrator drains a node: whoever runs there may finish."""
    target.wait_step(STEP)
    node = _other_node(target)
    target.over.callback(_resume, target.cluster, node)
    target.cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fan")


def node_set_down(target: Target) -> None:
    """An administrator takes a node down at once."""
    target.wait_step(STEP)
    node = _other_node(target)
    target.over.callback(_resume, target.cluster, node)
    target.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=fan")


def _resume(cluster: SlurmCluster, node: str) -> None:
    cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)


def slurmd_frozen(target: Target) -> None:
    """Slurm hears nothing of a node any more, whose ranks go on."""
    _frozen(target, _other_node)


def batch_slurmd_frozen(target: Target) -> None:
    """The same for the node of the batch script: all that conducts the run goes on as well."""
    _frozen(target, _batch_host)


def _frozen(target: Target, which: Callable[[Target], str]) -> None:
    target.wait_step(STEP)
    node = which(target)
    target.over.callback(target.cluster.thaw_node, node)
    target.cluster.freeze_node(node)


# --- processes ----------------------------------------------------------------------------------


def rank_killed(target: Target) -> None:
    """SIGKILL to one rank, by nobody who would say so."""
    target.wait_step(STEP)
    os.kill(worker_of(target.cluster.tasks(target.job)[1].pid), signal.SIGKILL)


def batch_shell_killed(target: Target) -> None:
    """SIGKILL to the batch script: in ours that is the supervisor."""
    target.wait_step(STEP)
    script = target.cluster.batch_script(target.job)
    assert script is not None, "no batch script runs"
    kill(script, signal.SIGKILL)


def srun_killed(target: Target) -> None:
    """SIGKILL to the srun of the ranks: Slurm ends all of them for that."""
    target.wait_step(STEP)
    script = target.cluster.batch_script(target.job)
    assert script is not None, "no batch script runs"
    below, found = {script.pid}, list[int]()
    for pid, parent, name in sorted(_processes()):
        if parent in below:
            below.add(pid)
            found += [pid] if name == "srun" else []
    assert found, "no srun runs below the batch script"
    os.kill(found[0], signal.SIGKILL)  # the second one is its helper, a child of the first


def everything_killed(target: Target) -> None:
    """SIGKILL to the batch script and every rank at once: nobody is left who could say why."""
    target.wait_step(STEP)
    script = target.cluster.batch_script(target.job)
    assert script is not None, "no batch script runs"
    ranks = [task.pid for task in target.cluster.tasks(target.job).values()]
    below = {*ranks}
    for pid, parent, _ in sorted(_processes()):
        if parent in below:
            below.add(pid)
    kill(script, signal.SIGKILL)
    for pid in sorted(below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stopped_while_waiting(target: Target) -> None:
    """``slurm-forge stop`` of a run that was preempted and waiting to start again."""
    preempted(target)
    target.cluster.wait_state(target.job, {"PENDING"}, 60)
    target.stop()


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process id, parent and command name of every process here."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                yield int(entry.name), int(rest.split()[1]), name


def step_daemon_killed(target: Target) -> None:
    """SIGKILL to the slurmstepd of a node: its rank is nobody's child any more."""
    target.wait_step(STEP)
    (daemon, *_) = _step_daemons_of_ranks(target, _other_node(target))
    kill(daemon, signal.SIGKILL)


def _step_daemons_of_ranks(target: Target, node: str) -> list[ProcessRef]:
    batch = set(target.cluster.step_daemons(target.job, "batch"))
    extern = set(target.cluster.step_daemons(target.job, "extern"))
    every = target.cluster.step_daemons(target.job, node=node)
    return [daemon for daemon in every if daemon not in batch | extern]


# --- storage ------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(cluster: SlurmCluster, folder: Path) -> Iterator[None]:
    """What the job keeps lies on a file system of 100 MB, which a fault can fill or break."""
    image, place = folder / "disk.img", runs_folder(folder)
    place.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(100 << 20)
    _root("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", str(image))
    _root("mount", "-o", "loop,errors=remount-ro", str(image), str(place))
    place.chmod(0o700)
    shutil.rmtree(place / "lost+found", ignore_errors=True)
    try:
        yield
    finally:
        _root("umount", "--lazy", str(place))
        image.unlink()


def _root(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout.strip()


def disk_full(target: Target) -> None:
    """No byte is left on the run's file system; room is made once something has come of it."""
    target.wait_step(STEP)
    ballast = runs_folder(target.folder) / "somebody-elses"
    _fill(ballast)
    target.wait_reaction(30)
    ballast.unlink()


def disk_full_for_good(target: Target) -> None:
    """No byte is left on the run's file system, and nobody makes room."""
    target.wait_step(STEP)
    _fill(runs_folder(target.folder) / "somebody-elses")


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        block = b"\0" * (1 << 20)
        while block:
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]


def read_only(target: Target) -> None:
    """The kernel takes the run's file system read-only, as it does after an error of a disk."""
    target.wait_step(STEP)
    place = runs_folder(target.folder)
    device = Path(_root("findmnt", "-n", "-o", "SOURCE", str(place))).name
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("on purpose\n")


# --- people -------------------------------------------------------------------------------------


def job_cancelled(target: Target) -> None:
    """The user's scancel of the job."""
    target.wait_step(STEP)
    target.cluster.run("scancel", target.job)


def step_cancelled(target: Target) -> None:
    """The user's scancel of the step that trains."""
    target.wait_step(STEP)
    target.cluster.run("scancel", f"{target.job}.0")


def requeued_by_administrator(target: Target) -> None:
    """scontrol requeue from outside."""
    target.wait_step(STEP)
    target.cluster.run("scontrol", "requeue", target.job)


def requeued_and_held(target: Target) -> None:
    """scontrol requeuehold: the job waits until somebody releases it, which is done then."""
    target.wait_step(STEP)
    target.cluster.run("scontrol", "requeuehold", target.job)
    _release_when_held(target)


def held_and_preempted(target: Target) -> None:
    """scontrol hold while it runs, which changes nothing; preempted, it waits for its release."""
    target.wait_step(STEP)
    target.cluster.run("scontrol", "hold", target.job)
    target.cluster.preempt(target.job)
    _release_when_held(target)


def _release_when_held(target: Target) -> None:
    def waits_held() -> bool:
        record = target.cluster.job(target.job)
        return record.state == "PENDING" and "held" in record.reason.lower()

    target.cluster.wait_for(waits_held, _HELD_S, "the job to wait, held")
    target.cluster.run("scontrol", "release", target.job)


# --- Slurm's own daemons ------------------------------------------------------------------------


def controller_away(target: Target) -> None:
    """The controller goes, ranks are asked to stop, and it is back a while after they have."""
    target.wait_step(STEP)
    with target.cluster.stopped_controller():
        _terminate_ranks(target)
        # This is how long it is away, and nothing is waited for.
        time.sleep(15)


def controller_gone(target: Target) -> None:
    """The controller goes, ranks are asked to stop, and it is not back before the job is over."""
    target.wait_step(STEP)
    with target.cluster.stopped_controller():
        _terminate_ranks(target)
        script = target.cluster.batch_script(target.job)
        target.cluster.wait_for(
            lambda: script is None or target.cluster.batch_script(target.job) != script,
            420,
            "the batch script to give up",
        )


def _terminate_ranks(target: Target) -> None:
    for process in target.cluster.tasks(target.job).values():
        kill(process, signal.SIGTERM)


def preempted_without_database(target: Target) -> None:
    """slurmdbd is away from before the preemption until the run is over."""
    target.wait_step(5)
    target.over.enter_context(target.cluster.stopped_database())
    preempted(target)


# --- missing commands ---------------------------------------------------------------------------


def commands_without(folder: Path, missing: str, path: str) -> Path:
    """A folder with a link to every command on ``path`` but one: to be the job's whole PATH."""
    place = folder / f"without-{missing}"
    place.mkdir(parents=True, exist_ok=True)
    for directory in path.split(":"):
        if not Path(directory).is_dir():
            continue
        for command in Path(directory).iterdir():
            link = place / command.name
            if command.name != missing and not link.is_symlink():
                link.symlink_to(command)
    return place
