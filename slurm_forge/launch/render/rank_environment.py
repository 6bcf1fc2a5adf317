"""The environment that the ranks of a launch are started with, and what of it needs telling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slurm_forge.control.interfaces import interface_of
from slurm_forge.knobs import without_torchrun
from slurm_forge.site.variables import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    VariableDifference,
    VariableDifferenceKind,
    differences,
    effective,
    settled,
)
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Incident
from slurm_forge.vocabulary.plan import RecoveryPlan, Variable

_MASTER = "MASTER_ADDR"
#: What sbatch leaves of its ``--export`` for every srun of the job to go by.
_EXPORT = "SLURM_EXPORT_ENV"
#: Incidents that a forbidden variable may have a part in.
_NETWORK = frozenset({Cause.HANG, Cause.NCCL_ERROR})


def for_launch(file: RunFile, own: Mapping[str, str], plan: RecoveryPlan) -> dict[str, str]:
    """The environment for our srun: the site's < what is ``own`` < the job file's.

    Of a job that was submitted with ``--export=NONE`` srun would hand next to nothing on: that
    option is for what the job takes along from where it was submitted, and what its script has set
    since is meant for the ranks.
    """
    environment = settled(file.env, own, file.job.env, plan.variables)
    if _EXPORT in environment and _EXPORT not in file.job.env:
        environment[_EXPORT] = "ALL"
    return environment


def for_command(
    file: RunFile,
    own: Mapping[str, str],
    plan: RecoveryPlan,
    *,
    master: str | None,
    interfaces: tuple[str, ...],
) -> dict[str, str]:
    """The environment for a command that knows nothing of us, and starts its ranks itself.

    ``master`` is what the site has torchrun's ``MASTER_ADDR`` be (``launch.master``).  Where the
    site names its fast network gloo is told the interface.  In both cases only if the person has
    not said it.
    """
    environment = settled(file.env, own, file.job.env, plan.variables)
    if master is not None:
        environment.setdefault(_MASTER, master)
    if file.socket_interface is not None and GLOO_INTERFACE not in environment:
        # Its ranks run on other nodes, too: only a name that is whole is the same on all of them.
        name = interface_of(file.socket_interface, interfaces)
        if name is not None and name in file.socket_interface.lstrip("=").split(","):
            environment[GLOO_INTERFACE] = name
    return environment


def as_submitted(
    file: RunFile,
    here: Mapping[str, str],
    plan: RecoveryPlan,
    *,
    interfaces: tuple[str, ...],
) -> dict[str, str]:
    """The environment of a rank (``here``) without what was added for its launch and its node.

    sbatch hands on what it is called with: in a successor that would count as the person's own,
    and stay for good.
    """
    environment = without_torchrun(here)
    for each in plan.variables:
        if environment.get(each.name) == each.value and each.name not in file.job.env:
            del environment[each.name]
            if each.name in file.env:
                environment[each.name] = file.env[each.name]
    if file.socket_interface is not None and GLOO_INTERFACE not in file.job.env:
        interface = environment.get(NCCL_INTERFACE) or file.socket_interface
        if environment.get(GLOO_INTERFACE, "") == interface_of(interface, interfaces):
            del environment[GLOO_INTERFACE]
    return environment


def effective_on_hang(file: RunFile, own: Mapping[str, str]) -> tuple[Variable, ...]:
    """The site's variables for after a hang, but for those that the person has set otherwise."""
    return effective(file.on_hang, file.env, own, file.job.env)


def forbidden(file: RunFile, own: Mapping[str, str]) -> tuple[VariableDifference, ...]:
    """What must not be set at this site, and is: in the environment or in the job file."""
    deviations = differences(file.sets, {**own, **file.job.env})
    return tuple(each for each in deviations if each.kind is VariableDifferenceKind.FORBIDDEN)


def with_suspects(incident: Incident, deviations: tuple[VariableDifference, ...]) -> Incident:
    """The incident, and beside its evidence what may have a part in trouble of the network."""
    if incident.cause not in _NETWORK or not deviations:
        return incident
    suspects = tuple(Evidence("environment", str(each)) for each in deviations)
    return replace(incident, evidence=(*incident.evidence, *suspects))
