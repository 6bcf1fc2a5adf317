"""GPUs in the words of a site: one job file, whichever option the cluster wants them asked by.

What a job asks of a site, for the site's rules to look at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_forge.site.model import Site
from slurm_forge.site.parts import GpuRequest
from slurm_forge.site.rules import Asked, features_of, refuses
from slurm_forge.spec import JobSpec
from slurm_forge.spec.resources import Resources

#: Constraints that one more feature can simply be added to.
_PLAIN = re.compile(r"[^|\[\]()*,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """The values of the options that GPUs are asked by, None where one is not needed."""

    per_node: str | None = None
    per_task: str | None = None
    total: str | None = None
    gres: str | None = None
    constraint: str | None = None


def gpus_per_node(wanted: Resources) -> int | None:
    """How many GPUs a job asks for on each node; None where it asks for none."""
    if wanted.gpus_per_node is not None:
        return wanted.gpus_per_node.count
    if wanted.gpus_per_task is not None:
        return wanted.gpus_per_task.count * wanted.tasks_per_node
    found = re.findall(
        r"(?:^|,)gpu(?::[A-Za-z_][^:,(]*)?(?::([0-9]+))?(?:\([^)]*\))?(?=,|$)", wanted.gres or ""
    )
    return sum(int(number or 1) for number in found) if found else None


def gpu_options(wanted: Resources, site: Site) -> GpuOptions:
    """The options for the GPUs of a job at this site.

    The kind of GPU in the job file becomes the feature that the site asks for it by
    (``gpu_types``), the number the site's own option (``gpu_request``).  What the job says in
    another option than that stays, unless the site refuses it there.
    """
    given = wanted.gpus_per_node or wanted.gpus_per_task
    if given is None:
        return GpuOptions(gres=wanted.gres, constraint=wanted.constraint)
    feature = site.gpu_types.get(given.kind or "")
    kind = "" if given.kind is None or feature is not None else f"{given.kind}:"
    constraint = _with_feature(wanted.constraint, feature)
    count = gpus_per_node(wanted) or 0
    style = site.gpu_request
    per_task = wanted.gpus_per_task is not None and not refuses(site, "--gpus-per-task")
    if style is GpuRequest.NONE:
        return GpuOptions(gres=wanted.gres, constraint=constraint)
    if per_task or (style is GpuRequest.GPUS_PER_TASK and count % wanted.tasks_per_node == 0):
        each = count // wanted.tasks_per_node
        return GpuOptions(per_task=f"{kind}{each}", gres=wanted.gres, constraint=constraint)
    if style is GpuRequest.GRES:
        gres = ",".join(part for part in (f"gpu:{kind}{count}", wanted.gres) if part)
        return GpuOptions(gres=gres, constraint=constraint)
    if style is GpuRequest.GPUS and wanted.allocation == 1:
        return GpuOptions(total=f"{kind}{count}", gres=wanted.gres, constraint=constraint)
    return GpuOptions(per_node=f"{kind}{count}", gres=wanted.gres, constraint=constraint)


def _with_feature(constraint: str | None, feature: str | None) -> str | None:
    if feature is None or features_of(feature) <= features_of(constraint):
        return constraint
    if constraint is None:
        return feature
    if _PLAIN.fullmatch(constraint) and _PLAIN.fullmatch(feature):
        return f"{constraint}&{feature}"
    return constraint  # what the job says of its nodes is more than can be added to


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
