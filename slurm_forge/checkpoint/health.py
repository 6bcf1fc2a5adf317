"""Whether what is about to be trusted is finite: looked at in the copy, beside the write.

A gradient of 1e25 leaves a finite loss and finite weights, and infinity in Adam's second moment.
Nothing of this runs on the device or holds training up: it reads the arena that is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

__all__ = ["NOTES", "Part", "infinite_by_design", "unhealthy"]

#: Keys under it are figures about the training, not state: they may hold anything.
NOTES = "notes/"

#: A tensor of the arena, and up to where the arena must be filled for it to be there.
Part = tuple[str, torch.Tensor, int]

_MOST_NAMED = 5
#: Elements that are looked at in one go.
_PIECE = 8 << 20


def unhealthy(
    parts: Iterable[Part],
    *,
    ready: Callable[[int], None] = lambda _: None,
    allowed: Collection[str] = frozenset(),
) -> tuple[str, ...]:
    """What is not finite, named: ``NaN in optimizers/adam/…/exp_avg_sq``; a few names at most.

    ``ready(n)`` returns when the first ``n`` bytes are there.  Of keys in ``allowed`` infinity
    (not NaN) is taken as meant.
    """
    found: list[str] = []
    for key, tensor, end in parts:
        if key.startswith(NOTES):
            continue
        ready(end)
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
    with torch.no_grad():
        for piece in _pieces(tensor):
            # A finite sum has finite terms only, and a sum runs at the speed of memory.
            wide = torch.float64 if piece.dtype == torch.float64 else torch.float32
            if bool(torch.isfinite(piece.sum(dtype=wide))):
                continue
            if bool(torch.isnan(piece).any()):
                return "NaN"
            if bool(torch.isinf(piece).any()):
                return "infinity"
    return None


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    # What a second look allocates stays small; types of eight bits can't be summed as they are.
    flat = tensor.detach().reshape(-1)
    pieces = torch.split(flat, _PIECE)
    return pieces if flat.dtype.itemsize > 1 else [piece.float() for piece in pieces]
