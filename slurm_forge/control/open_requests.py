"""The open requests to all ranks of a launch, and their targets: no sockets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slurm_forge.control.gathering import RequestAnswers
from slurm_forge.control.hub_events import RequestAbandoned, TargetAgreed
from slurm_forge.control.messages.hub import Request, RequestKind, RequestTarget
from slurm_forge.control.messages.rank import Heartbeat, PositionReport


@dataclass(slots=True)
class _Open:
    request: Request
    answers: RequestAnswers
    #: The deadline for its target, if it may be abandoned.
    until: float


@dataclass(slots=True)
class OpenRequests:
    """The requests of a launch that some rank may still ask about."""

    _open: dict[int, _Open] = field(default_factory=dict)
    _next_id: int = 1

    def ask(
        self, kind: RequestKind, reason: str, now: float, *, world: int, until: float
    ) -> Request:
        """A new request to this many ranks, abandoned if it has no target by ``until``."""
        request = Request(id=self._next_id, kind=kind, reason=reason)
        self._next_id += 1
        self._open[request.id] = _Open(request, RequestAnswers(world, now), until)
        return request

    def missing(self, number: int) -> tuple[int, ...]:
        """Ranks that have not answered a request."""
        entry = self._open.get(number)
        return () if entry is None else entry.answers.missing()

    def answer(self, ranks: Iterable[int], at: PositionReport, now: float) -> Request | None:
        """Record where ranks are; return the request if all ranks must be asked again."""
        entry = self._open.get(at.id)
        if entry is None or not entry.answers.take(ranks, at, now):
            return None
        entry.request = replace(entry.request, round=entry.answers.round)
        return entry.request

    def settle(
        self, now: float, number: int | None = None
    ) -> tuple[TargetAgreed | RequestAbandoned, ...]:
        """The new outcomes of one request, or of all: each target once, when it is known."""
        numbers = tuple(self._open) if number is None else (number,)
        settled = (self._settle(self._open.get(each), now) for each in numbers)
        return tuple(each for each in settled if each is not None)

    def _settle(self, entry: _Open | None, now: float) -> TargetAgreed | RequestAbandoned | None:
        if entry is None or entry.answers.target is not None:
            return None
        target = entry.answers.settle(now)
        if target is not None:
            return TargetAgreed(entry.request, target, now - entry.answers.asked_at)
        # Unless it had a target before: a rank may have acted on it.
        if entry.answers.round or now < entry.until:
            return None
        del self._open[entry.request.id]
        return RequestAbandoned(entry.request)

    def all(self) -> tuple[tuple[Request, RequestTarget | None], ...]:
        """Every request, with its target if known: what a joining rank must be sent."""
        return tuple((each.request, _target(each)) for each in self._open.values())

    def forget_old(self, beats: Sequence[Heartbeat]) -> None:
        """Forget what all ranks have passed, by these last heartbeats."""
        slowest = min((beat.turn, beat.step) for beat in beats)
        for number, entry in list(self._open.items()):
            target = entry.answers.target
            if target is not None and (target.rollbacks, target.step) < slowest:
                del self._open[number]


def _target(entry: _Open) -> RequestTarget | None:
    target, request = entry.answers.target, entry.request
    if target is None:
        return None
    return RequestTarget(id=request.id, round=request.round, position=target)
