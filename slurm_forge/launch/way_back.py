"""The way back of an attempt that has a job of its own: a ladder, and who climbs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from slurm_forge.journal import JournalWriter
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt import Attempt
from slurm_forge.launch.chain import chain_of
from slurm_forge.launch.chain_ladder import ChainLadder
from slurm_forge.launch.coming_back import ComingBack
from slurm_forge.launch.job_watch import JobWatch
from slurm_forge.launch.ladder import Explain, Ladder
from slurm_forge.launch.outputs import Output
from slurm_forge.launch.stop_explanation import StopExplanation
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.spec.run_file import RunFile

__all__ = ["ladder_of", "way_back"]


def ladder_of(
    file: RunFile,
    slurm: Slurm,
    *,
    job: str,
    restart_count: int,
    script: Path | None,
    journal: JournalWriter,
    fence: Callable[[], None],
    patience: timedelta,
    successor: str | None = None,
    explain: Explain | None = None,
) -> Ladder:
    """The ladder of the run in ``file``, whose attempt is the ``job``."""
    chain = chain_of(job, file.job.chain, slurm)
    if chain is None:
        return Ladder(
            slurm,
            job=job,
            restart_count=restart_count,
            script=script,
            journal=journal,
            fence=fence,
            successor=successor,
            patience=patience,
            only_hold=file.only_hold,
            explain=explain,
        )
    return ChainLadder(
        slurm,
        chain=chain,
        job=job,
        restart_count=restart_count,
        script=script,
        journal=journal,
        fence=fence,
        successor=successor,
        patience=patience,
        only_hold=file.only_hold,
        explain=explain,
    )


def way_back(
    attempt: Attempt,
    slurm: Slurm,
    environment: SlurmEnvironment,
    watch: JobWatch,
    *,
    variables: Mapping[str, str],
    script: Path | None,
    signals: Callable[[], tuple[str, ...]],
    output: Output | None = None,
) -> ComingBack:
    """How this attempt's run comes back; the newest record of the job is what ``watch`` has seen.

    ``script`` is what a successor is submitted with, None where there is none.  ``signals`` are
    those for the batch step since the last launch ended, ``output`` is where slurmstepd writes.
    """
    ladder = ladder_of(
        attempt.file,
        slurm,
        job=environment.job_ref,
        restart_count=environment.restart_count,
        script=script,
        journal=attempt.journal,
        fence=attempt.fence,
        successor=attempt.state().successor_of(environment.job_ref),
        patience=attempt.file.job.recovery.limits.controller_patience,
        explain=StopExplanation(slurm, attempt, signals, output=output),
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
