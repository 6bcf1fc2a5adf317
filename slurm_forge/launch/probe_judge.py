"""When to probe, and what to make of who came and who did not.  Talks to the hub only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from slurm_forge.control import Hub, RequestKind
from slurm_forge.control import protocol as p
from slurm_forge.control.hub import MemberView
from slurm_forge.journal.events import ProbeMeasured

__all__ = ["ProbeJudge"]

#: A rank that says nothing for this long, although it says something every second, is not slow.
_SILENT_S = 5.0
#: A rank that talks but does not come may be in a long step: slow is not dead, up to this factor.
_PATIENCE = 10.0
#: Fine probes are written down rarely: the first, then one in so many.
_SAMPLE = 30
#: Phases in which a rank may rightly be away from the next step boundary for long.
_ELSEWHERE = frozenset({"start", "load", "save", "data"})


@dataclass(slots=True)
class _Flight:
    number: int
    asked: float
    arrived: dict[int, float] = field(default_factory=dict)
    done: dict[int, p.ProbeDone] = field(default_factory=dict)


class ProbeJudge:
    """``look`` now and then; ``hear`` what ranks say; ``failed`` once a probe has failed."""

    def __init__(
        self,
        hub: Hub,
        every: timedelta | None,
        deadline: timedelta,
        clock: Callable[[], float],
    ) -> None:
        self._hub = hub
        self._every_s = None if every is None else every.total_seconds()
        self._deadline_s = deadline.total_seconds()
        self._clock = clock
        self._next: float | None = None
        self._flight: _Flight | None = None
        self._good = 0
        #: The verdict of a probe that failed.
        self.failed: ProbeMeasured | None = None

    def hear(self, rank: int, message: p.Message) -> None:
        """A rank has issued its part, or finished it."""
        flight = self._flight
        if flight is None:
            return
        if isinstance(message, p.ProbeArrived) and message.id == flight.number:
            flight.arrived[rank] = self._clock()
        elif isinstance(message, p.ProbeDone) and message.id == flight.number:
            flight.done[rank] = message

    def look(self, now: float) -> ProbeMeasured | None:
        """Ask for a probe when it is time; a verdict when there is one to be written down."""
        if self._every_s is None or self.failed is not None:
            return None
        members = self._hub.members()
        if self._flight is None:
            self._maybe_ask(members, now)
            return None
        return self._verdict(self._flight, members, now)

    def _maybe_ask(self, members: dict[int, MemberView], now: float) -> None:
        everybody = len(members) == self._hub.world_size and self._hub.world_size > 1
        if not everybody or not all(member.started for member in members.values()):
            return
        if self._next is None:
            self._next = now + (self._every_s or 0.0)
        if now >= self._next:
            self._next = now + (self._every_s or 0.0)
            number = self._hub.request(RequestKind.PROBE, "interval")
            self._flight = _Flight(number, now)

    def _verdict(
        self, flight: _Flight, members: dict[int, MemberView], now: float
    ) -> ProbeMeasured | None:
        step = max(member.step for member in members.values())
        if len(flight.done) == self._hub.world_size:
            self._flight = None
            wrong = tuple(rank for rank, done in sorted(flight.done.items()) if not done.ok)
            if wrong:
                return self._fail(wrong, members, step)
            latency = max(done.latency_s for done in flight.done.values())
            self._good += 1
            if self._good % _SAMPLE != 1:
                return None
            return ProbeMeasured(
                ok=True, step=step, latency_s=latency, count=1 if self._good == 1 else _SAMPLE
            )
        since = now - min(flight.arrived.values(), default=flight.asked)
        if since < self._deadline_s:
            return None
        missing = [rank for rank in members if rank not in flight.arrived] or [
            rank for rank in members if rank not in flight.done
        ]
        silent = tuple(rank for rank in missing if now - members[rank].heard > _SILENT_S)
        if silent:
            return self._fail(silent, members, step)
        elsewhere = any(members[rank].phase in _ELSEWHERE for rank in missing)
        inside_phase = any(members[rank].phase not in ("train", "data") for rank in missing)
        if elsewhere or inside_phase or since < _PATIENCE * self._deadline_s:
            return None
        return self._fail(tuple(missing), members, step)

    def _fail(
        self, late: tuple[int, ...], members: dict[int, MemberView], step: int
    ) -> ProbeMeasured:
        self.failed = ProbeMeasured(
            ok=False,
            step=step,
            late_ranks=late,
            late_hosts=tuple(members[rank].host for rank in late),
        )
        return self.failed
