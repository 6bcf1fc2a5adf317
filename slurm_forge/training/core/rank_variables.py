"""The site's and the job file's variables in the environment of this rank, however it started.

A supervisor has set most of them already; submitit's stock executors, ``slurm-forge run`` and
users' own scripts have not.  Imports no torch, which reads some of them on import.
"""

from __future__ import annotations

import os

from slurm_forge.control.interfaces import interface_of, interfaces
from slurm_forge.errors import ControlChannelError
from slurm_forge.knobs import process_environ
from slurm_forge.site.variables import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    effective,
    reaches_forks,
)
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.plan import RecoveryPlan

_LOOPBACK = "lo"
#: What torch's NCCL (by an older name, too) and oneCCL groups do about an error or a timeout.
_ERROR_HANDLING = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_XCCL_ASYNC_ERROR_HANDLING",
)
#: Whether the watchdog of NCCL's group ends the process for an error of the device, too.
_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"


def take_on(file: RunFile, *, one_node: bool = False) -> None:
    """Set the job file's variables, the site's that are not set yet, and gloo's interface.

    Gloo needs exact names and fails for one that does not exist: it gets the interface of this node
    that NCCL would use, if a site names interfaces at all; if all ranks are on ``one_node``, the
    loopback, which nobody outside can reach.
    """
    here = process_environ()
    variables = {name: value for name, value in file.env.items() if name not in here}
    variables.update(file.job.env)
    if one_node and _LOOPBACK in interfaces() and GLOO_INTERFACE not in {**here, **variables}:
        variables[GLOO_INTERFACE] = _LOOPBACK
    if file.socket_interface is not None and GLOO_INTERFACE not in {**here, **variables}:
        nccl = variables.get(NCCL_INTERFACE, here.get(NCCL_INTERFACE, ""))
        interface = interface_of(nccl or file.socket_interface, interfaces())
        if interface is not None:
            variables[GLOO_INTERFACE] = interface
    os.environ.update(variables)


def outlive_peers() -> None:
    """Have no process group end this process because a peer has left or does not come, or because
    the device has failed.

    By default the watchdog of a group on a device does (ProcessGroupNCCL.hpp of torch).  Here
    somebody else sees to that: the conductor beside this rank, or an order to abandon the launch;
    an error of the device is raised in the program.  To be called before groups are made; what is
    set already stays.
    """
    here = process_environ()
    if not any(name in here for name in _ERROR_HANDLING):
        names = [name for name in _ERROR_HANDLING if name.startswith("TORCH_")]
        os.environ.update({name: "0" for name in (*names, _RETHROW) if name not in here})


def take_on_place(rank: int, local_rank: int, world_size: int, *, one_node: bool) -> None:
    """Set torchrun's variables, from which libraries such as accelerate read their rank.

    ``one_node``: all ranks are known to be on this node.
    """
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    if one_node:
        numbers["LOCAL_WORLD_SIZE"] = world_size
    os.environ.update({name: str(number) for name, number in numbers.items()})


def take_on_plan(file: RunFile, plan: RecoveryPlan) -> None:
    """Set the recovery plan's variables, except those that the person has set otherwise.

    Call it before process groups are created, which is when network variables are read.

    Raises:
        ControlChannelError: The plan comes over the channel, and one of its variables is neither of
            a permitted kind, nor in run.yaml.
    """
    wanted, here = {each.name: each.value for each in plan.variables}, process_environ()
    new = [
        each
        for each in effective(wanted, file.env, here, file.job.env)
        if here.get(each.name) != each.value
    ]
    for each in new:
        if not reaches_forks(each.name) and file.on_hang.get(each.name) != each.value:
            raise ControlChannelError(
                f"the plan of this launch sets {each.name}, and on_hang of run.yaml does not",
                next_step="Is the supervisor of another version of slurm_forge?  End the job and "
                "submit the run again.",
            )
    os.environ.update({each.name: each.value for each in new})
