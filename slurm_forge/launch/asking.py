"""What a job asks of a site, for the site's rules to look at."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_forge.launch.gpu_options import gpu_options, gpus_per_node
from slurm_forge.site.model import Site
from slurm_forge.site.rules import Asked
from slurm_forge.spec import JobSpec

__all__ = ["asked_of"]


def asked_of(
    job: JobSpec,
    site: Site,
    options: Sequence[str] = (),
    *,
    default_partition: str | None = None,
    machine: str | None = None,
) -> Asked:
    """The request of a job; ``options`` are the lines that its script hands to sbatch.

    ``default_partition`` is where Slurm puts a job that names none.
    """
    wanted, container = job.resources, job.container
    names: list[str | None] = [name for name in (wanted.partition or "").split(",") if name]
    per_task = wanted.cpus_per_task
    return Asked(
        options=tuple(options),
        partitions=tuple(names or [default_partition]),
        qos=wanted.qos,
        account=wanted.account,
        constraint=gpu_options(wanted, site).constraint,
        nodes=wanted.allocation,
        gpus=gpus_per_node(wanted),
        cpus=None if per_task is None else per_task * wanted.tasks_per_node,
        memory=wanted.mem,
        time=wanted.time,
        chained=job.chain is not None,
        # In a container it is the image's Python that has to be one of theirs.
        machine=machine if container is None else None,
        runtime=None if container is None or container.runtime is None else container.runtime.value,
    )
