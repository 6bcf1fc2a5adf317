"""Requests probes when they are due, collects the answers, gathers evidence once one has failed.

Talks to the hub only.  ``recovery.monitor.probe_verdict`` decides what answers and silence mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from slurm_forge.control import Hub
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import StackReport, TakeStacks
from slurm_forge.control.messages.probe import (
    ABANDON,
    BANDWIDTH,
    ProbeArrived,
    ProbeBroke,
    ProbeDone,
)
from slurm_forge.control.messages.rank import heartbeat_every_s
from slurm_forge.control.stack_text import where
from slurm_forge.journal.events import Event, ProbeMeasured, ProbeOff
from slurm_forge.launch.conductor.network_monitor import NetworkMonitor
from slurm_forge.launch.conductor.rank_views import RankViews
from slurm_forge.recovery.monitor.probe_evidence import with_stacks
from slurm_forge.recovery.monitor.probe_verdict import (
    NOTHING,
    AskNetwork,
    Fine,
    Flight,
    Nothing,
    Off,
    ProbeFailure,
    ProbeRules,
    RankSeen,
    Suspended,
    weigh_complete_probe,
    weigh_probe,
    weigh_silence,
)
from slurm_forge.recovery.monitor.stalls import Look
from slurm_forge.recovery.monitor.unreachable_hosts import Trouble, UnreachableHosts
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

_INTERVAL = "interval"
_LOOK_EVERY_S = 0.2
#: Ranks at a boundary wait for the agreed step; for a probe no longer than this.
_AGREED_WITHIN_S = 10.0
#: Nobody is asked to probe while somebody's heartbeat is so late.
_LATE_S = 1.0
#: Fine probes are written down rarely: the first, then one in so many.
_SAMPLE = 30


class ProbeMonitor:
    """``poll`` several times a second; ``on_message`` what ranks say; ``failed`` is the verdict.

    ``every`` None switches it off, heartbeats included.  ``limit`` is how long a stretch of a kind
    may take.
    """

    def __init__(
        self,
        hub: Hub,
        every: timedelta | None,
        rules: ProbeRules,
        clock: Callable[[], float],
        *,
        limit: Callable[[str], timedelta],
        attempt: int,
        launch: int,
        bandwidth_every: timedelta | None = None,
        views: RankViews | None = None,
        network: NetworkMonitor | None = None,
    ) -> None:
        self._hub = hub
        self._every_s = None if every is None else every.total_seconds()
        self._rules = rules
        self._clock = clock
        self._limit = limit
        self._bandwidth_s = None if bandwidth_every is None else bandwidth_every.total_seconds()
        self._views = views or RankViews(hub, clock)
        self._network = network
        self._stacks = StackRound(hub, attempt=attempt, launch=launch)
        self._next_look = 0.0
        self._next: float | None = None
        self._next_large = 0.0
        self._number: int | None = None
        self._abandoning: int | None = None
        self._flight: Flight | None = None
        #: A verdict that evidence is gathered for.
        self._suspect: ProbeFailure | None = None
        self._off = False
        self._forgiven = False
        self._good = 0
        self._latency = 0.0
        self._bandwidth = 0.0
        #: The verdict of a probe that failed, or of a silence.
        self.failed: ProbeFailure | None = None

    def on_message(self, ranks: Sequence[int], message: Message) -> None:
        """Ranks have issued their parts, or finished them; monitors have found stacks."""
        if isinstance(message, StackReport):
            for rank in ranks:
                self._stacks.on_message(rank, message, self._clock())
            return
        flight = self._flight
        if flight is None or getattr(message, "id", None) != self._number:
            return
        match message:
            case ProbeArrived():
                flight.arrived.update(dict.fromkeys(ranks, self._clock()))
                is_last = len(flight.arrived) >= self._hub.world_size
                if is_last or message.gpu is not flight.gpu:
                    self._flight = replace(flight, step=self._furthest_step(), gpu=message.gpu)
            case ProbeDone():
                now = self._clock()
                for rank in ranks:
                    flight.arrived.setdefault(rank, now)
                flight.latency.update(zip(ranks, message.latency_s, strict=True))
                flight.wrong.update(zip(ranks, message.wrong, strict=True))
                flight.bandwidth.update(zip(ranks, message.bandwidth, strict=True))
                if len(flight.latency) >= self._hub.world_size:
                    self._next_look = 0.0  # all have said how it went
            case ProbeBroke():
                flight.broke.update(dict.fromkeys(ranks, message.text))
            case _:
                pass

    def withdrawn(self, number: int) -> None:
        """The ranks could not agree on a step in time: the next probe comes at its interval."""
        if number == self._number:
            self._flight = None
        elif number == self._abandoning:
            self._abandon()

    def acknowledge(self) -> None:
        """The policy only warns of it: the same is not said again."""
        self.failed = None
        self._forgiven = self._off = True

    def poll(self, now: float, left_ranks: Iterable[int] = ()) -> Event | None:
        """Ask for a probe when it is time; what is to be written down, if anything."""
        if self._every_s is None or self.failed is not None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_EVERY_S
        self._views.note_poll(now)
        quiet = self._views.anybody_silent(now, self._rules.silence.total_seconds())
        if not quiet and self._suspect is None:
            if self._flight is None:
                self._maybe_ask(now)
                return None
            verdict = self._weigh_quickly(self._flight, now)
            if verdict is not None:
                return self._on_fine_probe(verdict) if isinstance(verdict, Fine) else None
        views = self._views.for_probe(now, self._limit, frozenset(left_ranks))
        if self._suspect is not None:
            return self._gather(self._suspect, views, now)
        silence = weigh_silence(views, self._rules)
        if isinstance(silence, Suspended):
            self._views.reset(now)
            return None
        if isinstance(silence, (ProbeFailure, AskNetwork)):
            return None if self._forgiven else self._apply(silence, views, now)
        if self._flight is None or self._off:
            return None
        flight = _not_before(self._flight, self._views.fresh_from)
        return self._apply(weigh_probe(flight, views, self._rules, now), views, now)

    def _weigh_quickly(self, flight: Flight, now: float) -> Fine | Nothing | None:
        """What a probe has come to while everybody talks; None where each rank has to be seen."""
        if self._views.anybody_silent(now, self._views.fresh_s):
            return None
        if len(flight.latency) >= self._hub.world_size:
            return weigh_complete_probe(flight)
        late = now - flight.asked_at >= self._rules.deadline.total_seconds()
        return None if flight.broke or late else NOTHING

    def _maybe_ask(self, now: float) -> None:
        if self._next is not None and now < self._next:
            return
        members = self._hub.members()
        everybody = len(members) == self._hub.world_size and self._hub.world_size > 1
        ready = everybody and all(member.started for member in members.values())
        if self._off or not ready:
            return
        every = self._every_s or 0.0
        if self._next is None:
            self._next = now + every
        if now < self._next or any(
            now - each.last_message_at > heartbeat_every_s(self._hub.world_size) + _LATE_S
            for each in members.values()
        ):
            return
        self._next = now + every
        large = self._bandwidth_s is not None and now >= self._next_large
        if large:
            self._next_large = now + (self._bandwidth_s or 0.0)
        self._number = self._hub.request(
            RequestKind.PROBE, BANDWIDTH if large else _INTERVAL, within_s=_AGREED_WITHIN_S
        )
        self._flight = Flight(asked_at=now)

    # -- verdicts ----------------------------------------------------------------------------

    def _apply(
        self,
        verdict: Nothing | Suspended | Fine | ProbeFailure | AskNetwork | Off,
        views: Sequence[RankSeen],
        now: float,
    ) -> Event | None:
        match verdict:
            case Fine():
                return self._on_fine_probe(verdict)
            case ProbeFailure():
                self._begin_to_gather(verdict, now)
                return None
            case AskNetwork():
                return self._ask_network(verdict, views, now)
            case Off():
                return self._switch_off(verdict, views)
            case _:
                return None

    def _on_fine_probe(self, fine: Fine) -> Event | None:
        self._flight = None
        self._good += 1
        self._latency = fine.latency_s
        self._bandwidth = fine.bandwidth or self._bandwidth
        if self._good % _SAMPLE != 1:
            return None
        bandwidth, self._bandwidth = self._bandwidth, 0.0
        return ProbeMeasured(
            ok=True,
            step=self._furthest_step(),
            latency_s=fine.latency_s,
            bandwidth=bandwidth or None,
            count=1 if self._good == 1 else _SAMPLE,
        )

    def _furthest_step(self) -> int:
        return max((beat.step for beat in self._hub.heartbeats()), default=0)

    def _switch_off(
        self, off: Off, views: Sequence[RankSeen], beside: tuple[Evidence, ...] = ()
    ) -> Event:
        if self._flight is not None and self._flight.gpu:
            self._abandon()
        self._off, self._flight = True, None
        why = "; ".join((off.why, *(f"{each.source}: {each.text}" for each in beside)))
        return ProbeOff(step=max(each.step for each in views), why=why)

    def _abandon(self) -> None:
        """Have all ranks give the probe's communicator up: it occupies their devices."""
        self._abandoning = self._hub.request(RequestKind.PROBE, ABANDON, within_s=_AGREED_WITHIN_S)

    def _ask_network(self, ask: AskNetwork, views: Sequence[RankSeen], now: float) -> Event | None:
        """Its word comes first; where there is nobody to ask, or nothing wrong, what else it is."""
        if self._network is not None:
            self._network.ask()  # nothing while it is under way, or has just been
            verdict = self._network.verdict(now)
            if verdict is None:
                return None
            if isinstance(ask.otherwise, Off) and ask.otherwise.goes_on:
                return self._switch_off(ask.otherwise, views, verdict.evidence)
            if verdict.ranks:
                self._begin_to_gather(_of_network(verdict, ask.otherwise, views), now)
                return None
            if isinstance(ask.otherwise, ProbeFailure):
                verdict_without = ask.otherwise
                verdict_without = replace(
                    verdict_without, evidence=(*verdict_without.evidence, *verdict.evidence)
                )
                self._begin_to_gather(verdict_without, now)
                return None
        return self._apply(ask.otherwise, views, now)

    def _begin_to_gather(self, verdict: ProbeFailure, now: float) -> None:
        self._suspect = verdict
        self._stacks.begin(now)

    def _gather(self, verdict: ProbeFailure, views: Sequence[RankSeen], now: float) -> Event | None:
        """Evidence first; whoever talks again meanwhile was only slow."""
        if verdict.silent and not self._still_silent(verdict, views):
            self._suspect = None
            return None
        if not self._stacks.over(now, [each.rank for each in views if each.has_monitor]):
            return None
        self._suspect, self._flight = None, None
        verdict = with_stacks(verdict, self._stacks.looks)
        if self._good:
            text = f"{self._good} fine, the last in {1e3 * self._latency:.3g} ms"
            verdict = replace(
                verdict, evidence=(*verdict.evidence, Evidence("probes before", text))
            )
        self.failed = verdict
        return ProbeMeasured(
            ok=False,
            step=verdict.step,
            late_ranks=verdict.ranks,
            late_hosts=verdict.hosts,
            wrong=verdict.wrong,
            evidence=verdict.evidence,
        )

    def _still_silent(self, verdict: ProbeFailure, views: Sequence[RankSeen]) -> bool:
        if not verdict.ranks:  # most of the launch: it must still be so
            return isinstance(weigh_silence(views, self._rules), (ProbeFailure, AskNetwork))
        suspects = [each for each in views if each.rank in verdict.ranks]
        return any(e.talks for e in views) and not any(each.talks for each in suspects)


