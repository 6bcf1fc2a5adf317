"""The losses of the last steps, kept where they are computed: no step waits for the device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

__all__ = ["LENGTH", "LossTrail", "doubtful", "values"]

#: Steps that are remembered.
LENGTH = 64
#: Fewer say nothing about what is usual.
_LEAST = 8
#: So many losses in a row have to be far off.
_RECENT = 3
#: Above everything that was usual by this factor, a single one is enough.
_ABSURD = 1e4
#: How many deviations from the median no loss of a healthy training is.
_FAR = 20.0
_NORMAL = 1.4826  # a median deviation times this is a standard deviation, of normal noise


class LossTrail:
    """A ring of this rank's mean losses, newest last; it goes into every checkpoint."""

    def __init__(self, device: torch.device) -> None:
        # The last element counts how many were ever noted; it is kept up to date in ``tensor``.
        self._ring = torch.zeros(LENGTH + 1, dtype=torch.float64, device=_wide(device))
        self._noted = 0

    def note(self, loss: torch.Tensor) -> None:
        """The loss of one more step; nothing is waited for."""
        self._ring[self._noted % LENGTH].copy_(loss.reshape(()), non_blocking=True)
        self._noted += 1

    def tensor(self) -> torch.Tensor:
        """The ring itself: what is saved, and read into."""
        self._ring[LENGTH].fill_(self._noted)
        return self._ring

    def restored(self) -> None:
        """The ring has been read from a checkpoint.  Waits for the device."""
        self._noted = int(self._ring[LENGTH].item())

    def snapshot(self) -> torch.Tensor:
        """The ring as it is now; to be read later, wherever that disturbs nobody."""
        return self.tensor().clone()

    @property
    def noted(self) -> int:
        """How many were ever noted."""
        return self._noted


def values(ring: torch.Tensor) -> list[float]:
    """The losses in a ring, oldest first.  Waits for the device."""
    *kept, noted = ring.tolist()
    count = int(noted)
    if count < LENGTH:
        return kept[: max(0, count)]
    at = count % LENGTH
    return [*kept[at:], *kept[:at]]


def doubtful(losses: Sequence[float]) -> tuple[str, ...]:
    """Why a state that came out of steps with the last of these losses is not to be trusted.

    One strange batch is no reason: the last few have to lie far off, and above all that was usual.
    """
    if not losses:
        return ()
    if not math.isfinite(losses[-1]):
        return (f"the loss is {losses[-1]}",)
    recent = losses[-_RECENT:]
    usual = [loss for loss in losses[:-_RECENT] if math.isfinite(loss)]
    if len(usual) < _LEAST or not all(map(math.isfinite, recent)):
        return ()
    middle, highest = statistics.median(usual), max(abs(loss) for loss in usual)
    spread = _NORMAL * statistics.median(abs(loss - middle) for loss in usual)
    far = middle + _FAR * max(spread, 0.01 * abs(middle))
    off = all(loss > max(far, 2.0 * highest) for loss in recent)
    if off or 0.0 < _ABSURD * highest < losses[-1]:
        text = f"the loss is {losses[-1]:.4g}"
        return (f"{text}, its median over {len(usual)} steps was {middle:.4g}",)
    return ()


def _wide(device: torch.device) -> torch.device:
    # MPS has no float64, and a tensor of the host is as good there.
    return torch.device("cpu") if device.type == "mps" else device
