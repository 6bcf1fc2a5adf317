"""No bad update is ever applied: clip, judge, and either step or leave everything as it was.

The verdict is whether the norm of the gradient over all ranks is within a limit that all ranks
share; NaN and inf never are.  DDP and FSDP have summed the gradients by then, so a NaN on one rank
is in every rank's norm: all ranks reach the same verdict without communication.  If the norm is on
a device, the optimizer may be able to skip there and the host does not wait; any other optimizer
costs one wait per step.  A norm on the CPU is read directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from slurm_forge.device.accelerator import on_accelerator
from slurm_forge.errors import UnsupportedError
from slurm_forge.training.step.gradient_norms import (
    Gradients,
    NormParts,
    ParameterNorm,
    clip_factor,
)
from slurm_forge.training.step.host_copy import HostCopy

#: The largest finite float32: a larger norm counts as infinite whatever its dtype was.
LARGEST = float(torch.finfo(torch.float32).max)
#: A norm below the largest one by this factor is not clipped, in any dtype's arithmetic.
_CLIP_MARGIN = 1.02
_LITTLE = 1e-5


class Reading(NamedTuple):
    """One step: whether it was ``applied``, whether the norm was ``finite``, norm and loss.

    A step with a finite norm is skipped if the norm exceeds the limit.  ``loss`` is this rank's,
    NaN if none was given.
    """

    applied: bool
    finite: bool
    norm: float
    loss: float


class StepVerdict:
    """A verdict on its way to the host: a ``read`` one step late costs nothing."""

    __slots__ = ("_loss", "_outcome")

    def __init__(
        self, found_inf: torch.Tensor, norm: torch.Tensor, loss: torch.Tensor | None = None
    ) -> None:
        values = [found_inf.detach(), norm.detach().to(found_inf)]
        self._loss = math.nan
        if loss is not None and not on_accelerator(loss) and on_accelerator(found_inf):
            self._loss = loss.item()  # on the host already; sending it to the device would wait
        elif loss is not None:
            values.append(loss.detach().reshape(()).to(found_inf))
        self._outcome: HostCopy | Reading = HostCopy(values)

    @classmethod
    def known(cls, reading: Reading) -> StepVerdict:
        """A verdict that the host has reached itself."""
        verdict = cls.__new__(cls)
        verdict._outcome = reading
        return verdict

    @property
    def known_reading(self) -> Reading | None:
        """The result of ``read`` if it has been read already; else None."""
        return self._outcome if isinstance(self._outcome, Reading) else None

    def is_ready(self) -> bool:
        """Whether ``read`` would return at once."""
        return isinstance(self._outcome, Reading) or self._outcome.is_ready()

    def read(self) -> Reading:
        """The verdict, waiting for it if necessary."""
        outcome = self._outcome
        if isinstance(outcome, Reading):
            return outcome
        found_inf, norm, *loss = outcome.read()
        self._outcome = outcome = Reading(
            not found_inf, norm <= LARGEST, norm, loss[0] if loss else self._loss
        )
        return outcome


class GuardedUpdate:
    """The outcome of a step: its norm before clipping, the verdict, and the parts of the norm.

    ``norm`` is a scalar tensor on the device that computed it; nothing waited for it unless the
    optimizer required it.  It is a number if the program computed it on the host.
    """

    __slots__ = ("_found_inf", "norm", "norms", "verdict")

    def __init__(
        self,
        norm: torch.Tensor | float,
        verdict: StepVerdict,
        norms: NormParts,
        found_inf: torch.Tensor | None,
    ) -> None:
        self.norm = norm
        self.verdict = verdict
        self.norms = norms
        self._found_inf = found_inf

    @classmethod
    def made(cls, norm: float) -> GuardedUpdate:
        """An applied update with a norm that is known on the host."""
        verdict = StepVerdict.known(Reading(True, True, norm, math.nan))
        return cls(norm, verdict, NormParts(), None)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The norm of each parameter before clipping, in the tensor that the norm was made of.

        One tensor per device mesh; empty if the program provided the norm.
        """
        return tuple(self.norms.stacked)

    @property
    def found_inf(self) -> torch.Tensor:
        """1.0 if the update was skipped, else 0.0, on the device of ``norm``."""
        if self._found_inf is None:
            self._found_inf = torch.tensor(float(self.skipped()), dtype=torch.float32)
        return self._found_inf

    @property
    def left_out(self) -> torch.Tensor | bool:
        """The same for ``BufferSnapshot.restore_where``: a bool if the host has decided."""
        return self.skipped() if self._found_inf is None else self._found_inf

    def skipped(self) -> bool:
        """Whether the update was skipped.  On CUDA it waits until the device has got that far."""
        return not self.verdict.read().applied

    def blame(self, names: Mapping[int, str]) -> tuple[ParameterNorm, ...]:
        """Norms by parameter, worst first.  ``names``: see ``parameter_names``.  Waits."""
        return self.norms.blame(names)


