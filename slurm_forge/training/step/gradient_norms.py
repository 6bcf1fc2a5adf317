"""The 2-norm of a step's gradients as clip_grad_norm_ computes it, and its per-parameter parts.

A norm over all gradients is the norm of one norm per parameter.  Those are kept on the device:
after an incident they identify the parameter, and with sharded parameters the rank, at no cost
before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from slurm_forge.checkpoint.content.models import name_parameters

#: The value in torch.nn.utils.clip_grad_norm_.
_CLIP_EPSILON = 1e-6
#: Tensors with the same key can be processed together.
_kind = attrgetter("dtype", "device", "layout")


class ParameterNorm(NamedTuple):
    """The norm of one parameter's gradient before clipping; under FSDP of this rank's shard."""

    name: str
    norm: float
    finite: bool


class NormParts:
    """One norm per parameter, on the device; keeps no gradient alive.

    ``stacked`` is what the total was computed from: one tensor, or one per device mesh.
    """

    __slots__ = ("_factor", "_owners", "stacked")

    def __init__(
        self,
        stacked: Sequence[torch.Tensor] = (),
        owners: Sequence[Sequence[torch.Tensor]] = (),
        factor: torch.Tensor | None = None,
    ) -> None:
        self.stacked = stacked
        self._owners = owners
        self._factor = 1.0 if factor is None else factor

    def times(self, factor: torch.Tensor) -> NormParts:
        """The parts for gradients that are multiplied by a factor later."""
        return NormParts(self.stacked, self._owners, factor)

    def blame(self, names: Mapping[int, str]) -> tuple[ParameterNorm, ...]:
        """Every parameter, worst first: NaN and inf, then by size.  ``names`` is keyed by ``id``.

        Waits for the device.
        """
        worst = []
        for stacked, owners in zip(self.stacked, self._owners, strict=True):
            local = stacked.to_local() if isinstance(stacked, DTensor) else stacked
            norms = (local.detach().double().cpu() * float(self._factor)).tolist()
            for index, (owner, norm) in enumerate(zip(owners, norms, strict=True)):
                shape = "x".join(map(str, owner.shape)) or "scalar"
                name = names.get(id(owner), f"parameter {index} ({shape})")
                worst.append(ParameterNorm(name, norm, math.isfinite(norm)))
        return tuple(sorted(worst, key=lambda one: -one.norm if one.finite else -math.inf))


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Each parameter's name by ``id``, without wrappers; for one model without the model's name."""
    return {
        key: name.fqn if len(models) == 1 else f"{name.model}.{name.fqn}"
        for key, name in name_parameters(models).items()
    }


