"""Fix DDP's gradient buckets before the first step, so that a resume repeats it bit for bit.

DDP sums gradients bucket by bucket.  After its first backward it rebuilds the buckets in the order
in which that backward produced the gradients.  Sums over three or more ranks depend on the buckets,
so the first step of a process sums differently from the following ones, and an interrupted run
differently from an uninterrupted one.  One backward on nothing, with the gradients in a fixed
order, fixes the buckets before the first real step: in every process, hence in every attempt.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Buckets(str, Enum):
    """The outcome for a module's buckets."""

    #: They are final: from the first step on every sum is computed in the same order.
    SETTLED = "settled"
    #: With ``find_unused_parameters`` DDP keeps its initial buckets.
    FIXED = "fixed"
    #: Not fixed, so with three or more ranks a resume is not bitwise equal.  ``static_graph`` takes
    #: its graph from the first backward, mixed precision inside DDP hooks into the model's forward,
    #: and an optimizer inside the backward would step: an empty backward suits none of them.
    LEFT = "left"


def settle_ddp_buckets(module: DistributedDataParallel) -> Buckets:
    """Make DDP build its final buckets now.  Collective over the module's ranks, once per process.

    Parameters, buffers, gradients and random states stay the same; a communication hook is called
    once for each bucket, with zeros.
    """
    parameters = [p for p in module.module.parameters() if p.requires_grad]
    if module.find_unused_parameters and not module.static_graph:
        return Buckets.FIXED
    if (
        module.static_graph
        or module.mixed_precision is not None
        or getattr(module, "_use_python_reducer", False)
        or any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
        or any(hasattr(p, "_in_backward_optimizers") for p in parameters)
    ):
        return Buckets.LEFT
    gradients = [parameter.grad for parameter in parameters]
    inner, syncs = module._modules["module"], module.broadcast_buffers
    sync_now, sync_next = module.require_backward_grad_sync, module.require_forward_param_sync
    for parameter in parameters:
        parameter.grad = None
    try:
        # Neither the model with another forward nor calls of modules, which hooks would notice.
        module._modules["module"] = _Nothing(parameters, _with_sparse_gradients(inner))
        module.broadcast_buffers = False
        with torch.enable_grad():
            module.forward().backward()  # type: ignore[no-untyped-call]
            # DDP rebuilds the buckets when the next forward begins.  Without sync, or training's
            # first backward would be reduced even if it only accumulates.
            module.require_backward_grad_sync = False
            module.forward()  # type: ignore[no-untyped-call]
    finally:
        module._modules["module"] = inner
        module.broadcast_buffers = syncs
        module.require_backward_grad_sync = sync_now
        module.require_forward_param_sync = sync_next
        for parameter, grad in zip(parameters, gradients, strict=True):
            parameter.grad = grad
    return Buckets.SETTLED


class _Nothing(nn.Module):
    """A forward that returns zero and uses every parameter.

    Gradients are produced in reverse order of registration, roughly like in a real backward: the
    buckets that are ready first can be sent first.
    """

    def __init__(self, parameters: list[nn.Parameter], sparse: set[torch.Tensor]) -> None:
        super().__init__()
        self._borrowed = parameters  # in a list, so that they are not registered here
        self._sparse = sparse

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for parameter in self._borrowed:
            # Sums over nothing.  A multiplication by zero would turn infinities into NaN.
            if parameter in self._sparse:
                none = torch.empty(0, dtype=torch.long, device=parameter.device)
                nothing = nn.functional.embedding(none, parameter, sparse=True).sum()
            else:
                nothing = parameter.reshape(-1)[:0].sum()
            total = total.to(nothing.device) + nothing.to(torch.float32)
        return total


def _with_sparse_gradients(model: nn.Module | None) -> set[torch.Tensor]:
    """Parameters for which DDP expects sparse gradients, and accepts no other."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    modules = () if model is None else model.modules()
    return {part.weight for part in modules if isinstance(part, kinds) and part.sparse}
