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
        self._ring[self._noted % LENGTH].copy_(loss, non_blocking=True)
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
    """Why a state that came out of a step with the last of these losses is not to be trusted."""
    if not losses:
        return ()
    last = losses[-1]
    if not math.isfinite(last):
        return (f"the loss is {last}",)
    usual = [loss for loss in losses[:-1] if math.isfinite(loss)]
    if len(usual) < _LEAST:
        return ()
    middle = statistics.median(usual)
    spread = _NORMAL * statistics.median(abs(loss - middle) for loss in usual)
    if last - middle > _FAR * max(spread, 0.01 * abs(middle)):
        return (
            f"the loss is {last:.4g}, and was {middle:.4g} in the middle of {len(usual)} steps",
        )
    return ()


def _wide(device: torch.device) -> torch.device:
    # MPS has no float64, and a tensor of the host is as good there.
    return torch.device("cpu") if device.type == "mps" else device
