"""torchrun per node: what Slurm is asked for then, and where the nodes of a launch meet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

from slurm_forge.spec.launchers import Template
from slurm_forge.spec.resources import Resources
from slurm_forge.spec.run_file import RunFile
from slurm_forge.spec.types import GpuRequest

__all__ = ["by_torchrun", "for_torchrun", "meeting_port", "per_node", "ports"]

#: Below what Linux takes for outgoing connections by default, and away from torch's own 29400.
_FIRST, _NUMBER = 20_000, 9_000
#: Launches of a job lie so far apart, and jobs that follow each other too.
_PER_LAUNCH, _PER_JOB = 613, 7
_TRIES = 50


def by_torchrun(file: RunFile) -> bool:
    """Whether a run has one task per node, which starts the ranks."""
    return file.job.template is Template.TORCHRUN


def per_node(wanted: Resources) -> Resources:
    """The same in one task per node: the ranks of a node share what Slurm gives that task."""
    ranks, cpus, gpus = wanted.tasks_per_node, wanted.cpus_per_task, wanted.gpus_per_task
    changed: dict[str, object] = {"tasks_per_node": 1}
    if cpus is not None:
        changed["cpus_per_task"] = cpus * ranks
    if gpus is not None:
        changed["gpus_per_task"] = None
        changed["gpus_per_node"] = GpuRequest(gpus.count * ranks, gpus.kind)
    return wanted.model_copy(update=changed)


def ports(job: int, launch: int) -> Iterator[int]:
    """Ports to try for a launch, best first: other jobs on the node begin with others."""
    first = job * _PER_JOB + launch * _PER_LAUNCH
    for number in range(_TRIES):
        yield _FIRST + (first + number) % _NUMBER


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(("", port))
        return True
    return False


def meeting_port(
    job: int, launch: int, *, here: bool, free: Callable[[int], bool] = _is_free
) -> int:
    """Where torchrun's agents meet on the first node; looked at only where that is this one."""
    tried = ports(job, launch)
    first = next(tried)
    if not here or free(first):
        return first
    return next((port for port in tried if free(port)), first)


def for_torchrun(
    variables: dict[str, str], file: RunFile, *, master: str, port: int
) -> dict[str, str]:
    """What torchrun and its ranks are told in addition.

    What sbatch has taken along of a meeting elsewhere must not stay; what the job file says does.
    """
    found = dict(variables)
    found["MASTER_ADDR"] = file.job.env.get("MASTER_ADDR", master)
    found["MASTER_PORT"] = file.job.env.get("MASTER_PORT", str(port))
    cpus = file.job.resources.cpus_per_task
    if cpus is not None:
        found.setdefault("OMP_NUM_THREADS", str(cpus))
    return found
