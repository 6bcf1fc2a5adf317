"""Asks for probes, hears the answers, and gathers evidence once one has failed.

Talks to the hub only.  What answers and silence mean is decided in ``recovery.probing``.

Stacks of all ranks, asked for once, as evidence for a verdict that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

from slurm_forge.control import Hub, RequestKind
from slurm_forge.control.messages import protocol as p
from slurm_forge.control.messages.probe import BANDWIDTH
from slurm_forge.control.stack_text import where
from slurm_forge.journal.events import Event, ProbeMeasured, ProbeOff
from slurm_forge.launch.conductor.rank_views import Sight
from slurm_forge.recovery.monitor.probe_evidence import with_stacks
from slurm_forge.recovery.monitor.probe_verdict import (
    AskNetwork,
    Fine,
    Flight,
    Found,
    Nothing,
    Off,
    ProbeRules,
    RankSeen,
    Suspended,
    weigh_probe,
    weigh_silence,
)
from slurm_forge.recovery.monitor.stalls import Look
from slurm_forge.recovery.monitor.unreachable_hosts import Trouble
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

_INTERVAL = "interval"
_LOOK_EVERY_S = 0.2
#: Ranks at a boundary wait for the agreed step; for a probe no longer than this.
_AGREED_WITHIN_S = 10.0
#: Nobody is asked to probe while somebody has said nothing for so long.
_TALKS_S = 2.0
#: Fine probes are written down rarely: the first, then one in so many.
_SAMPLE = 30


class ProbeObserver(Protocol):
    """Is told of every probe that went well."""

    def on_fine(self, latency_s: float, bandwidth: float, arrivals: Mapping[int, float]) -> None:
        """``bandwidth`` in bytes per second, 0 where none was measured; ``arrivals`` by rank, on
        the hub's clock.
        """


class NetworkVerdict(Protocol):
    """Which ranks can't be reached, or only slowly; none where nothing is wrong."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those whose links are bad."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their hosts."""

    @property
    def how(self) -> Trouble:
        """What is the matter with them."""

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What it rests on."""

    @property
    def confidence(self) -> Confidence:
        """How far that carries."""


class NetworkWatch(Protocol):
    """Asks all ranks how their links are."""

    def ask(self) -> None:
        """Begin, unless it is under way."""

    def verdict(self, now: float) -> NetworkVerdict | None:
        """None while answers are awaited, a few seconds at most."""


class ProbeJudge:
    """``look`` several times a second; ``hear`` what ranks say; ``failed`` is the verdict.

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
        sight: Sight | None = None,
        network: NetworkWatch | None = None,
        observer: ProbeObserver | None = None,
    ) -> None:
        self._hub = hub
        self._every_s = None if every is None else every.total_seconds()
        self._rules = rules
        self._clock = clock
        self._limit = limit
        self._bandwidth_s = None if bandwidth_every is None else bandwidth_every.total_seconds()
        self._sight = sight or Sight(hub, clock)
        self._network = network
        self._observer = observer
        self._stacks = StackRound(hub, attempt=attempt, launch=launch)
        self._next_look = 0.0
        self._next: float | None = None
        self._next_large = 0.0
        self._number: int | None = None
        self._flight: Flight | None = None
        #: A verdict that evidence is gathered for.
        self._suspect: Found | None = None
        self._off = False
        self._forgiven = False
        self._good = 0
        self._latency = 0.0
        self._bandwidth = 0.0
        #: The verdict of a probe that failed, or of a silence.
        self.failed: Found | None = None

    def hear(self, rank: int, message: p.Message) -> None:
        """A rank has issued its part, or finished it; a witness has found stacks."""
        if isinstance(message, p.Stacks):
            self._stacks.hear(rank, message, self._clock())
            return
        flight = self._flight
        if flight is None or getattr(message, "id", None) != self._number:
            return
        match message:
            case p.ProbeArrived():
                step = max(member.step for member in self._hub.members().values())
                arrived = {**flight.arrived, rank: self._clock()}
                flight = replace(flight, arrived=arrived, step=step, gpu=message.gpu)
            case p.ProbeDone():
                flight = replace(
                    flight,
                    arrived={rank: self._clock(), **flight.arrived},
                    latency={**flight.latency, rank: message.latency_s},
                    wrong={**flight.wrong, rank: message.wrong},
                    bandwidth={**flight.bandwidth, rank: message.bandwidth},
                )
            case p.ProbeBroke():
                flight = replace(flight, broke={**flight.broke, rank: message.text})
            case _:
                pass
        self._flight = flight

    def withdrawn(self, number: int) -> None:
        """The ranks could not agree on a step in time: the next one comes at its interval."""
        if number == self._number:
            self._flight = None

    def forgive(self) -> None:
        """The policy only warns of it: the same is not said again."""
        self.failed = None
        self._forgiven = self._off = True

    def look(self, now: float, gone: Iterable[int] = ()) -> Event | None:
        """Ask for a probe when it is time; what is to be written down, if anything."""
        if self._every_s is None or self.failed is not None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_EVERY_S
        self._sight.awake(now)
        quiet = self._sight.anybody_silent(now, self._rules.silence.total_seconds())
        if not quiet and self._flight is None and self._suspect is None:
            self._maybe_ask(now)
            return None
        seen = self._sight.seen(now, self._limit, frozenset(gone))
        if self._suspect is not None:
            return self._gather(self._suspect, seen, now)
        silence = weigh_silence(seen, self._rules)
        if isinstance(silence, Suspended):
            self._sight.begin_anew(now)
            return None
        if isinstance(silence, (Found, AskNetwork)):
            return None if self._forgiven else self._take(silence, seen, now)
        if self._flight is None or self._off:
            return None
        flight = _not_before(self._flight, self._sight.fresh_from)
        return self._take(weigh_probe(flight, seen, self._rules, now), seen, now)

    def _maybe_ask(self, now: float) -> None:
        members = self._hub.members()
        everybody = len(members) == self._hub.world_size and self._hub.world_size > 1
        ready = everybody and all(member.started for member in members.values())
        if self._off or not ready:
            return
        every = self._every_s or 0.0
        if self._next is None:
            self._next = now + every
        if now < self._next or any(now - each.heard > _TALKS_S for each in members.values()):
            return
        self._next = now + every
        large = self._bandwidth_s is not None and now >= self._next_large
        if large:
            self._next_large = now + (self._bandwidth_s or 0.0)
        self._number = self._hub.request(
            RequestKind.PROBE, BANDWIDTH if large else _INTERVAL, within_s=_AGREED_WITHIN_S
        )
        self._flight = Flight(asked=now)

    # -- verdicts ----------------------------------------------------------------------------

    def _take(
        self,
        verdict: Nothing | Suspended | Fine | Found | AskNetwork | Off,
        seen: Sequence[RankSeen],
        now: float,
    ) -> Event | None:
        match verdict:
            case Fine():
                return self._fine(verdict, seen)
            case Found():
                self._begin_to_gather(verdict, now)
                return None
            case AskNetwork():
                return self._ask_network(verdict, seen, now)
            case Off():
                return self._switch_off(verdict, seen)
            case _:
                return None

    def _fine(self, fine: Fine, seen: Sequence[RankSeen]) -> Event | None:
        self._flight = None
        self._good += 1
        self._latency = fine.latency_s
        self._bandwidth = fine.bandwidth or self._bandwidth
        if self._observer is not None:
            self._observer.on_fine(fine.latency_s, fine.bandwidth, fine.arrivals)
        if self._good % _SAMPLE != 1:
            return None
        bandwidth, self._bandwidth = self._bandwidth, 0.0
        return ProbeMeasured(
            ok=True,
            step=max(each.step for each in seen),
            latency_s=fine.latency_s,
            bandwidth=bandwidth or None,
            count=1 if self._good == 1 else _SAMPLE,
        )

    def _switch_off(
        self, off: Off, seen: Sequence[RankSeen], beside: tuple[Evidence, ...] = ()
    ) -> Event:
        self._off, self._flight = True, None
        why = "; ".join((off.why, *(f"{each.source}: {each.text}" for each in beside)))
        return ProbeOff(step=max(each.step for each in seen), why=why)

    def _ask_network(self, ask: AskNetwork, seen: Sequence[RankSeen], now: float) -> Event | None:
        """Its word comes first; where there is nobody to ask, or nothing wrong, what else it is."""
        if self._network is not None:
            self._network.ask()  # nothing while it is under way, or has just been
            said = self._network.verdict(now)
            if said is None:
                return None
            if isinstance(ask.otherwise, Off) and ask.otherwise.goes_on:
                return self._switch_off(ask.otherwise, seen, said.evidence)
            if said.ranks:
                self._begin_to_gather(_of_network(said, ask.otherwise, seen), now)
                return None
            if isinstance(ask.otherwise, Found):
                found = ask.otherwise
                found = replace(found, evidence=(*found.evidence, *said.evidence))
                self._begin_to_gather(found, now)
                return None
        return self._take(ask.otherwise, seen, now)

    def _begin_to_gather(self, found: Found, now: float) -> None:
        self._suspect = found
        self._stacks.begin(now)

    def _gather(self, found: Found, seen: Sequence[RankSeen], now: float) -> Event | None:
        """Evidence first; whoever talks again meanwhile was only slow."""
        if found.silent and not self._still_silent(found, seen):
            self._suspect = None
            return None
        if not self._stacks.over(now, [each.rank for each in seen if each.watched]):
            return None
        self._suspect, self._flight = None, None
        found = with_stacks(found, self._stacks.looks)
        if self._good:
            text = f"{self._good} fine, the last in {1e3 * self._latency:.3g} ms"
            found = replace(found, evidence=(*found.evidence, Evidence("probes before", text)))
        self.failed = found
        return ProbeMeasured(
            ok=False,
            step=found.step,
            late_ranks=found.ranks,
            late_hosts=found.hosts,
            wrong=found.wrong,
            evidence=found.evidence,
        )

    def _still_silent(self, found: Found, seen: Sequence[RankSeen]) -> bool:
        if not found.ranks:  # most of the launch: it must still be so
            return isinstance(weigh_silence(seen, self._rules), (Found, AskNetwork))
        named = [each for each in seen if each.rank in found.ranks]
        return any(e.talks for e in seen) and not any(each.talks for each in named)


