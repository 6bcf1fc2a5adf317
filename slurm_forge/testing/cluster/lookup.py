"""Which process is what of a job: its ranks, its batch script, the daemons of its steps.

slurmstepd titles itself ``slurmstepd: [JOB.STEP]`` and is the parent of what it starts; tasks of
a step carry SLURM_STEP_ID and SLURM_PROCID, the batch script carries no SLURM_STEP_ID or, since
Slurm 26.05, that of SLURM_BATCH_SCRIPT.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_forge.testing.cluster import lifecycle, processes
from slurm_forge.testing.cluster.layout import Layout
from slurm_forge.testing.cluster.processes import ProcessRef

_BATCH_ID = "-5"


def step_daemons(
    layout: Layout, job_id: str, step: str | None = None, *, node: str | None = None
) -> tuple[ProcessRef, ...]:
    """The slurmstepd of a job, or of one of its steps (``0``, ``batch``), on all nodes or one."""
    titles = f"slurmstepd: [{job_id}.{step or ''}"
    daemons = []
    for daemon in lifecycle.step_daemons(layout, node):
        title = " ".join(processes.command_line(daemon)).strip()
        if title.startswith(titles) and (step is None or title == f"{titles}]"):
            daemons.append(daemon)
    return tuple(daemons)


def tasks(layout: Layout, job_id: str) -> Mapping[int, ProcessRef]:
    """The tasks of a job's running steps by rank: what srun was asked to start, not their children.

    With several steps at once, those of the newest.
    """
    tasks_by_rank: dict[int, tuple[int, ProcessRef]] = {}
    for process, settings in _direct(layout, job_id):
        step, rank = settings.get("SLURM_STEP_ID", ""), settings.get("SLURM_PROCID", "")
        if not (step.isdigit() and rank.isdigit()):
            continue
        if int(rank) not in tasks_by_rank or int(step) > tasks_by_rank[int(rank)][0]:
            tasks_by_rank[int(rank)] = int(step), process
    return {rank: process for rank, (_, process) in sorted(tasks_by_rank.items())}


def batch_script(layout: Layout, job_id: str) -> ProcessRef | None:
    """The process that the batch step started; None while there is none."""
    return next(
        (
            process
            for process, settings in _direct(layout, job_id)
            if settings.get("SLURM_STEP_ID", _BATCH_ID) == _BATCH_ID
        ),
        None,
    )


def _direct(layout: Layout, job_id: str) -> list[tuple[ProcessRef, Mapping[str, str]]]:
    """What the slurmstepds of a job started themselves, with the environment it was given."""
    daemons = {
        daemon.pid
        for daemon in lifecycle.step_daemons(layout)
        if " ".join(processes.command_line(daemon)).startswith(f"slurmstepd: [{job_id}.")
    }
    children = []
    for process in processes.with_environment(
        f"SLURM_CONF={layout.slurm_conf}", f"SLURM_JOB_ID={job_id}"
    ):
        if processes.parent(process) in daemons:
            children.append((process, processes.environment(process)))
    return children
