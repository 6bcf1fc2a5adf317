"""Agreement on one place in the program where all ranks act: pure, no clock, no sockets.

The pattern is that of JAX's preemption sync: each rank reports the position it has passed, the
target lies after the furthest one, and a rank that would pass a position while a request has no
target waits there.  Positions inside a phase (evaluation, data wait) are used only if every rank is
inside the same phase; otherwise the target is the next step boundary.  A phase is identified by its
path, the names of the phases since the boundary, not by its number: an evaluation on rank 0 alone
shifts the numbers there, and the same number elsewhere may be a phase with collectives.

``RequestAnswers`` is the hub's side, ``RankAgreement`` a rank's.  The protocol is safe because a
rank that has answered a round stays where it is until it knows the target of that round, and
answers and targets of older rounds are ignored, however late they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slurm_forge.control.messages.hub import Request, RequestKind, RequestTarget
from slurm_forge.control.messages.rank import PositionReport
from slurm_forge.vocabulary.position import LAST, Position

#: How long a mixed picture (some ranks inside a phase, others about to enter it) may last.
SETTLE_S = 1.0
#: Completed requests that a rank remembers: numbers rise, and the hub keeps fewer open than this.
_REMEMBERED = 500


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is: it has passed ``position``, or is ``waiting`` in front of it."""

    position: Position
    waiting: bool = False
    path: str = ""

    @property
    def inside(self) -> bool:
        """Whether the rank is inside a phase that has not ended yet."""
        return self.position.phase > 0 and self.position.poll < LAST

    @property
    def next_boundary(self) -> Position:
        """The first step boundary that the rank can still act at."""
        at_boundary = self.position.phase == 0
        step = self.position.step + (0 if self.waiting and at_boundary else 1)
        return Position(step, rollbacks=self.position.rollbacks)


@dataclass(slots=True)
class RequestAnswers:
    """The answers to one request, and the target once it is known."""

    world: int
    asked_at: float
    places: dict[int, RankPosition] = field(default_factory=dict)
    target: Position | None = None
    #: How often the request was repeated; answers to an older round are ignored.
    round: int = 0
    _previous: Position | None = None
    _changed_at: float = 0.0
    #: Whether an answer has arrived since the picture was found mixed.
    _changed: bool = False

    def take(self, ranks: Iterable[int], at: PositionReport, now: float) -> bool:
        """Record where ranks are; True if this reopens the request and all must be asked again."""
        anew = at.round == self.round + 1 and self.target is not None
        if anew:
            self.reopen()
        if at.round == self.round:
            self.answer(ranks, RankPosition(at.position, at.waiting, at.path), now)
        return anew

    def answer(self, ranks: Iterable[int], place: RankPosition, now: float) -> None:
        """Record the place of ranks; a newer answer replaces an older one."""
        self.places.update(dict.fromkeys(ranks, place))
        self._changed_at, self._changed = now, True

    def reopen(self) -> None:
        """Ask again: a rank is about to enter a phase, and the target lies behind it.

        The old target remains valid unless every rank turns out to be inside or in front of that
        phase: one of them may have acted on it already.
        """
        self._previous, self.target = self.target, None
        self.round += 1
        self.places.clear()

    def missing(self) -> tuple[int, ...]:
        """Ranks that have not answered."""
        return tuple(rank for rank in range(self.world) if rank not in self.places)

    def settle(self, now: float) -> Position | None:
        """The target, or None while the picture is incomplete or still mixed."""
        # Called after every message, for thousands of ranks.
        settled = now - self._changed_at >= SETTLE_S
        if len(self.places) < self.world or not (self._changed or settled):
            return None
        target, self._changed = self._common(), False
        if target is None and settled:
            target = self._previous or self._next_boundary()
        if target is not None:
            self.target = target
        return target

    def _common(self) -> Position | None:
        places = self._distinct()
        if all(place.waiting for place in places) and len({p.position for p in places}) == 1:
            return places[0].position
        inside = [place for place in places if place.inside]
        if not inside:
            return self._previous or self._next_boundary()
        phases = {(place.position.phase_place, place.path) for place in places}
        if len(inside) == len(places) and len(phases) == 1:
            (rollbacks, step, phase), _ = phases.pop()
            poll = max(p.position.poll + (0 if p.waiting else 1) for p in places)
            return Position(step, phase, poll, rollbacks)
        return None

    def _next_boundary(self) -> Position:
        return max(place.next_boundary for place in self._distinct())

    def _distinct(self) -> list[RankPosition]:
        """The distinct places: the ranks of a node usually answer together and share one."""
        return list({id(place): place for place in self.places.values()}.values())