def _not_before(flight: Flight, since: float) -> Flight:
    """The same for the clocks: nothing began before ``since``, when the job was suspended."""
    if flight.asked >= since:
        return flight
    arrived = {rank: max(at, since) for rank, at in flight.arrived.items()}
    return replace(flight, asked=since, arrived=arrived)


def _of_network(said: NetworkVerdict, other: object, seen: Sequence[RankSeen]) -> Found:
    """The network's word about links, and beside it what made us ask."""
    before = other.evidence if isinstance(other, Found) else ()
    hosts = {each.rank: each.host for each in seen}
    named = [each for each in seen if each.rank in said.ranks]
    silent = bool(named) and not any(each.talks for each in named)
    # Whom neither we nor the others reach is gone, as far as this job goes: another launch towards
    # it would wait for ranks that never come.
    gone = silent and said.how is Trouble.CUT and said.confidence is not Confidence.GUESS
    return Found(
        cause=Cause.NODE_FAIL if gone else Cause.HANG,
        silent=silent,
        ranks=said.ranks,
        hosts=tuple(hosts.get(rank, "?") for rank in said.ranks),
        step=max(each.step for each in seen),
        confidence=said.confidence,
        evidence=(*said.evidence, *before),
    )


#: A witness that has not answered by then is as stuck as its rank.
_WITHIN_S = 3.0


def look_of(message: p.Stacks, now: float) -> Look:
    """What a witness has found, as it is judged."""
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
    """``begin``, ``hear`` what witnesses find, ``over`` once all have answered or time is up.

    Rounds are numbered below zero: those of the watchdog are above.
    """

    def __init__(self, hub: Hub, *, attempt: int, launch: int) -> None:
        self._hub = hub
        self._attempt, self._launch = attempt, launch
        self._number = 0
        self._asked = 0.0
        #: What was found so far, by rank.
        self.looks: dict[int, Look] = {}

    def begin(self, now: float) -> None:
        """Ask every witness."""
        self._number -= 1
        self._asked, self.looks = now, {}
        self._hub.ask_witnesses(
            p.TakeStacks(id=self._number, attempt=self._attempt, launch=self._launch)
        )

    def hear(self, rank: int, message: p.Stacks, now: float) -> None:
        """A witness has found something; what belongs to another round is left alone."""
        if message.id == self._number:
            self.looks[rank] = look_of(message, now)

    def over(self, now: float, expected: Collection[int]) -> bool:
        """Whether those that can answer have, or have had time enough."""
        return set(expected) <= set(self.looks) or now - self._asked >= _WITHIN_S
