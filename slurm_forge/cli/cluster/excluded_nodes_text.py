"""The nodes that a submission excludes, in words."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_forge.cli.cluster.nodes_text import leaves_out
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.launch.nodes.excluded_nodes import (
    Exclusion,
    exclusion_at_submission,
    exclusion_now,
)
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import PartitionRecord
from slurm_forge.spec import JobSpec

_MOST_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class ExcludedNodes:
    """Nodes for sbatch, the job's own included (none: as the job says), and notes for people."""

    exclude: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def left_out(
    job: JobSpec, site: Site, cluster: str | None, partitions: Iterable[PartitionRecord]
) -> ExcludedNodes:
    """The nodes to exclude from a job submitted now, to the cluster with these partitions."""
    knobs = Knobs.from_environ(process_environ())
    return _as_excluded(
        exclusion_at_submission(job, site, knobs=knobs, cluster=cluster, partitions=partitions)
    )


def left_out_now(slurm: Slurm, job: JobSpec, site: Site) -> ExcludedNodes:
    """As ``left_out``, querying Slurm if there is one; empty if it does not answer."""
    return _as_excluded(exclusion_now(slurm, job, site, Knobs.from_environ(process_environ())))


def _as_excluded(exclusion: Exclusion) -> ExcludedNodes:
    problems = exclusion.problems[:_MOST_PROBLEMS]
    if not exclusion.nodes:
        return ExcludedNodes(notes=problems)
    return ExcludedNodes(exclusion.exclude, (leaves_out(exclusion.nodes, time.time()), *problems))
