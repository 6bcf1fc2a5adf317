"""Watches the progress of ranks: has stacks taken where it stops, and declares a hang.

Talks to the hub only.  ``recovery.monitor.stalls`` decides what a standstill is, and who is late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from slurm_forge.control import Hub
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import PhaseDuration, StackReport, TakeStacks
from slurm_forge.control.messages.rank import heartbeat_every_s
from slurm_forge.journal.events import Event, StallSeen, StretchesLearned
from slurm_forge.launch.conductor.network_monitor import NetworkMonitor
from slurm_forge.launch.conductor.probe_monitor import look_of
from slurm_forge.launch.conductor.rank_views import RankViews
from slurm_forge.recovery.monitor.phase_durations import (
    HangRules,
    PhaseDurations,
)
from slurm_forge.recovery.monitor.stalls import (
    FROZEN,
    Excused,
    Look,
    RankView,
    Stall,
    find_standstill,
    judge,
)
from slurm_forge.recovery.monitor.unreachable_hosts import with_network

_LOOK_EVERY_S = 0.5
_STACKS_WITHIN_S = 6.0
#: Between two looks at the stacks: long enough to see whether a rank computes.
_BETWEEN_S = 2.0
#: What limits are where the watchdog is switched off and others ask for them.
_USUAL = HangRules(5.0, timedelta(seconds=30), timedelta(minutes=10))
#: What was learned is written down after so long, then after twice as long, and so on.
_FIRST_WRITE_S = 60.0


@dataclass(slots=True)
class _Suspicion:
    """Stacks are being taken: twice, some seconds apart."""

    number: int
    asked_at: float
    first: dict[int, Look] | None = None
    looks: dict[int, Look] = field(default_factory=dict)


class Watchdog:
    """``poll`` it several times a second; ``stalled`` is the verdict.

    ``rules`` None switches it off.  ``learned`` are the longest stretches of earlier attempts.
    ``network`` is asked where all wait for each other, or somebody is silent.
    """

    def __init__(
        self,
        hub: Hub,
        rules: HangRules | None,
        clock: Callable[[], float],
        *,
        attempt: int,
        launch: int,
        learned: Mapping[str, float] | None = None,
        network: NetworkMonitor | None = None,
        views: RankViews | None = None,
    ) -> None:
        self._hub = hub
        self._network = network or NetworkMonitor(hub, clock)
        self._rules = rules
        self._clock = clock
        self._attempt, self._launch = attempt, launch
        #: The verdict, once there is one.
        self.stalled: Stall | None = None
        self._views = views or RankViews(hub, clock)
        self._phase_durations = PhaseDurations(rules or _USUAL)
        for kind, seconds in (learned or {}).items():
            self._phase_durations.note(kind, seconds)
        self._started_at = self._next = clock()
        self._fresh_from = self._views.fresh_from
        self._next_write = self._started_at + _FIRST_WRITE_S
        self._written: dict[str, float] = dict(learned or {})
        self._suspicion: _Suspicion | None = None
        #: A verdict that waits for what the network looks like.
        self._stall_on_hold: Stall | None = None
        self._number = 0
        self._not_before: tuple[str, timedelta] | None = None

    def on_message(self, rank: int, message: Message) -> None:
        """A monitor said how long something took, or what it has found."""
        if isinstance(message, PhaseDuration):
            self._phase_durations.note(message.kind, message.seconds)
        elif isinstance(message, StackReport) and self._suspicion is not None:
            if message.id != self._suspicion.number:
                return
            self._suspicion.looks[rank] = look_of(message, self._clock())

    def acknowledge(self) -> None:
        """The policy only warns of it: not before they have been there for twice as long again."""
        if self.stalled is not None:
            self._not_before = ("warned of", 2 * self.stalled.since)
            self.stalled = None

    def limit(self, kind: str) -> timedelta:
        """How long a rank may be in a stretch of the kind, by what was learned."""
        return self._phase_durations.limit(kind)

    def note_save(self, seconds: float) -> None:
        """A checkpoint took so long to be durable: a rank may wait for that, too."""
        self._phase_durations.note("save", seconds)

    def poll(self, now: float, left_ranks: Iterable[int] = ()) -> Event | None:
        """What is to be written down, if anything.  ``left_ranks`` have reported their end."""
        if self._rules is None or self.stalled is not None or now < self._next:
            return None
        self._views.note_poll(now)
        self._next = now + _LOOK_EVERY_S * heartbeat_every_s(self._hub.world_size)
        shortest = min(self._rules.at_least, self._rules.at_most)  # no limit is shorter
        if self._views.all_progress(now, shortest):
            self._fresh_from = self._views.fresh_from
            self._suspicion = self._stall_on_hold = self._not_before = None
            return self._longest_phases_event(now)
        views = self._views.views(now, frozenset(left_ranks))
        if len(views) < self._hub.world_size - len(frozenset(left_ranks)):
            return None  # not all have come yet
        if views and all(view.is_silent or view.state == "T" for view in views.values()):
            self._views.reset(now)
        if self._fresh_from != self._views.fresh_from:  # the job was suspended, or we were
            self._fresh_from = self._views.fresh_from
            self._suspicion = self._stall_on_hold = None
        event = self._judge(views, now)
        return event or self._longest_phases_event(now)

    def _judge(self, views: dict[int, RankView], now: float) -> Event | None:
        standstill = find_standstill(tuple(views.values()), self._phase_durations)
        if standstill is None:
            self._suspicion = self._stall_on_hold = self._not_before = None
            return None
        if self._stall_on_hold is not None:
            return self._weigh_network(self._stall_on_hold, views, now)
        if self._not_before is not None and standstill.since < self._not_before[1]:
            return None
        if self._suspicion is None:
            self._suspicion = self._begin_suspicion(now)
            return None
        suspicion = self._suspicion
        reachable_ranks = {
            rank
            for rank, each in self._hub.monitors().items()
            if each.connected and rank in views and not views[rank].is_silent
        }
        since = now - suspicion.asked_at
        if not reachable_ranks <= set(suspicion.looks) and since < _STACKS_WITHIN_S:
            return None
        frozen = any(views[r].is_silent or views[r].state in FROZEN for r in standstill.over)
        if suspicion.first is None and frozen:
            suspicion.first = suspicion.looks  # a second look would show the same
        if suspicion.first is None:
            if since < _BETWEEN_S:
                return None
            self._suspicion = self._begin_suspicion(now)
            self._suspicion.first = suspicion.looks
            return None
        verdict = judge(standstill, views, suspicion.first, suspicion.looks, self._phase_durations)
        self._suspicion = None
        if isinstance(verdict, Excused):
            self._not_before = (verdict.why, verdict.until)
            return None
        # Nor is it known of whom its monitor says nothing: the way to it may be cut.
        late = verdict.late_ranks
        if not late or any(views[r].is_silent or r not in suspicion.looks for r in late):
            self._stall_on_hold = verdict
            self._network.ask()
            return None
        return self._stall_event(verdict)

    def _weigh_network(
        self, stall: Stall, views: Mapping[int, RankView], now: float
    ) -> Event | None:
        """All wait for each other, or nothing is heard of some: it may be the way to them."""
        verdict = self._network.verdict(now)
        if verdict is None:
            return None
        self._stall_on_hold = None
        return self._stall_event(
            with_network(stall, verdict, {r: view.host for r, view in views.items()})
        )

    def _stall_event(self, verdict: Stall) -> StallSeen:
        self.stalled = verdict
        return StallSeen(
            step=verdict.step,
            late_ranks=verdict.late_ranks,
            late_hosts=verdict.late_hosts,
            since_s=verdict.since.total_seconds(),
            limit_s=verdict.limit.total_seconds(),
            evidence=verdict.evidence,
            files=verdict.files,
        )

    def _begin_suspicion(self, now: float) -> _Suspicion:
        self._number += 1
        message = TakeStacks(id=self._number, attempt=self._attempt, launch=self._launch)
        self._hub.ask_monitors(message)
        return _Suspicion(self._number, now)

    def _longest_phases_event(self, now: float) -> Event | None:
        """Now and then what has become longer, so that the next attempt starts with it."""
        if now < self._next_write:
            return None
        self._next_write = now + 2 * (now - self._started_at)
        longest = self._phase_durations.longest()
        if all(seconds <= 1.2 * self._written.get(kind, 0.0) for kind, seconds in longest.items()):
            return None
        self._written = longest
        return StretchesLearned(seconds={kind: round(s, 3) for kind, s in longest.items()})
