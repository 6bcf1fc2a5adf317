"""Computing a step's losses and gradients again, and leaving everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from slurm_forge.training.core import rng
from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
)
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.instability.forward_hooks import (
    Lookout,
    Seen,
)

__all__ = ["Again", "Generators", "Shelter", "needs_peers", "replay", "unsynchronised"]


@dataclass(frozen=True, slots=True)
class Again:
    """One micro-batch, computed again: its loss, and what was seen on the way.

    Of ``Loss(sum, count)`` the sum is the loss; ``count`` is None where it was a mean.
    """

    loss: float
    count: float | None
    seen: Seen


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of torch's own generators: those that dropout draws from."""

    host: torch.Tensor
    device: torch.Tensor | None
    index: int = 0

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Copies, in a microsecond; nothing is waited for."""
        host = torch.default_generator.get_state()
        if device.type != "cuda":
            return cls(host, None)
        index = torch.cuda.current_device() if device.index is None else device.index
        return cls(host, torch.cuda.default_generators[index].get_state(), index)

    def put_back(self) -> None:
        """Draw from here on what followed then."""
        torch.default_generator.set_state(self.host)
        if self.device is not None:
            torch.cuda.default_generators[self.index].set_state(self.device)


class Shelter:
    """Keeps what a forward and backward change beside the gradients; ``put_back`` restores it.

    Buffers of all models, the random state, and which modules are in training mode.  Raises
    UnsupportedError where the random state can't be had.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._random = rng.capture()
        self._modes: list[tuple[nn.Module, bool]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]] = []
        for module in dict.fromkeys(part for model in models for part in model.modules()):
            self._modes.append((module, module.training))
            for name, buffer in module._buffers.items():
                self._buffers.append((module, name, buffer, _copy(buffer)))
        self._drawn_from = self._random

    def begin(self, generators: Generators | None) -> None:
        """The replay begins, with the random numbers of the step where they are known."""
        if generators is not None:
            generators.put_back()
        self._drawn_from = rng.capture()

    def drew(self, generators: Generators | None) -> bool:
        """Whether random numbers were drawn since that can't be those of the step."""
        known = set() if generators is None else {"torch", "cuda"}
        now = rng.capture()
        return any(
            name not in known and not torch.equal(state, self._drawn_from.get(name, state[:0]))
            for name, state in now.items()
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """Everything as it was when this object was made."""
        rng.restore(self._random)
        for module, training in self._modes:
            module.training = training
        for module, name, buffer, values in self._buffers:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if buffer is not None and values is not None:
                own = _own(buffer)
                # Only what has changed: a write counts as a change for those who look for one.
                if not torch.equal(own, values):
                    own.copy_(values)


def needs_peers(models: Iterable[nn.Module]) -> bool:
    """Whether a forward or backward waits for other ranks, so that none may leave it early."""
    kinds = (FSDPModule, nn.SyncBatchNorm)
    return any(
        any(isinstance(part, kinds) for part in model.modules())
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        for model in models
    )


@contextmanager
def unsynchronised(models: Iterable[nn.Module]) -> Iterator[None]:
    """Gradients stay on their rank inside.  Collective at its beginning, with DDP, and only there.

    What DDP would do in its next forward is done at once: buffers are taken from rank 0 (they are
    what the step saw), and buckets are put into their final order after the first step of all.
    """
    parts = list(dict.fromkeys(part for model in models for part in model.modules()))
    ddps = [part for part in parts if isinstance(part, DistributedDataParallel)]
    sharded = [part for part in parts if isinstance(part, FSDPModule)]
    before = [(ddp, ddp.require_backward_grad_sync, ddp.require_forward_param_sync) for ddp in ddps]
    for ddp in ddps:
        if ddp.reducer._rebuild_buckets():
            ddp._has_rebuilt_buckets = True
        if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            ddp._sync_buffers()  # type: ignore[no-untyped-call]
    try:
        for ddp in ddps:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
        for part in sharded:
            part.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for part in sharded:  # as ``Step`` leaves them behind
            part.set_requires_gradient_sync(True, recurse=False)
        for ddp, backward, forward in before:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = backward, forward


def replay(
    models: Mapping[str, nn.Module],
    batch: Batch,
    compute_loss: Callable[[Any], torch.Tensor | Loss],
    found: list[Again],
    *,
    device: torch.device,
    loss_scale: float,
) -> None:
    """This rank's micro-batches again, one after the other, as the step weighs them.

    Each is added to ``found`` once it is through; no gradient is kept.  Raises what
    ``compute_loss`` and the backward raise.
    """
    # The number of ranks cancels out: each of them has an equal share of the global batch.
    weights = BatchLoss(global_batch=sum(batch.micro_sizes), ranks=1, device=device)
    lookout = Lookout(models)
    try:
        for micro, size in zip(batch.micro_batches, batch.micro_sizes, strict=True):
            lookout.begin()
            with torch.enable_grad():
                loss = compute_loss(micro)
                weights.begin(size)
                lookout.backward(weights.weigh(loss) * loss_scale)
            if isinstance(loss, Loss):
                value, count = float(loss.sum.detach()), float(loss.count)
            else:
                value, count = float(loss.detach()), None
            del loss
            found.append(Again(value, count, lookout.read()))
    finally:
        lookout.close()


def _own(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    if buffer is None or is_lazy(buffer) or buffer.is_meta or buffer.layout is not torch.strided:
        return None
    return _own(buffer).clone()
