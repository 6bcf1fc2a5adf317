"""Values on their way from a device to the host: asked for now, read when they have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """A copy of scalar tensors of one device and dtype, begun now.

    On CUDA the copy into pinned memory is queued behind what has been queued so far; ``read``
    waits for that copy and for nothing queued after it, so reading one step late costs nothing.
    """

    __slots__ = ("_event", "_values")

    def __init__(self, scalars: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = torch.stack(list(scalars))
        if self._values.is_cuda:
            device = self._values.device
            pinned = torch.empty(len(scalars), dtype=self._values.dtype, pin_memory=True)
            pinned.copy_(self._values, non_blocking=True)
            self._values = pinned
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def is_ready(self) -> bool:
        """Whether ``read`` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        """The values, waiting for them if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return list(map(float, self._values.tolist()))
