"""Whether what is about to be trusted is finite: looked at in the copy, beside the write.

A gradient of 1e25 leaves a finite loss and finite weights, and infinity in Adam's second moment.
Nothing of this runs on the device or holds training up: it reads the arena that is written out, on
one thread that leaves torch's threads, and Python's lock, to the training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

__all__ = ["NOTES", "infinite_by_design", "unhealthy"]

#: Keys under it are figures about the training, not state: they may hold anything.
NOTES = "notes/"

_MOST_NAMED = 5
#: Elements that are looked at in one go: every piece takes the interpreter away from the training.
_PIECE = 4 << 20
#: As which integers to look at a type, and infinity in it.
_INFINITY = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


def unhealthy(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    allowed: Collection[str] = frozenset(),
) -> tuple[str, ...]:
    """What is not finite, named: ``NaN in optimizers/adam/…/exp_avg_sq``; a few names at most.

    Of keys in ``allowed`` infinity (not NaN) is taken as meant.
    """
    found: list[str] = []
    for key, tensor in tensors:
        if key.startswith(NOTES):
            continue
        what = _not_finite(tensor)
        if what is not None and not (what == "infinity" and key in allowed):
            found.append(f"{what} in {key}")
    if len(found) > _MOST_NAMED:
        found[_MOST_NAMED:] = [f"and {len(found) - _MOST_NAMED} more tensors"]
    return tuple(found)


def infinite_by_design(tensors: Iterable[tuple[str, torch.Tensor]]) -> frozenset[str]:
    """Keys of tensors that hold infinity from the start: the masks of an attention, say.

    Waits for the device.
    """
    return frozenset(key for key, tensor in tensors if _not_finite(tensor) == "infinity")


def _not_finite(tensor: torch.Tensor) -> str | None:
    """``NaN``, ``infinity`` or None."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    pattern = _INFINITY.get(tensor.dtype)
    if pattern is None:
        tensor, pattern = tensor.float(), _INFINITY[torch.float32]
    kind, infinity = pattern
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(kind).numpy()
    found = None
    for at in range(0, bits.size, _PIECE):
        piece = bits[at : at + _PIECE]
        # Without its sign a number is the larger the larger its bits are; infinity is above all
        # numbers and NaN above infinity.  With the sign bit set it is so as an unsigned integer.
        unsigned = piece.view(f"u{piece.dtype.name}")
        largest = max(int(piece.max()), int(unsigned.max()) - (1 << (8 * piece.itemsize - 1)))
        if largest > infinity:
            return "NaN"
        if largest == infinity:
            found = "infinity"
    return found