def _not_before(flight: Flight, since: float) -> Flight:
    """The same for the clocks: nothing began before ``since``, when the job was suspended."""
    if flight.asked_at >= since:
        return flight
    arrived = {rank: max(at, since) for rank, at in flight.arrived.items()}
    return replace(flight, asked_at=since, arrived=arrived)


def _of_network(
    verdict: UnreachableHosts, other: object, views: Sequence[RankSeen]
) -> ProbeFailure:
    """The network's word about links, and beside it what made us ask."""
    before = other.evidence if isinstance(other, ProbeFailure) else ()
    hosts = {each.rank: each.host for each in views}
    suspects = [each for each in views if each.rank in verdict.ranks]
    silent = bool(suspects) and not any(each.talks for each in suspects)
    # Whom neither we nor the others reach is gone, as far as this job goes: another launch towards
    # it would wait for ranks that never come.
    is_cut = silent and verdict.how is Trouble.CUT and verdict.confidence is not Confidence.GUESS
    return ProbeFailure(
        cause=Cause.NODE_FAIL if is_cut else Cause.HANG,
        silent=silent,
        ranks=verdict.ranks,
        hosts=tuple(hosts.get(rank, "?") for rank in verdict.ranks),
        step=max(each.step for each in views),
        confidence=verdict.confidence,
        evidence=(*verdict.evidence, *before),
    )


