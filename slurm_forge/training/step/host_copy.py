"""Values on their way from a device to the host: requested now, read when they have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slurm_forge.device.streams import stack_on_host


class HostCopy:
    """A copy of scalar tensors of one device and dtype, begun now.

    The copy into pinned memory is queued after everything queued on the device so far; ``read``
    waits for that copy and for nothing queued after it, so reading one step late costs nothing.
    """

    __slots__ = ("_event", "_values")

    def __init__(self, scalars: Sequence[torch.Tensor]) -> None:
        self._values, self._event = stack_on_host(scalars)

    def is_ready(self) -> bool:
        """Whether ``read`` would return at once."""
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        """The values, waiting for them if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return list(map(float, self._values.tolist()))
