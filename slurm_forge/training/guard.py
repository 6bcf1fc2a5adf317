"""No bad update is ever applied: clip, judge, and step or leave everything as it was.

The verdict is whether the norm of the gradient over all ranks is finite.  DDP and FSDP have summed
the gradients by then, so a NaN on one rank is in every rank's norm: all ranks reach the same
verdict and nothing has to be asked.  Where the optimizer can skip on the device the host does not
wait for the verdict; everywhere else that is one wait per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Adam, AdamW, Optimizer

from slurm_forge.training.buffers import BufferSnapshot
from slurm_forge.training.verdict import Verdict

__all__ = ["Applied", "BufferSnapshot", "Verdict", "apply_gradients", "skips_on_device"]

#: As torch.nn.utils.clip_grad_norm_ has it.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a step: the norm before clipping, and 0.0 or 1.0 for applied or skipped.

    Both are scalar tensors on the device; nobody waited for them unless the optimizer demanded it.
    """

    norm: torch.Tensor
    found_inf: torch.Tensor
    verdict: Verdict

    def skipped(self) -> bool:
        """Whether the update was left out.  On CUDA it waits until the device is that far."""
        return not self.verdict.read().finite


def apply_gradients(
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    grad_norm: torch.Tensor | float | None = None,
    gradient_factor: torch.Tensor | float | None = None,
    lr_scale: float = 1.0,
    scaler: Any = None,
    update_scaler: bool = True,
    parameters: Iterable[torch.Tensor] | None = None,
    norm_group: dist.ProcessGroup | None = None,
) -> Applied:
    """Clip to ``max_norm``, step, and drop the gradients; with a non-finite norm only the last.

    A skipped step leaves weights, moments and step counters as they were, on all ranks.
    ``parameters`` default to the optimizer's.  ``grad_norm`` is the norm where the program has
    computed it, over all ranks and of unscaled gradients (nothing is clipped then).  ``norm_group``
    are the ranks whose norms add up where parameters are spread over ranks by other means than
    DTensor (pipeline stages, experts): one more collective.  ``gradient_factor`` multiplies the
    gradients first (``BatchLoss``).  ``lr_scale`` holds for this one step, scheduler and optimizer
    never see it.  With a ``GradScaler`` the verdict is entered into it before its ``step``;
    ``update_scaler`` is for the last of several optimizers.
    """
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    chosen = owned if parameters is None else list(parameters)
    if scaler is not None and any(p.grad is not None for p in owned):
        scaler.unscale_(optimizer)
    grads = [grad for p in chosen if (grad := _gradient(p)) is not None]
    if grad_norm is None:
        norm = _norm(grads, chosen, norm_group)
        factor = None if gradient_factor is None else torch.as_tensor(gradient_factor)
        _multiply(grads, norm, factor, max_norm)
        norm = norm if factor is None else norm * factor.to(norm)
    else:
        norm = _plain(torch.as_tensor(grad_norm, device=chosen[0].device)).detach()
    found_inf = (~torch.isfinite(norm)).to(torch.float32).reshape(())
    if grads:
        with _scaled_lr(optimizer, lr_scale):
            if scaler is not None:
                found_inf = _enter(scaler, optimizer, found_inf)
            _step(optimizer, found_inf, scaler)
    if scaler is not None and update_scaler:
        scaler.update()
    for parameter in (*owned, *chosen):
        parameter.grad = None
    return Applied(norm, found_inf, Verdict(norm, found_inf))


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves out a step by itself, exactly, when ``found_inf`` is 1.

    Proven by tests for fused Adam, AdamW and SGD, and for these types only: a subclass may do
    anything in its ``step``.  Fused SGD with momentum creates its buffers in the first step and
    would leave them uninitialised, so it counts only once they exist.
    """
    kind = type(optimizer)
    if kind not in (Adam, AdamW, SGD) or not all(g.get("fused") for g in optimizer.param_groups):
        return False
    devices = {p.device for g in optimizer.param_groups for p in g["params"]}
    if len(devices) != 1:
        return False  # copying the verdict between devices is not ordered with the host
    return kind is not SGD or all(
        optimizer.state[p].get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for p in group["params"]
        if p.grad is not None
    )


def _step(optimizer: Optimizer, found_inf: torch.Tensor, scaler: Any) -> None:
    """Step unless ``found_inf``: judged by the optimizer on the device, or here after a wait."""
    on_device = skips_on_device(optimizer)
    if not on_device and bool(found_inf.item()):
        return
    if scaler is not None:
        scaler.step(optimizer)  # hands its (our) verdict to fused optimizers itself
    elif not on_device:
        optimizer.step()
    else:
        # The two attributes through which GradScaler talks to fused optimizers.
        fused: Any = optimizer
        fused.found_inf, fused.grad_scale = found_inf, None
        try:
            optimizer.step()
        finally:
            del fused.found_inf, fused.grad_scale


def _enter(scaler: Any, optimizer: Optimizer, found_inf: torch.Tensor) -> torch.Tensor:
    """Our verdict into the scaler's, which is that of this rank's shards alone under FSDP.

    Without it ranks would step, and change their scale, on their own.  The scaler has no public
    way to be told; ``_per_optimizer_states`` is what ``unscale_`` has just written.  Returns the
    common verdict.
    """
    seen = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device, own in seen.items():
        own.copy_(torch.maximum(own.reshape(()), found_inf.to(device)).expand_as(own))
        found_inf = torch.maximum(found_inf, own.to(found_inf.device).reshape(()))
    return found_inf


@contextmanager
def _scaled_lr(optimizer: Optimizer, scale: float) -> Iterator[None]:
    if scale == 1.0:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale  # a new tensor where it is one
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient as what arithmetic works on; of sparse ones the values."""
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return grad
    if not grad.is_coalesced():
        parameter.grad = grad = grad.coalesce()
    return grad._values()


@torch.no_grad()
def _norm(
    grads: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The 2-norm over all gradients and all ranks that hold parts of them."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [_plain(get_total_norm(some)) for some in by_mesh.values()]
    if not norms:
        norms = [torch.zeros((), device=parameters[0].device if parameters else None)]
    norm = norms[0]
    if len(norms) > 1:
        norm = torch.linalg.vector_norm(torch.stack([each.to(norm) for each in norms]))
    if group is not None:
        squared = norm.double().square()
        dist.all_reduce(squared, group=group)
        norm = squared.sqrt().to(norm.dtype)
    return norm


@torch.no_grad()
def _multiply(
    grads: Sequence[torch.Tensor],
    norm: torch.Tensor,
    factor: torch.Tensor | None,
    max_norm: float | None,
) -> None:
    """Both multiplications, by the loss's factor and to the largest norm, in one pass."""
    if max_norm is None and factor is None:
        return
    by = torch.ones_like(norm) if factor is None else factor.to(norm)
    if max_norm is not None:
        by = by * torch.clamp(max_norm / (norm * by + _CLIP_EPSILON), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), some in by_kind.items():
        torch._foreach_mul_(some, by.to(device))


def _plain(value: torch.Tensor) -> torch.Tensor:
    """A norm as an ordinary tensor, summed over the ranks that share it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