class Gradients:
    """The present gradients of ``parameters``, and arithmetic on all of them at once.

    Created anew in each step, so nothing is assumed about a parameter that may have been frozen,
    moved or given a sparse gradient since.  Works without gradients, too.
    """

    __slots__ = ("_alike", "_grads", "_owners", "_parameters", "_values")

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._owners: list[torch.Tensor] = []
        self._grads = self._values = grads = list[torch.Tensor]()
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None:
                self._owners.append(parameter)
                grads.append(grad)
        types = {*map(type, grads)}
        if DTensor in types:
            self._values = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        kinds = {*map(_kind, self._values)}
        if any(layout is not torch.strided for _, _, layout in kinds):
            self._values = [_dense(p, g) for p, g in zip(self._owners, self._values, strict=True)]
            self._grads = [
                g if isinstance(g, DTensor) else v for g, v in zip(grads, self._values, strict=True)
            ]
            kinds = {*map(_kind, self._values)}
        #: Whether all are of one type, dtype and device, so that one call suffices.
        self._alike = len(kinds) == 1 and len(types) == 1

    def __bool__(self) -> bool:
        return bool(self._owners)

    def norm(self, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, NormParts]:
        """The 2-norm over all of them and over all ranks that hold parts, and its parts.

        Collective if they are DTensors, usually one small all-reduce, and if ``group`` is given:
        the ranks whose norms add up in addition.
        """
        if not self._owners:
            device = self._parameters[0].device if self._parameters else None
            total, parts = torch.zeros((), device=device), NormParts()
        elif self._alike:
            total, parts = self._norm_alike()
        else:
            total, parts = self._norm_mixed()
        if group is not None:
            squared = total.double().square()
            dist.all_reduce(squared, group=group)
            total = squared.sqrt().to(total.dtype)
        return total, parts

    def parts(self) -> NormParts:
        """This rank's norm for each parameter alone; not collective."""
        if not self._owners:
            return NormParts()
        first = self._values[0].device
        norms = [torch.linalg.vector_norm(value).to(first) for value in self._values]
        return NormParts([torch.stack(norms)], [self._owners])

    def multiply(self, by: torch.Tensor) -> None:
        """Multiply each of them by one number."""
        if self._alike:
            values = self._values
            torch._foreach_mul_(values, by.to(values[0].device))
            return
        by_kind: dict[tuple[torch.dtype, torch.device, torch.layout], list[torch.Tensor]] = {}
        for value in self._values:
            by_kind.setdefault(_kind(value), []).append(value)
        for (_, device, _), some in by_kind.items():
            torch._foreach_mul_(some, by.to(device))

    def _norm_alike(self) -> tuple[torch.Tensor, NormParts]:
        shards = None
        if self._values is not self._grads and isinstance(self._grads[0], DTensor):
            shards = _group_of_shards(self._grads)
            if shards is None:
                return self._norm_mixed()
        stacked = torch.stack(torch._foreach_norm(self._values))
        parts = NormParts([stacked], [self._owners])
        if shards is not None:
            # What DTensor does with a stack of such norms, in a fifth of the time.
            squared = stacked**2.0
            dist.all_reduce(squared, group=shards)
            stacked = squared**0.5
        return torch.linalg.vector_norm(stacked), parts

    def _norm_mixed(self) -> tuple[torch.Tensor, NormParts]:
        by_mesh: dict[object, list[int]] = {}
        for index, grad in enumerate(self._grads):
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(index)
        stacks, owners, totals = [], [], []
        for indices in by_mesh.values():
            stacked, order = _stacked_norms([self._grads[index] for index in indices])
            stacks.append(stacked)
            owners.append([self._owners[indices[index]] for index in order])
            total = torch.linalg.vector_norm(stacked)
            totals.append(total.full_tensor() if isinstance(total, DTensor) else total)
        total = totals[0]
        if len(totals) > 1:
            total = torch.linalg.vector_norm(torch.stack([each.to(total) for each in totals]))
        return total, NormParts(stacks, owners)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that reduces a norm to ``max_norm``, at most 1; bitwise clip_grad_norm_'s."""
    factor = norm + _CLIP_EPSILON
    return factor.reciprocal_().mul_(max_norm).clamp_(max=1.0)


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip as ``clip_grad_norm_`` does, bit for bit and in a quarter of its calls.

    Args:
        parameters: Of one optimizer; what they are sharded over takes part.
        max_norm: The norm that their gradients have afterwards, at most.

    Returns:
        The norm from before, where the gradients are.
    """
    with torch.no_grad():
        gradients = Gradients(list(parameters))
        norm, _ = gradients.norm()
        gradients.multiply(clip_factor(norm, max_norm))
    return norm


def _stacked_norms(grads: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """The norm of each, in torch's own order, so that the sum is the same to the last bit."""
    first = grads[0].device
    norms: list[torch.Tensor] = []
    order: list[int] = []
    groups = _group_tensors_by_device_and_dtype([grads], with_indices=True)  # type: ignore[list-item]
    for tensors, indices in groups.values():
        some = [tensor for tensor in tensors[0] if tensor is not None]
        norms.extend(norm.to(first) for norm in torch._foreach_norm(some))
        order.extend(indices)
    return torch.stack(norms), order


def _dense(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The operand of arithmetic: for a sparse gradient its values, each index once."""
    if not grad.is_sparse:
        return grad
    if not grad.is_coalesced():
        parameter.grad = grad = grad.coalesce()
    return grad._values()


def _group_of_shards(grads: Sequence[torch.Tensor]) -> dist.ProcessGroup | None:
    """The ranks over which all of them are sharded in the same way; None if it is more complex."""
    first = grads[0]
    if not isinstance(first, DTensor):
        return None
    mesh, placements = first.device_mesh, first.placements
    sharded = [dim for dim, one in enumerate(placements) if isinstance(one, Shard)]
    if len(sharded) != 1 or any(
        dim not in sharded and not isinstance(one, Replicate) for dim, one in enumerate(placements)
    ):
        return None
    for grad in grads:
        if not isinstance(grad, DTensor) or grad.device_mesh != mesh:
            return None
        if grad.placements != placements and [*map(type, grad.placements)] != [
            *map(type, placements)
        ]:
            return None
    return mesh.get_group(sharded[0])
