"""The collective probe of one rank: a group of its own, for which training never waits.

Issued at a step boundary that all ranks agreed on, so that it has the same place in every rank's
order of collectives; watched by a thread; judged by the hub, which knows who has arrived.

The summed tensor has a row for each rank, with its own value in its own row and zeros in all
others.  So a value that arrives changed identifies its sender.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slurm_forge.control import Member
from slurm_forge.control.messages.probe import ProbeArrived, ProbeBroke, ProbeDone
from slurm_forge.device.accelerator import is_accelerator, make_current
from slurm_forge.device.groups import abort_group, seconds_on_device, time_collectives
from slurm_forge.device.streams import beside, copy_to_host

#: Polling intervals of a probe under way, by its age.
_LOOKS = ((0.05, 0.0005), (1.0, 0.002), (float("inf"), 0.02))
#: Values are integers below this, exact in float32 in whatever order they are summed.
_VALUES = 509
#: On CPUs ranks share cores and memory with training: larger probes would slow it down.
_LARGEST_ON_CPU = 1 << 20
_SHOWN = 256
_LEAVE_WITHIN_S = 1.0


def value_of(number: int, rank: int) -> int:
    """The contribution of ``rank`` to probe ``number``: never 0, and different each time."""
    return (31 * number + 7 * rank) % _VALUES + 1


class _Message:
    """One row per rank, in memory that is kept; all methods but ``fill`` are the watcher's."""

    def __init__(self, device: torch.device, rank: int, world_size: int, width: int) -> None:
        self.tensor = torch.zeros((world_size, width), device=device)
        self._own = self.tensor[rank]
        self._rank, self._world = rank, world_size

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def fill(self, number: int, spoilt: bool) -> None:
        """Main thread: write this rank's contribution; queued on the device without waiting."""
        self.tensor.zero_()
        self._own.fill_(float(value_of(number, self._rank) + (1 if spoilt else 0)))

    def right(self, number: int) -> torch.Tensor:
        """Whether the sum is right, by row, on the tensor's device."""
        values = [float(value_of(number, rank)) for rank in range(self._world)]
        expected = torch.tensor(values).to(self.tensor.device, non_blocking=True)
        return (self.tensor == expected.unsqueeze(1)).all(dim=1)


@dataclass(frozen=True, slots=True)
class _Issued:
    number: int
    started: float
    small: dist.Work
    large: dist.Work | None


class Probe:
    """Issues probes on ``group``, one at a time; a late one is for the hub to judge.

    ``large`` is the size in bytes of probes that measure bandwidth, None for none.  ``spoilt``
    returns whether this rank is to contribute a wrong value, for rehearsals.
    """

    def __init__(
        self,
        *,
        member: Member,
        group: dist.ProcessGroup,
        device: torch.device,
        rank: int,
        world_size: int,
        large: int | None = None,
        spoilt: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member = member
        self._group = group
        self._device = device
        self._world_size = world_size
        self._spoilt = spoilt
        self._clock = clock
        self._gpu = is_accelerator(device)
        self._small = _Message(device, rank, world_size, 1)
        self._large: _Message | None = None
        if large is not None:
            most = large if self._gpu else min(large, _LARGEST_ON_CPU)
            self._large = _Message(device, rank, world_size, max(1, most // 4 // world_size))
        if self._gpu:
            time_collectives(group)
        self._todo: queue.SimpleQueue[_Issued | None] = queue.SimpleQueue()
        self._idle = True
        self._closed = self._abandoned = False
        self._thread = threading.Thread(target=self._serve, name="forge-probe", daemon=True)
        self._thread.start()

    def issue(self, number: int, *, large: bool = False) -> None:
        """Start probe ``number``; returns at once.  Main thread, at the agreed boundary.

        An error of the group is sent over the channel, not raised: training has its own group.
        """
        if self._closed:
            return
        if not self._idle:
            self._member.send(ProbeBroke(id=number, text="the probe before is not over"))
            return
        self._member.send(ProbeArrived(id=number, gpu=self._gpu))
        started = self._clock()
        second: dist.Work | None = None
        try:
            spoilt = self._spoilt()
            self._small.fill(number, spoilt)
            first = dist.all_reduce(self._small.tensor, group=self._group, async_op=True)
            if large and self._large is not None:
                self._large.fill(number, spoilt)
                second = dist.all_reduce(self._large.tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            self._member.send(ProbeBroke(id=number, text=_first_line(error)))
            return
        if first is not None:
            self._idle = False
            self._todo.put(_Issued(number, started, first, second))

    def close(self) -> None:
        """The launch is over: end the watcher, whatever the state of a probe is."""
        self._closed = True
        self._todo.put(None)
        self._thread.join(_LEAVE_WITHIN_S)

    def abandon(self) -> None:
        """The probe under way hangs, and training does not: give its communicator up.

        Called by the main thread at a boundary that all ranks agreed on; the watcher's thread
        aborts the communicator, so that training does not wait.
        """
        self._closed = self._abandoned = True
        self._todo.put(None)

    # -- the watcher -------------------------------------------------------------------------

    def _serve(self) -> None:
        make_current(self._device)
        self._serve_probes()
        if self._abandoned:
            # Else its kernel keeps its part of the device, and NCCL's watchdog ends the process.
            abort_group(self._group)

    def _serve_probes(self) -> None:
        while not self._closed:
            issued = self._todo.get()
            if issued is None:
                return
            try:
                report = self._watch(issued)
            except RuntimeError as error:
                # Gloo: the connection to a dead rank.  Training notices by itself.
                if not self._closed:
                    text = _first_line(error)
                    self._member.send(ProbeBroke(id=issued.number, text=text))
                continue
            if report is not None:
                self._idle = True
                self._member.send(report)

    def _watch(self, issued: _Issued) -> ProbeDone | None:
        """The outcome; None once the launch is over."""
        small = self._completed(issued.small)
        if small is None:
            return None
        wrong = set(self._wrong(self._small, issued.number, issued.small))
        bandwidth = 0.0
        if issued.large is not None and self._large is not None:
            large = self._completed(issued.large)
            if large is None:
                return None
            wrong |= set(self._wrong(self._large, issued.number, issued.large))
            seconds = seconds_on_device(issued.large) or large - small
            share = 2 * (self._world_size - 1) / self._world_size
            bandwidth = share * self._large.size / max(seconds, 1e-6)
        return ProbeDone(
            id=issued.number,
            latency_s=(small - issued.started,),
            wrong=(tuple(sorted(wrong)[:_SHOWN]),),
            bandwidth=(bandwidth,),
        )

    def _completed(self, work: dist.Work) -> float | None:
        """When it completed.  Polled: ``Work.wait(timeout)`` would abort the communicator."""
        started_at = self._clock()
        while not work.is_completed():
            if self._closed:
                return None
            since = self._clock() - started_at
            time.sleep(next(pause for until, pause in _LOOKS if since < until))
        return self._clock()

    def _wrong(self, message: _Message, number: int, work: dist.Work) -> list[int]:
        """Ranks whose values differ from what they sent; ``RuntimeError`` if the work failed."""
        if not self._gpu:
            work.wait()  # it is complete: raises its error, if there was one
            return _rows(message.right(number))
        # A separate stream: nothing here waits for training's stream, or the other way round.
        with beside(self._device):
            work.wait()
            here, copied = copy_to_host(message.right(number))
        while copied is not None and not copied.query():
            if self._closed:
                return []
            time.sleep(_LOOKS[0][1])
        return _rows(here)


def _rows(right: torch.Tensor) -> list[int]:
    return [rank for rank, fine in enumerate(right.tolist()) if not fine]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
