"""Whether a state that is about to be saved is sound: checked in the copy, beside the write.

A gradient of 1e25 leaves a finite loss and finite weights, and infinity in Adam's second moment; a
flipped exponent bit turns a weight into 1e30, and a normalization behind it hides that.  Nothing
here runs on the device or holds up training: it reads the arena that is being written, on one
thread that leaves torch's threads, and the interpreter lock, to training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType

import torch

from slurm_forge.device.accelerator import on_accelerator
from slurm_forge.device.streams import Event, beside, event_behind

#: Keys under it are figures about training, not state: they may hold any value.
NOTES = "notes/"

_MOST_NAMED = 5
_HUGE = 1e20


class NotFinite(str, Enum):
    """The worst value in a tensor: NaN is worse than infinity."""

    #: No weight, moment or statistic of healthy training is this large.
    HUGE = "a number above 1e20"
    INFINITY = "infinity"
    NAN = "NaN"


_NONE_ALLOWED: Mapping[str, NotFinite] = MappingProxyType({})
_BEHIND_ALL: Mapping[torch.device, Event | None] = MappingProxyType({})
#: Elements that are checked at once: every piece holds the interpreter lock.
_PIECE = 4 << 20
#: For each type: the integer type to read it as, infinity in it, and 1e20 (float16 has none).
_INFINITY = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000, 0x4415_AF1D_78B5_8C40),
    torch.float32: (torch.int32, 0x7F80_0000, 0x60AD_78EC),
    torch.bfloat16: (torch.int16, 0x7F80, 0x60AD),
    torch.float16: (torch.int16, 0x7C00, 0x7C00),
}
#: In ascending order of badness.
_ORDER = tuple(NotFinite)


def unhealthy(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    allowed: Mapping[str, NotFinite] = _NONE_ALLOWED,
) -> tuple[str, ...]:
    """The unsound values, named: ``NaN in optimizers/adam/…/exp_avg_sq``; a few names at most.

    For keys in ``allowed``, the value there and anything less bad counts as intended.
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
    """The same for tensors in place, which may change meanwhile.

    On a GPU they are checked there, in one pass beside training, and only the result is copied.
    ``behind`` has for each device the event that this waits for, and for nothing that is queued
    later: a collective there may never end.  Without one it waits for all that is queued now.
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
    """Non-finite values by design: the mask of an attention, a buffer not yet written to.

    Only in tensors that are not learned can they be intended.  Waits for the device.
    """
    judged = ((key, _not_finite(tensor)) for key, tensor in tensors)
    return {key: what for key, what in judged if what is not None}


def _not_finite(tensor: torch.Tensor) -> NotFinite | None:
    """The worst value in it; None if all are finite, or the type has only finite values."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    pattern = _INFINITY.get(tensor.dtype)
    if pattern is None:
        try:
            tensor, pattern = tensor.float(), _INFINITY[torch.float32]
        except NotImplementedError:  # torch can't read it as numbers: four bits, two per byte
            return None
    kind, infinity, huge = pattern
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(kind).numpy()
    worst = None
    for at in range(0, bits.size, _PIECE):
        piece = bits[at : at + _PIECE]
        # Without the sign bit, the bits of floats order like integers; infinity is above all
        # numbers and NaN above infinity.  With the sign bit the same holds for unsigned integers.
        unsigned = piece.view(f"u{piece.dtype.name}")
        largest = max(int(piece.max()), int(unsigned.max()) - (1 << (8 * piece.itemsize - 1)))
        if largest > infinity:
            return NotFinite.NAN
        if largest == infinity:
            worst = NotFinite.INFINITY
        elif largest >= huge and worst is None:
            worst = NotFinite.HUGE
    return worst
