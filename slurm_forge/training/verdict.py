"""Reading a verdict from the device without making the device wait."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Reading", "Verdict"]


class Reading(NamedTuple):
    """What the device found: whether the gradient norm was finite, and the norm."""

    finite: bool
    norm: float


class Verdict:
    """A verdict on its way to the host.

    On CUDA the copy into pinned memory begins at once, behind the step's kernels; ``read`` waits
    for that copy and for nothing queued after it, so reading one step late costs nothing.
    """

    def __init__(self, norm: torch.Tensor, found_inf: torch.Tensor) -> None:
        self._reading: Reading | None = None
        self._event: torch.cuda.Event | None = None
        self._values = torch.stack((found_inf.detach(), norm.detach().to(found_inf)))
        if self._values.is_cuda:
            pinned = torch.empty(2, dtype=torch.float32, pin_memory=True)
            pinned.copy_(self._values, non_blocking=True)
            self._values = pinned
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_ready(self) -> bool:
        """Whether ``read`` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> Reading:
        """The verdict, waiting for it if necessary."""
        if self._reading is None:
            if self._event is not None:
                self._event.synchronize()
            found_inf, norm = self._values.tolist()
            self._reading = Reading(not found_inf, norm)
        return self._reading
