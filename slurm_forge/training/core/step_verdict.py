"""What became of a step, on its way from the device to the host without making either wait."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["LARGEST", "Reading", "Verdict"]

#: The largest finite float32: a norm above it counts as infinite whatever it was computed in.
LARGEST = float(torch.finfo(torch.float32).max)


class Reading(NamedTuple):
    """One step: was it ``applied``, was the gradient norm ``finite``, the norm, and the loss.

    A step with a finite norm is left out where the norm is beyond the limit.  ``loss`` is this
    rank's, NaN where none was given.
    """

    applied: bool
    finite: bool
    norm: float
    loss: float


class Verdict:
    """A verdict on its way to the host.

    On CUDA the copy into pinned memory begins at once, behind what has been queued so far;
    ``read`` waits for that copy and for nothing queued after it, so reading one step late costs
    nothing.
    """

    __slots__ = ("_event", "_loss", "_reading", "_values")

    def __init__(
        self, found_inf: torch.Tensor, norm: torch.Tensor, loss: torch.Tensor | None = None
    ) -> None:
        self._reading: Reading | None = None
        self._event: torch.cuda.Event | None = None
        values = [found_inf.detach(), norm.detach().to(found_inf)]
        self._loss = math.nan
        if loss is not None and loss.device.type == "cpu" and found_inf.device.type != "cpu":
            self._loss = loss.item()  # there already; sending it to the device would wait
        elif loss is not None:
            values.append(loss.detach().reshape(()).to(found_inf))
        self._values = torch.stack(values)
        if self._values.is_cuda:
            pinned = torch.empty(len(values), dtype=torch.float32, pin_memory=True)
            pinned.copy_(self._values, non_blocking=True)
            self._values = pinned
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(found_inf.device))

    @classmethod
    def known(cls, reading: Reading) -> Verdict:
        """One that the host has reached itself."""
        verdict = cls.__new__(cls)
        verdict._reading, verdict._event = reading, None
        return verdict

    def is_ready(self) -> bool:
        """Whether ``read`` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> Reading:
        """The verdict, waiting for it if necessary."""
        if self._reading is None:
            if self._event is not None:
                self._event.synchronize()
            found_inf, norm, *loss = self._values.tolist()
            self._reading = Reading(
                not found_inf, norm <= LARGEST, norm, loss[0] if loss else self._loss
            )
        return self._reading
