"""What a hub knows about the ranks of its launch and their monitors: identity and last messages.

Thousands of heartbeats arrive every second, while single ranks are examined only when something is
wrong.  So what ranks send together is stored once for all of them, and views of each are created
on demand.
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
    """What is known of a rank; times are on the hub's monotonic clock.

    The fields from ``rollbacks`` on come from its last ``Heartbeat``.
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
    """A monitor's last report; ``last_message_at`` is on the hub's monotonic clock.

    The columns of ``pulse`` may be missing, or belong to all monitors of the node: this monitor's
    values are in the other fields.
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
    """The last reports of all monitors: the oldest time, the longest stretch, all states."""

    oldest_message_at: float
    since_s: float
    states: frozenset[str]


@dataclass(slots=True, eq=False)
class Speakers(Generic[_BeatT, _ViewT]):
    """Ranks, or monitors, that send messages together, and their last one.

    ``current`` counts those of them whose last heartbeat it is.
    """

    ranks: tuple[int, ...]
    last_message_at: float = 0.0
    beat: _BeatT | None = None
    #: Of the heartbeat: the values of each of them, in the order of ``ranks``.
    columns: Columns = ()
    current: int = 0
    #: Created on demand, valid until the next message.
    views: tuple[_ViewT, ...] | None = None


@dataclass(slots=True, eq=False)
class _Entry(Generic[_BeatT, _ViewT]):
    """A rank or its monitor, and the group that its last message came with."""

    host: str
    pid: int
    speakers: Speakers[_BeatT, _ViewT]
    #: Its place in that group.
    column: int = 0
    #: When it last sent a message of its own.
    spoke_at: float = 0.0
    connected: bool = True


@dataclass(slots=True)
class Roster(ABC, Generic[_BeatT, _ViewT]):
    """All ranks that ever joined a launch, or all monitors.  Not thread-safe."""

    _entries: dict[int, _Entry[_BeatT, _ViewT]] = field(default_factory=dict)
    #: The groups that are some member's last one; a dictionary for its order.
    _speakers: dict[Speakers[_BeatT, _ViewT], None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def join(self, rank: int, host: str, pid: int, now: float) -> None:
        """Somebody joined, or joined again: nothing that it sent before counts."""
        host = sys.intern(host)  # all ranks of a node send it
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
        """Whether it is connected now."""
        entry = self._entries.get(rank)
        return entry is not None and entry.connected

    def place_of(self, rank: int) -> tuple[str, int] | None:
        """Its host and process; None if it never joined."""
        entry = self._entries.get(rank)
        return None if entry is None else (entry.host, entry.pid)

    def speakers(self, ranks: Sequence[int]) -> Speakers[_BeatT, _ViewT]:
        """The group of these ranks, to be kept for the messages that they send together."""
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
        """Record what they sent together at ``now``: a heartbeat, or any other message."""
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
        """Make this the current group of its members."""
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
        """When the longest silent one last spoke; never later than the truth."""
        return min(map(_last_message_at, self._speakers), default=None)

    def beats(self) -> list[_BeatT | None]:
        """The last heartbeats, one per group that sent it together; None for a missing one."""
        return [each.beat for each in self._speakers]

    def views(self) -> dict[int, _ViewT]:
        """A view of each of them."""
        return {view.rank: view for each in self._speakers for view in self._views_of(each)}

    def _views_of(self, speakers: Speakers[_BeatT, _ViewT]) -> tuple[_ViewT, ...]:
        if speakers.views is not None:
            return speakers.views
        entries = [(rank, self._entries[rank]) for rank in speakers.ranks]
        views = tuple(
            self._view(rank, entry) for rank, entry in entries if entry.speakers is speakers
        )
        if len(views) > 1:  # thousands of groups of one, while ranks join, would take memory
            speakers.views = views
        return views

    @abstractmethod
    def _view(self, rank: int, entry: _Entry[_BeatT, _ViewT]) -> _ViewT:
        """The view of one of them."""


class RankRoster(Roster[Heartbeat, MemberView]):
    """The ranks of a launch."""

    def _view(self, rank: int, entry: _Entry[Heartbeat, MemberView]) -> MemberView:
        heard = max(entry.spoke_at, entry.speakers.last_message_at)
        who = (rank, entry.host, entry.pid, heard, entry.connected)
        beat = entry.speakers.beat
        if beat is None:
            return MemberView(*who)
        return MemberView(*who, beat.turn, beat.step, beat.begun, beat.phase, beat.started)


class MonitorRoster(Roster[MonitorHeartbeat, MonitorView]):
    """The monitors of a launch."""

    def _view(self, rank: int, entry: _Entry[MonitorHeartbeat, MonitorView]) -> MonitorView:
        heard = max(entry.spoke_at, entry.speakers.last_message_at)
        who = (rank, entry.host, heard, entry.connected)
        pulse, at = entry.speakers.beat, entry.column
        if pulse is None:
            return MonitorView(*who)
        since_s, mute_s, state = entry.speakers.columns
        return MonitorView(*who, pulse, since_s[at], mute_s[at], state[at])

    def progress(self) -> ProgressSummary | None:
        """Aggregate all reports; None while one is missing."""
        columns = [each.columns for each in self._speakers]
        if not columns or not all(columns):
            return None
        return ProgressSummary(
            min(map(_last_message_at, self._speakers)),
            max(map(max, map(_since_s, columns))),
            frozenset().union(*map(_state, columns)),
        )