def apply_gradients(
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    grad_norm: torch.Tensor | float | None = None,
    gradient_factor: torch.Tensor | float | None = None,
    lr_scale: float = 1.0,
    limit: float = LARGEST,
    loss: torch.Tensor | None = None,
    scaler: Any = None,
    update_scaler: bool = True,
    parameters: Iterable[torch.Tensor] | None = None,
    norm_group: dist.ProcessGroup | None = None,
    on_device: bool | None = None,
    keep_gradients: bool = False,
) -> GuardedUpdate:
    """Clip to ``max_norm``, step, and drop the gradients; beyond ``limit`` only drop them.

    A skipped step leaves weights, moments and step counters unchanged, on all ranks.  ``limit``
    applies to the norm before clipping and is the same on every rank.  ``loss`` travels to the host
    with the verdict.  ``parameters`` default to the optimizer's.  ``grad_norm`` is the norm if the
    program has computed it, over all ranks and for unscaled gradients (nothing is clipped then).
    ``norm_group`` are the ranks whose norms add up if parameters are distributed by other means
    than DTensor (pipeline stages, experts): one more collective.  ``gradient_factor`` multiplies
    the gradients first (``BatchLoss``).  ``lr_scale`` applies to this one step, invisibly to
    scheduler and optimizer.  With a ``GradScaler`` the verdict is written into it before its
    ``step``; ``update_scaler`` is for the last of several optimizers.  ``on_device`` selects where
    the verdict is reached; it defaults to the place of the norm.  With ``keep_gradients`` the
    caller drops them.
    """
    if isinstance(optimizer, LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss several times in one step: there is no update to skip",
            next_step="Step it yourself in a loop of your own, with run.advance() at the end of "
            "its body, or use an optimizer that steps once.",
        )
    if grad_norm is not None and gradient_factor is not None:
        raise UnsupportedError(
            "grad_norm can't be combined with Loss(sum, count): its gradients are scaled later",
            next_step="Let apply(max_norm=…) clip, or hand over the mean loss.",
        )
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    limit = limit if limit <= LARGEST else LARGEST  # NaN, too, means no limit
    if scaler is None and parameters is None and not on_device and loss is None:
        value = norm_on_host(grad_norm)
        if value is not None:
            return _apply_known(
                optimizer, value, limit=limit, lr_scale=lr_scale, keep_gradients=keep_gradients
            )
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    selected = owned if parameters is None else list(parameters)
    if scaler is not None and any(p.grad is not None for p in owned):
        scaler.unscale_(optimizer)
    with torch.no_grad():
        gradients = Gradients(selected)
        if grad_norm is not None:
            norm, parts, factor, max_norm = _own_norm(grad_norm, selected), NormParts(), None, None
        else:
            norm, parts = gradients.norm(norm_group)
            factor = None if gradient_factor is None else _scalar_like(norm, gradient_factor)
            if factor is not None:
                norm, parts = norm * factor, parts.times(factor)
        if on_device is None:
            on_device = on_accelerator(norm)
        if on_device or scaler is not None:
            found_inf = _found_inf(norm, limit)
            if scaler is not None and gradients:
                found_inf = _merge_into_scaler(scaler, optimizer, found_inf)
            # Queued before everything else, so that a reader waits for nothing else.
            verdict = StepVerdict(found_inf, norm, loss)
            go_on = True
        else:
            found_inf = None
            value = norm.item()
            go_on = value <= limit
            loss_value = math.nan if loss is None else loss.item()
            verdict = StepVerdict.known(Reading(go_on, value <= LARGEST, value, loss_value))
            if go_on and max_norm is not None and value * _CLIP_MARGIN + _LITTLE < max_norm:
                max_norm = None  # most steps of most runs: a factor of 1 changes nothing
            elif not go_on and grad_norm is not None:
                parts = gradients.parts()
        if go_on:
            if max_norm is not None:
                clip = clip_factor(norm, max_norm)
                factor = clip if factor is None else factor * clip
            if factor is not None:
                gradients.multiply(factor)
    if go_on and gradients:
        if lr_scale == 1.0:
            _step(optimizer, verdict, found_inf, scaler)
        else:
            with _scaled_lr(optimizer, lr_scale):
                _step(optimizer, verdict, found_inf, scaler)
    if scaler is not None and update_scaler:
        scaler.update()
    if not keep_gradients:
        _drop(owned)
        if selected is not owned:
            _drop(selected)
    return GuardedUpdate(norm, verdict, parts, found_inf)


