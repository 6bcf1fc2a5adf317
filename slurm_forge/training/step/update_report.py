"""What a loop reports about a step that it computed itself: its loss and its gradient norm."""

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

    Values on the host are read now; those on a device are copied after what is queued there, and
    only ``read`` waits for them.
    """

    __slots__ = ("_late", "_norm", "loss", "values")

    def __init__(
        self, loss: torch.Tensor | float | None, grad_norm: torch.Tensor | float | None
    ) -> None:
        #: The reported loss; detached.
        self.loss = loss = reported("loss", loss)
        norm = reported("grad_norm", grad_norm)
        #: Values on the host; None while some are on their way.
        self.values: ReportedValues | None = None
        if not isinstance(loss, torch.Tensor) and not isinstance(norm, torch.Tensor):
            self.values = ReportedValues(loss, norm)
            return
        self._norm = norm
        late = [each for each in (loss, norm) if isinstance(each, torch.Tensor)]
        self._late = HostCopy([each.to(late[0].device, torch.float32) for each in late])

    def read(self) -> ReportedValues:
        """The values, waiting for them if necessary."""
        if self.values is None:
            arrived = iter(self._late.read())
            loss, norm = (
                next(arrived) if isinstance(each, torch.Tensor) else each
                for each in (self.loss, self._norm)
            )
            self.values = ReportedValues(loss, norm)
        return self.values

    def own_loss(self) -> float | None:
        """This rank's loss, if it was reported.  Waits for the device."""
        return self.read().loss


def reported(name: str, value: torch.Tensor | float | None) -> torch.Tensor | float | None:
    """A reported value: a number if it is on the host, else a scalar tensor.

    Raises:
        UsageError: It is not one number.
    """
    if value is None or type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if value.numel() == 1:
            return value.item() if value.is_cpu else value.detach().reshape(())  # no waiting
    elif not isinstance(value, bool) and hasattr(value, "__float__"):
        return float(value)  # numpy's, too
    what = f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor) else value
    raise UsageError(
        f"run.advance({name}={what!r}) is not one number",
        next_step=f"Give {name} as a number or a tensor of one element, or leave it out.",
    )
