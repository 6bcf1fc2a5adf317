"""Streams and events: what is queued on a device, and when it has come to it.

Nothing here waits but what is named so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from slurm_forge.device.accelerator import is_accelerator, module_of


class Event(Protocol):
    """An event of a device: torch gives those of its device modules no common type."""

    def record(self, stream: object = None) -> None:
        """Queue it, on the current stream unless another is given."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another, both made by ``timed_event``."""


def timed_event(device: torch.device) -> Event:
    """An event that tells the time, not yet recorded."""
    event: Event = module_of(device).Event(enable_timing=True)
    return event


def record(event: Event, device: torch.device) -> None:
    """Record it on the current stream of the device."""
    event.record(module_of(device).current_stream(device))


def event_behind(device: torch.device) -> Event | None:
    """An event behind all that is queued on the device's current stream; None on a CPU."""
    if not is_accelerator(device):
        return None
    module = module_of(device)
    with module.device(device):
        event: Event = module.Event()
        event.record(module.current_stream(device))
    return event


def when_done(devices: Collection[torch.device]) -> Callable[[], None]:
    """What waits for all that is queued now on the current stream of each device."""
    events = [event_behind(device) for device in devices]

    def wait() -> None:
        for event in events:
            if event is not None:
                event.synchronize()

    return wait


@contextmanager
def beside(device: torch.device, *, behind: Event | None = None) -> Iterator[None]:
    """A stream of its own, for which the current one does not wait.

    ``behind``: it waits for that event, such as one behind the update that makes the values it
    reads; else for nothing of the current stream.
    """
    module = module_of(device)
    with module.device(device):
        own = module.Stream(device=device)
        if behind is not None:
            own.wait_event(behind)
        with module.stream(own):
            yield


def copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, Event | None]:
    """Queue a copy into pinned memory; the event tells when it is there.

    Returns:
        The copy and its event; of a tensor on the host the tensor itself and None.
    """
    device = values.device
    if not is_accelerator(device):
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host, event_behind(device)


def stack_on_host(scalars: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Event | None]:
    """``copy_to_host`` of scalars of one device and dtype, as one tensor."""
    return copy_to_host(torch.stack(list(scalars)))
