"""Whether what is about to be trusted is sound: looked at in the copy, beside the write.

A gradient of 1e25 leaves a finite loss and finite weights, and infinity in Adam's second moment; a
flipped bit of an exponent makes 1e30 of a weight, and a normalisation behind it hides that.
Nothing of this runs on the device or holds training up: it reads the arena that is written out, on
one thread that leaves torch's threads, and Python's lock, to the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType

import torch

from slurm_forge.device.accelerator import on_accelerator
from slurm_forge.device.streams import Event, beside, event_behind

#: Keys under it are figures about the training, not state: they may hold anything.
NOTES = "notes/"

_MOST_NAMED = 5
_HUGE = 1e20


class NotFinite(str, Enum):
    """The worst that a tensor holds: a number that is none is worse than one without bounds."""

    #: No weight, moment or statistic of a training that goes well.
    HUGE = "a number above 1e20"
    INFINITY = "infinity"
    NAN = "NaN"


_NONE_ALLOWED: Mapping[str, NotFinite] = MappingProxyType({})
_BEHIND_ALL: Mapping[torch.device, Event | None] = MappingProxyType({})
#: Elements that are looked at in one go: every piece takes the interpreter away from the training.
_PIECE = 4 << 20
#: As which integers to look at a type, infinity in it, and 1e20 (which float16 has not).
_INFINITY = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000, 0x4415_AF1D_78B5_8C40),
    torch.float32: (torch.int32, 0x7F80_0000, 0x60AD_78EC),
    torch.bfloat16: (torch.int16, 0x7F80, 0x60AD),
    torch.float16: (torch.int16, 0x7C00, 0x7C00),
}
#: From the least to the worst.
_ORDER = tuple(NotFinite)


def unhealthy(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    allowed: Mapping[str, NotFinite] = _NONE_ALLOWED,
) -> tuple[str, ...]:
    """What is not sound, named: ``NaN in optimizers/adam/…/exp_avg_sq``; a few names at most.

    Of keys in ``allowed`` what stands there is taken as meant, and what is less bad than that.
    """
    findings: list[str] = []
    for key, tensor in tensors:
        if key.startswith(NOTES):
            continue
        what = _not_finite(tensor)
        meant = allowed.get(key)
        if what is not None and (meant is None or _ORDER.index(meant) < _ORDER.index(what)):
            findings.append(f"{what.value} in {key}")
    if len(findings) > _MOST_NAMED:
        findings[_MOST_NAMED:] = [f"and {len(findings) - _MOST_NAMED} more tensors"]
    return tuple(findings)


def unhealthy_here(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    allowed: Mapping[str, NotFinite] = _NONE_ALLOWED,
    behind: Mapping[torch.device, Event | None] = _BEHIND_ALL,
) -> tuple[str, ...]:
    """The same of tensors where they are, which may be changed meanwhile.

    On a GPU they are looked at there, in one pass beside the training, and only what that finds is
    copied.  ``behind`` has for each device the event that this waits for, and for nothing that is
    queued later: a collective there may never end.  Else it is behind all that is queued now.
    """
    here: list[tuple[str, torch.Tensor]] = []
    there: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for key, tensor in tensors:
        if on_accelerator(tensor) and tensor.is_floating_point() and tensor.numel():
            there.setdefault(tensor.device, []).append((key, tensor))
        else:
            here.append((key, tensor))
    for device, some in there.items():
        with beside(device, behind=behind.get(device) or event_behind(device)):
            norms = torch._foreach_norm([tensor for _, tensor in some], math.inf)
            largest = torch.stack([norm.float() for norm in norms]).tolist()
            # On this stream, too: any other may be stuck by now.
            here += [
                (key, tensor.detach().cpu())
                for (key, tensor), top in zip(some, largest, strict=True)
                if not top < _HUGE
            ]
    return unhealthy(here, allowed=allowed)


def about_state(finding: str) -> bool:
    """Whether a finding is one of these, and not about the steps that led to the state."""
    return finding.startswith(tuple(f"{each.value} in " for each in NotFinite))


def infinite_by_design(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, NotFinite]:
    """What tensors hold from the start: the mask of an attention, a buffer not yet written to.

    Only of those that are not learned it can be meant so.  Waits for the device.
    """
    judged = ((key, _not_finite(tensor)) for key, tensor in tensors)
    return {key: what for key, what in judged if what is not None}


def _not_finite(tensor: torch.Tensor) -> NotFinite | None:
    """The worst that is in it; None where all is finite, or the type has nothing else."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    pattern = _INFINITY.get(tensor.dtype)
    if pattern is None:
        try:
            tensor, pattern = tensor.float(), _INFINITY[torch.float32]
        except NotImplementedError:  # torch can't read it as numbers: four bits, two to a byte
            return None
    kind, infinity, huge = pattern
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(kind).numpy()
    worst = None
    for at in range(0, bits.size, _PIECE):
        piece = bits[at : at + _PIECE]
        # Without its sign a number is the larger the larger its bits are; infinity is above all
        # numbers and NaN above infinity.  With the sign bit set it is so as an unsigned integer.
        unsigned = piece.view(f"u{piece.dtype.name}")
        largest = max(int(piece.max()), int(unsigned.max()) - (1 << (8 * piece.itemsize - 1)))
        if largest > infinity:
            return NotFinite.NAN
        if largest == infinity:
            worst = NotFinite.INFINITY
        elif largest >= huge and worst is None:
            worst = NotFinite.HUGE
    return worst