def norm_on_host(norm: torch.Tensor | float | None) -> float | None:
    """A norm that the program has computed, if the host can read it without waiting."""
    if isinstance(norm, torch.Tensor):
        # A DTensor is one rank's part of it.
        known = norm.is_cpu and (type(norm) is torch.Tensor or not isinstance(norm, DTensor))
        return abs(norm.item()) if known else None
    return None if norm is None else abs(float(norm))


def _apply_known(
    optimizer: Optimizer, norm: float, *, limit: float, lr_scale: float, keep_gradients: bool
) -> GuardedUpdate:
    """``apply_gradients`` with a norm on the host."""
    if norm <= limit:
        with _scaled_lr(optimizer, lr_scale) if lr_scale != 1.0 else nullcontext():
            update(optimizer, keep_gradients=keep_gradients)
        return GuardedUpdate.made(norm)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        parts = Gradients(owned).parts()
    if not keep_gradients:
        _drop(owned)
    verdict = StepVerdict.known(Reading(False, norm <= LARGEST, norm, math.nan))
    return GuardedUpdate(norm, verdict, parts, None)


def update(optimizer: Optimizer, *, keep_gradients: bool) -> None:
    """Step, if there is any gradient, and drop the gradients unless they are to be kept."""
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        optimizer.step()
    if not keep_gradients:
        drop_gradients(optimizer)


def drop_gradients(optimizer: Optimizer) -> None:
    """Like ``zero_grad``, without its profiling, which takes most of the time."""
    for group in optimizer.param_groups:
        _drop(group["params"])


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips a step by itself, exactly, if ``found_inf`` is 1.

    Tests prove it for fused Adam, AdamW and SGD, and for these types only: a subclass may do
    anything in its ``step``.  Fused SGD with momentum creates its buffers in the first step and
    would leave them uninitialized, so it counts only once they exist.
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


def _drop(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _own_norm(norm: torch.Tensor | float, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The program's own norm as a tensor on the device of the parameters."""
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    device = parameters[0].device if parameters else torch.device("cpu")
    if not isinstance(norm, torch.Tensor) or norm.device != device:
        norm = torch.full((), float(norm), device=device)  # copying it there would wait
    return norm.detach().reshape(()).abs()


def _scalar_like(norm: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """A factor as a tensor on the norm's device, of its dtype."""
    if not isinstance(factor, torch.Tensor) or factor.device != norm.device:
        return torch.full_like(norm, float(factor))
    return factor.to(norm.dtype)


def _found_inf(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """1.0 unless the norm is within the limit, else 0.0, on the norm's device."""
    if norm.dtype not in (torch.float32, torch.float64):
        norm = norm.float()  # the largest float32 would be inf in a narrower one
    within = torch.empty((), dtype=torch.float32, device=norm.device)
    torch.le(norm, limit, out=within)
    return 1.0 - within


def _step(
    optimizer: Optimizer, verdict: StepVerdict, found_inf: torch.Tensor | None, scaler: Any
) -> None:
    """Step unless the update is to be skipped: judged by the optimizer on the device, or here."""
    if found_inf is None:
        optimizer.step()  # the host has judged
        return
    on_device = skips_on_device(optimizer)
    if not on_device and not verdict.read().applied:
        return
    if scaler is not None:
        scaler.step(optimizer)  # passes its (our) verdict to fused optimizers itself
    elif not on_device:
        optimizer.step()
    else:
        # The two attributes by which GradScaler communicates with fused optimizers.
        fused: Any = optimizer
        fused.found_inf, fused.grad_scale = found_inf, None
        try:
            optimizer.step()
        finally:
            del fused.found_inf, fused.grad_scale


def _merge_into_scaler(scaler: Any, optimizer: Optimizer, found_inf: torch.Tensor) -> torch.Tensor:
    """Merge our verdict into the scaler's, which covers only this rank's shards under FSDP.

    Without it ranks would step, and change their scale, independently.  The scaler has no public
    interface for this; ``_per_optimizer_states`` is what ``unscale_`` has just written.  Returns
    the common verdict.
    """
    found_by_device = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device, own in found_by_device.items():
        own.copy_(torch.maximum(own.reshape(()), found_inf.to(device)).expand_as(own))
        found_inf = torch.maximum(found_inf, own.to(found_inf.device).reshape(()))
    return found_inf


@contextmanager
def _scaled_lr(optimizer: Optimizer, scale: float) -> Iterator[None]:
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale  # a new tensor if it is one
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
