"""What a person wants a run's next start to ask of Slurm, other than the run was begun with."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.errors import ConfigError
from slurm_forge.launch.leaving import names_in
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.nodelist import expand_nodes, fold_nodes
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec import JobSpec, job_from_mapping
from slurm_forge.spec.loading import to_mapping
from slurm_forge.units import format_slurm_duration

__all__ = ["Asked", "Move", "arguments_of", "changed", "update_of"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Other values for ``resources``, as a job file has them; None leaves one as it is.

    ``exclude`` is added to what the job leaves out, and nothing is taken away from it.
    """

    mem: str | None = None
    time: str | None = None
    exclude: str | None = None
    partition: str | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.mem, self.time, self.exclude, self.partition))


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(JobUpdate):
    """An update that may put a waiting job into another ``partition`` (several with commas)."""

    partition: str | None = None

    def assignments(self) -> tuple[str, ...]:
        """As those of ``JobUpdate``, and the partition."""
        moved = () if self.partition is None else (f"Partition={self.partition}",)
        return (*JobUpdate.assignments(self), *moved)


def changed(job: JobSpec, asked: Asked) -> JobSpec:
    """The job as it is asked for; ``ConfigError`` names the key of a value that can't be."""
    if not asked:
        return job
    body = to_mapping(job)
    resources = dict(body["resources"])
    for key in ("mem", "time", "partition"):
        given = getattr(asked, key)
        if given is not None:
            resources[key] = given
    if asked.exclude is not None:
        own = names_in(job.resources.exclude)
        if own is None:
            raise ConfigError(
                f"the run leaves out the nodes of the file {job.resources.exclude}, to which "
                "nothing can be added here",
                next_step="Write them into that file.",
            )
        resources["exclude"] = fold_nodes(dict.fromkeys([*own, *expand_nodes(asked.exclude)]))
    return job_from_mapping({**body, "resources": resources})


def update_of(asked: Asked, now: JobSpec, record: JobRecord) -> JobUpdate:
    """What ``scontrol update`` is to say of the waiting job; ``now`` is the job as asked for.

    What somebody else has it leave out stays left out: Slurm replaces the whole list.
    """
    excluded = None
    if asked.exclude is not None:
        there = names_in(record.excluded_nodes) or ()
        excluded = tuple(sorted({*there, *(names_in(now.resources.exclude) or ())}))
    return Move(
        memory_per_node=None if asked.mem is None else now.resources.mem,
        time_limit=None if asked.time is None else now.resources.time,
        exclude_nodes=excluded,
        partition=None if asked.partition is None else now.resources.partition,
    )


def arguments_of(asked: Asked, now: JobSpec) -> tuple[str, ...]:
    """The same for sbatch, but for the nodes: it wins over the script and the recovery plan."""
    wanted, given = now.resources, []
    if asked.mem is not None and wanted.mem is not None:
        given.append(f"--mem={-(-wanted.mem // _MIB)}M")
    if asked.time is not None and wanted.time is not None:
        given.append(f"--time={format_slurm_duration(wanted.time)}")
    if asked.partition is not None and wanted.partition is not None:
        given.append(f"--partition={wanted.partition}")
    return tuple(given)
