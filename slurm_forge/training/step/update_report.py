"""What a loop reports of a step that it has computed itself: its loss and its gradient norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from slurm_forge.errors import UsageError
from slurm_forge.training.step.host_copy import HostCopy


class ReportedValues(NamedTuple):
    """Loss and gradient norm as numbers; None where the loop did not report one."""

    loss: float | None
    norm: float | None


class UpdateReport:
    """One step's ``run.advance(loss=…, grad_norm=…)``.

    Values on the host are read now; those on a device are copied behind what is queued there, and
    only ``read`` waits for them.
    """

    __slots__ = ("_late", "_loss", "_norm", "loss")

    def __init__(
        self, loss: torch.Tensor | float | None, grad_norm: torch.Tensor | float | None
    ) -> None:
        #: The loss as it was reported; detached.
        self.loss = self._loss = _value("loss", loss)
        self._norm = _value("grad_norm", grad_norm)
        self._late: HostCopy | None = None
        if isinstance(self._loss, torch.Tensor) or isinstance(self._norm, torch.Tensor):
            late = [each for each in (self._loss, self._norm) if isinstance(each, torch.Tensor)]
            device = late[0].device
            self._late = HostCopy([each.to(device, torch.float32) for each in late])

    @property
    def is_known(self) -> bool:
        """Whether the values are on the host."""
        return self._late is None

    def read(self) -> ReportedValues:
        """The values, waiting for them if necessary."""
        if self._late is not None:
            arrived = iter(self._late.read())
            self._late = None
            if isinstance(self._loss, torch.Tensor):
                self._loss = next(arrived)
            if isinstance(self._norm, torch.Tensor):
                self._norm = next(arrived)
        return ReportedValues(self._loss, self._norm)  # type: ignore[arg-type]  # numbers by now

    def own_loss(self) -> float | None:
        """This rank's loss, if it was reported.  Waits for the device."""
        return self.read().loss


def _value(name: str, value: torch.Tensor | float | None) -> torch.Tensor | float | None:
    """A number where it is on the host, else a scalar tensor."""
    if value is None or type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if value.numel() == 1:
            return value.item() if value.is_cpu else value.detach().reshape(())  # no waiting
    elif not isinstance(value, bool) and hasattr(value, "__float__"):
        return float(value)  # of numpy, as well
    what = f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor) else value
    raise UsageError(
        f"run.advance({name}={what!r}) is not one number",
        next_step=f"Give {name} as a number or a tensor of one element, or leave it out.",
    )
