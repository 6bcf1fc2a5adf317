"""The way back of an attempt that has a job of its own: a ladder, and who climbs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt import Attempt
from slurm_forge.launch.coming_back import ComingBack
from slurm_forge.launch.job_watch import JobWatch
from slurm_forge.launch.ladder import Ladder
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.environment import SlurmEnvironment

__all__ = ["way_back"]


def way_back(
    attempt: Attempt,
    slurm: Slurm,
    environment: SlurmEnvironment,
    watch: JobWatch,
    *,
    variables: Mapping[str, str],
    script: Path | None,
) -> ComingBack:
    """How this attempt's run comes back; the newest record of the job is what ``watch`` has seen.

    ``script`` is what a successor is submitted with, None where there is none.
    """
    job = environment.job_ref
    ladder = Ladder(
        slurm,
        job=job,
        restart_count=environment.restart_count,
        script=script,
        journal=attempt.journal,
        fence=attempt.fence,
        successor=attempt.state().successor_of(job),
        patience=attempt.file.job.recovery.limits.controller_patience,
        only_hold=attempt.file.only_hold,
    )
    return ComingBack(
        attempt,
        ladder,
        slurm,
        nodes=environment.nodes,
        partition=environment.partition,
        cluster=environment.cluster_name,
        knobs=Knobs.from_environ(variables),
        latest=lambda: watch.latest,
    )