#: A monitor that has not answered by then is as stuck as its rank.
_WITHIN_S = 3.0


def look_of(message: StackReport, now: float) -> Look:
    """What a monitor has found, as it is judged."""
    return Look(
        at=now,
        state=message.state,
        cpu_s=message.cpu_s,
        where=where(message.text),
        text=message.text,
        file=message.file,
        how=message.how,
    )


class StackRound:
    """Stacks of all ranks, as evidence for a verdict that was reached already.

    ``begin``, ``on_message`` what monitors find, ``over`` once all have answered or time is up.

    Rounds are numbered below zero: those of the watchdog are above.
    """

    def __init__(self, hub: Hub, *, attempt: int, launch: int) -> None:
        self._hub = hub
        self._attempt, self._launch = attempt, launch
        self._number = 0
        self._asked_at = 0.0
        #: What was found so far, by rank.
        self.looks: dict[int, Look] = {}

    def begin(self, now: float) -> None:
        """Ask every monitor."""
        self._number -= 1
        self._asked_at, self.looks = now, {}
        self._hub.ask_monitors(
            TakeStacks(id=self._number, attempt=self._attempt, launch=self._launch)
        )

    def on_message(self, rank: int, message: StackReport, now: float) -> None:
        """A monitor has found something; what belongs to another round is left alone."""
        if message.id == self._number:
            self.looks[rank] = look_of(message, now)

    def over(self, now: float, expected: Collection[int]) -> bool:
        """Whether those that can answer have, or have had time enough."""
        return set(expected) <= set(self.looks) or now - self._asked_at >= _WITHIN_S
