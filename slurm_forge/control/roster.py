"""What a hub knows of the ranks of its launch, and of their monitors: who they are, what they said.

Thousands of heartbeats come every second, and somebody looks at each rank only where something is
wrong.  So what ranks say together is kept once for all of them, and views of each are made for
whoever asks.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Generic, NamedTuple, TypeVar

from slurm_forge.control.messages.message import Columns
from slurm_forge.control.messages.monitor import MonitorHeartbeat
from slurm_forge.control.messages.rank import Heartbeat

_BeatT = TypeVar("_BeatT", Heartbeat, MonitorHeartbeat)
_ViewT = TypeVar("_ViewT", "MemberView", "MonitorView")
_last_message_at = attrgetter("last_message_at")
#: Of the columns of a ``MonitorHeartbeat``.
_since_s, _state = itemgetter(0), itemgetter(2)


class MemberView(NamedTuple):
    """What is known of a rank; times are on the monotonic clock of the hub.

    The fields from ``rollbacks`` on are those of its last ``Heartbeat``.
    """

    rank: int
    host: str
    pid: int
    last_message_at: float
    connected: bool = True
    rollbacks: int = 0
    step: int = 0
    begun: int = 0
    phase: str = "start"
    started: bool = False


class MonitorView(NamedTuple):
    """What the monitor of a rank said last; ``last_message_at`` is on the hub's monotonic clock.

    The columns of ``pulse`` may be missing, or those of all monitors of the node: this one's are
    beside it.
    """

    rank: int
    host: str
    last_message_at: float
    connected: bool = True
    pulse: MonitorHeartbeat | None = None
    since_s: float = 0.0
    mute_s: float = 0.0
    state: str = ""


class ProgressSummary(NamedTuple):
    """What monitors said last, in sum: the oldest of it, the longest stretch, all states."""

    oldest_message_at: float
    since_s: float
    states: frozenset[str]


@dataclass(slots=True, eq=False)
class Speakers(Generic[_BeatT, _ViewT]):
    """Ranks, or monitors, that share a message, and what they said together last.

    ``current`` counts those of them whose last heartbeat it is.
    """

    ranks: tuple[int, ...]
    last_message_at: float = 0.0
    beat: _BeatT | None = None
    #: Of the beat: what each of them has said of its own, in the order of ``ranks``.
    columns: Columns = ()
    current: int = 0
    #: Made when somebody asks, until the next message.
    views: tuple[_ViewT, ...] | None = None


@dataclass(slots=True, eq=False)
class _Entry(Generic[_BeatT, _ViewT]):
    """Of a rank, or of its monitor: who it is, and with whom it has spoken last."""

    host: str
    pid: int
    speakers: Speakers[_BeatT, _ViewT]
    #: Its place among them.
    column: int = 0
    #: When it said anything by itself.
    spoke_at: float = 0.0
    connected: bool = True


@dataclass(slots=True)
class Roster(ABC, Generic[_BeatT, _ViewT]):
    """All ranks that ever joined a launch, or all monitors.  Not thread-safe."""

    _entries: dict[int, _Entry[_BeatT, _ViewT]] = field(default_factory=dict)
    #: Those with whom somebody has spoken last, in a dictionary for its order.
    _speakers: dict[Speakers[_BeatT, _ViewT], None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def join(self, rank: int, host: str, pid: int, now: float) -> None:
        """Somebody has come, or has come back: nothing of what it said before counts."""
        host = sys.intern(host)  # said by all ranks of a node
        alone: Speakers[_BeatT, _ViewT] = Speakers((rank,), now)
        before = self._entries.get(rank)
        self._entries[rank] = _Entry(host, pid, alone if before is None else before.speakers)
        if before is None:
            alone.current, self._speakers[alone] = 1, None
        else:
            self._move(alone)

    def leave(self, rank: int) -> None:
        """Its connection has ended."""
        entry = self._entries[rank]
        entry.connected, entry.speakers.views = False, None

    def is_connected(self, rank: int) -> bool:
        """Whether it is here now."""
        entry = self._entries.get(rank)
        return entry is not None and entry.connected

    def place_of(self, rank: int) -> tuple[str, int] | None:
        """Its host and process; None where it has never come."""
        entry = self._entries.get(rank)
        return None if entry is None else (entry.host, entry.pid)

    def speakers(self, ranks: Sequence[int]) -> Speakers[_BeatT, _ViewT]:
        """To be kept for what these say together, again and again."""
        if len(ranks) == 1:
            own = self._entries[ranks[0]].speakers
            if own.ranks == ranks:
                return own
        return Speakers(tuple(ranks))

    def hear(
        self,
        speakers: Speakers[_BeatT, _ViewT],
        now: float,
        beat: _BeatT | None = None,
        columns: Columns = (),
    ) -> None:
        """They have said something together, at ``now``: a heartbeat, or anything else."""
        if speakers.current < len(speakers.ranks):
            if beat is None:
                for rank in speakers.ranks:
                    entry = self._entries[rank]
                    entry.spoke_at, entry.speakers.views = now, None
                return
            self._move(speakers)
        speakers.last_message_at, speakers.views = now, None
        if beat is not None:
            speakers.beat, speakers.columns = beat, columns

    def _move(self, speakers: Speakers[_BeatT, _ViewT]) -> None:
        """From now on it counts what these say together."""
        for column, rank in enumerate(speakers.ranks):
            entry = self._entries[rank]
            before = entry.speakers
            before.current, before.views = before.current - 1, None
            if not before.current:
                self._speakers.pop(before, None)
            entry.speakers, entry.column = speakers, column
        speakers.current = len(speakers.ranks)
        self._speakers[speakers] = None

    def oldest_message_at(self) -> float | None:
        """When whoever is silent for longest was heard: no later than it has spoken in truth."""
        return min(map(_last_message_at, self._speakers), default=None)

    def beats(self) -> list[_BeatT | None]:
        """The last heartbeats, once for those who sent it together; None of who sent none yet."""
        return [each.beat for each in self._speakers]

    def views(self) -> dict[int, _ViewT]:
        """All of them, each by itself."""
        return {view.rank: view for each in self._speakers for view in self._views_of(each)}

    def _views_of(self, speakers: Speakers[_BeatT, _ViewT]) -> tuple[_ViewT, ...]:
        if speakers.views is not None:
            return speakers.views
        entries = [(rank, self._entries[rank]) for rank in speakers.ranks]
        views = tuple(
            self._view(rank, entry) for rank, entry in entries if entry.speakers is speakers
        )
        if len(views) > 1:  # thousands that each speak alone, as they join, would take memory
            speakers.views = views
        return views

    @abstractmethod
    def _view(self, rank: int, entry: _Entry[_BeatT, _ViewT]) -> _ViewT:
        """What is known of one of them."""


class RankRoster(Roster[Heartbeat, MemberView]):
    """Of ranks."""

    def _view(self, rank: int, entry: _Entry[Heartbeat, MemberView]) -> MemberView:
        heard = max(entry.spoke_at, entry.speakers.last_message_at)
        who = (rank, entry.host, entry.pid, heard, entry.connected)
        beat = entry.speakers.beat
        if beat is None:
            return MemberView(*who)
        return MemberView(*who, beat.turn, beat.step, beat.begun, beat.phase, beat.started)


class MonitorRoster(Roster[MonitorHeartbeat, MonitorView]):
    """Of monitors."""

    def _view(self, rank: int, entry: _Entry[MonitorHeartbeat, MonitorView]) -> MonitorView:
        heard = max(entry.spoke_at, entry.speakers.last_message_at)
        who = (rank, entry.host, heard, entry.connected)
        pulse, at = entry.speakers.beat, entry.column
        if pulse is None:
            return MonitorView(*who)
        since_s, mute_s, state = entry.speakers.columns
        return MonitorView(*who, pulse, since_s[at], mute_s[at], state[at])

    def progress(self) -> ProgressSummary | None:
        """Of all of them; None while one has said nothing yet."""
        columns = [each.columns for each in self._speakers]
        if not columns or not all(columns):
            return None
        return ProgressSummary(
            min(map(_last_message_at, self._speakers)),
            max(map(max, map(_since_s, columns))),
            frozenset().union(*map(_state, columns)),
        )