@dataclass(slots=True)
class _Pending:
    request: Request
    target: Position | None = None


class RankAgreement:
    """What one rank has been asked to do, and where it is.  Not thread-safe: the member locks.

    The program calls ``arrive`` in front of a position, waits while ``blocked``, then calls
    ``go_on``; requests and targets may arrive at any time in between.  While nothing is
    ``pending``, the only work is to record ``position`` and ``path``.
    """

    def __init__(self) -> None:
        #: The last position passed, and the names of the phases since its boundary.
        self.position = Position(0)
        self.path = ""
        #: Requests that are not done yet, by number.
        self.pending: dict[int, _Pending] = {}
        self._waiting_at: Position | None = None
        self._entering = False
        self._asked_anew: set[int] = set()
        self._acted: set[int] = set()

    @property
    def blocked(self) -> bool:
        """Whether the rank must wait here: a request has no target yet."""
        return any(pending.target is None for pending in self.pending.values())

    def on_request(self, request: Request) -> PositionReport | None:
        """The answer to a new or repeated request; None for a request of an older round."""
        if request.id not in self._acted:
            pending = self.pending.get(request.id)
            if pending is not None and pending.request.round > request.round:
                return None
            if pending is None or pending.request.round < request.round:
                self.pending[request.id] = _Pending(request)
        # Repeated after this rank has acted: it only reports where it is.
        return self._at(request)

    def on_target(self, target: RequestTarget) -> PositionReport | None:
        """Record the target of a round; return what to send if it lies behind the phase ahead.

        The target of an older round is ignored.
        """
        pending = self.pending.get(target.id)
        if pending is None or pending.request.round != target.round:
            return None
        pending.target = target.position
        return self._at(pending.request) if self._asks_anew(pending) else None

    def withdrawn(self, number: int) -> None:
        """The request was abandoned on all ranks before it had a target."""
        if self.pending.pop(number, None) is not None:
            self._acted.add(number)
            self._forget_old()

    def arrive(
        self, position: Position, path: str = "", *, entering: bool = False
    ) -> list[PositionReport]:
        """Arrive at ``position``, in the last phase of ``path``; return what to send before a wait.

        ``entering`` a phase with a target behind it asks all ranks again, so that a stop need not
        wait for the end of a long evaluation.
        """
        self.path = path
        self._waiting_at, self._entering = position, entering
        self._asked_anew.clear()
        for pending in self.pending.values():
            self._asks_anew(pending)
        waiting = [pending for pending in self.pending.values() if pending.target is None]
        return [self._at(pending.request) for pending in waiting]

    def go_on(self) -> tuple[Request, ...]:
        """Pass the position arrived at; the requests due there, in an order that all ranks share.

        They are ordered by target: a rank whose phase ends before two targets reaches both at once,
        while another rank reaches one after the other.
        """
        if self._waiting_at is None:
            return ()
        self.position, self._waiting_at = self._waiting_at, None
        due = sorted(
            (pending.target, number)
            for number, pending in self.pending.items()
            if pending.target is not None and pending.target <= self.position
        )
        self._acted.update(number for _, number in due)
        self._forget_old()
        return tuple(self.pending.pop(number).request for _, number in due)

    def _forget_old(self) -> None:
        """Probes come every minute for months; nobody repeats a request that old."""
        if len(self._acted) > 2 * _REMEMBERED:
            self._acted = set(sorted(self._acted)[-_REMEMBERED:])

    def _asks_anew(self, pending: _Pending) -> bool:
        """Give up a target behind the phase ahead: once per phase, since the other ranks may be
        where no better target can be agreed.
        """
        at, number = self._waiting_at, pending.request.id
        if at is None or not self._entering or number in self._asked_anew:
            return False
        # A target inside this very phase was agreed while this rank was in front of it: others may
        # have acted on it and still be inside, so repeating the request would find another target.
        if pending.target is None or pending.target.phase_place <= at.phase_place:
            return False
        # A repeated request could no longer be abandoned, and nobody waits for a probe.
        if pending.request.kind is RequestKind.PROBE:
            return False
        self._asked_anew.add(number)
        pending.request = replace(pending.request, round=pending.request.round + 1)
        pending.target = None
        return True

    def _at(self, request: Request) -> PositionReport:
        waiting = self._waiting_at is not None
        position = self.position if self._waiting_at is None else self._waiting_at
        return PositionReport(
            id=request.id,
            round=request.round,
            position=position,
            path=self.path,
            waiting=waiting,
        )
