"""Injected damage to tensors: the state between two steps, gradients inside a backward.

One element of one tensor, in this rank's part of it.  Gradients are changed before DDP or FSDP sum
them, as by a faulty device: a parameter's own if parameters are plain tensors; under FSDP2, whose
parameters take no hooks in a backward, that of the loss, so that all of them are affected.

Also here: injected hangs, each in a place where real ones happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from slurm_forge.checkpoint.content.tensors import local_part
from slurm_forge.device.accelerator import kind
from slurm_forge.errors import UnsupportedError
from slurm_forge.spec.faults import FaultTarget

if TYPE_CHECKING:
    from slurm_forge.training.core.run_state import Registry


import ctypes
import multiprocessing
import os
from signal import Signals

import torch.distributed as dist

#: By then the other ranks are inside their all-reduce.
_PEERS_WAIT_S = 0.5
_MOMENTS = {
    FaultTarget.ADAM_M: ("exp_avg", "momentum_buffer"),
    FaultTarget.ADAM_V: ("exp_avg_sq", "square_avg", "sum"),
}


def state_tensor(target: FaultTarget, registry: Registry | None) -> torch.Tensor:
    """This rank's part of the first weight, moment or buffer; UnsupportedError without one."""
    if registry is not None:
        tensor = next(filter(_usable, map(local_part, _candidates(target, registry))), None)
        if tensor is not None:
            return tensor
    raise UnsupportedError(
        f"an injected fault was to change {target.value}, but there is none on this rank",
        next_step="Moments exist after the first step; buffers are those of registered models.",
    )


@torch.no_grad()
def damage(tensor: torch.Tensor, value: float) -> None:
    """Write the value into one element."""
    tensor[(0,) * tensor.dim()] = value


def hook_gradient(
    loss: torch.Tensor, registry: Registry | None, value: float
) -> RemovableHandle | None:
    """Set one element of one local gradient to ``value`` in the next backward."""
    parameters = _plain_parameters(registry)
    if not parameters:
        return multiply_gradient(loss, value)

    def changed(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        damage(spoilt, value)
        return spoilt

    return _hook(parameters[0], changed)


@torch.no_grad()
def spoil_gradients(
    parameters: Iterable[torch.Tensor], *, factor: float | None, value: float
) -> None:
    """Multiply existing gradients by ``factor``; without one write the value into one element."""
    gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
    for gradient in filter(_usable, gradients):
        if factor is None:
            damage(gradient, value)
            return
        gradient.mul_(factor)


def multiply_gradient(loss: torch.Tensor, value: float) -> RemovableHandle | None:
    """Multiply all gradients in the next backward; the loss stays as it is."""
    return _hook(loss, lambda gradient: gradient * value)


def hook_out_of_memory(
    loss: torch.Tensor, registry: Registry | None, sleep: Callable[[float], None] = time.sleep
) -> RemovableHandle | None:
    """Make the next backward fail in the middle, as on a full device."""

    def full(gradient: torch.Tensor) -> torch.Tensor:
        del gradient
        sleep(_PEERS_WAIT_S)
        raise torch.OutOfMemoryError("CUDA out of memory. (an injected fault)")

    parameters = _plain_parameters(registry)
    return _hook(parameters[len(parameters) // 2] if parameters else loss, full)


def _hook(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> RemovableHandle | None:
    """For one backward: the handle removes itself."""
    if not tensor.requires_grad:
        return None
    handle: list[RemovableHandle] = []

    def once(gradient: torch.Tensor) -> torch.Tensor:
        handle.pop().remove()
        return change(gradient)

    handle.append(tensor.register_hook(once))  # type: ignore[no-untyped-call]
    return handle[0]


def _candidates(target: FaultTarget, registry: Registry) -> Iterator[torch.Tensor]:
    if target is FaultTarget.BUFFER:
        for model in registry.models.values():
            yield from model.buffers()
        return
    for optimizer in registry.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if target is FaultTarget.WEIGHT:
                    yield parameter
                    continue
                state = optimizer.state.get(parameter, {})
                yield from (state[key] for key in _MOMENTS[target] if key in state)


def _usable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _plain_parameters(registry: Registry | None) -> list[torch.Tensor]:
    """Parameters that receive gradients in a backward; none if any is sharded."""
    if registry is None:
        return []
    # Only trained ones: an average of the weights gets no gradient.
    parameters: list[torch.Tensor] = [
        parameter
        for optimizer in registry.optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    return [] if any(isinstance(p, DTensor) for p in parameters) else parameters


def hold_interpreter(seconds: float) -> None:
    """Stay in a C call that keeps the interpreter lock: no Python thread runs meanwhile."""
    # PyDLL does not release the lock around a call, CDLL does.
    library = ctypes.PyDLL(None)
    if seconds >= 1:
        library.sleep(int(seconds))
    library.usleep(int(seconds % 1 * 1e6))


def wait_for_nobody(rank: int) -> None:
    """Wait in torch.distributed for what no rank sends; UnsupportedError on a single rank."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise UnsupportedError(
            "a single rank has no other to wait for: the fault collective needs two",
            next_step="Rehearse it with more ranks, or use hang@ instead.",
        )
    peer = (rank + 1) % dist.get_world_size()
    device = kind() or torch.device("cpu")
    dist.recv(torch.zeros(1, device=device), src=peer, tag=7_919)


def stop_loader_workers() -> None:
    """Freeze this rank's data-loader workers; UnsupportedError if it has none."""
    workers = multiprocessing.active_children()
    if not workers:
        raise UnsupportedError(
            "the fault data freezes data-loader workers, and there are none",
            next_step="Give run.batches() num_workers=1 or more, or use hang@ instead.",
        )
    for worker in workers:
        if worker.pid is not None:
            os.kill(worker.pid, Signals.SIGSTOP)
