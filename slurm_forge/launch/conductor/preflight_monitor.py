"""The hub's part in the look at all nodes before a launch: who tries what next, and the verdict.

Talks to the hub only, and to nobody before a rank has spoken.  What reports and collectives mean is
decided in ``recovery.monitor.preflight_verdict`` and ``recovery.monitor.isolation``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from slurm_forge.control import Hub
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.preflight import (
    NodeReport,
    PreflightReport,
    PreflightRound,
    PreflightTried,
    round_key,
)
from slurm_forge.errors import ControlChannelError
from slurm_forge.journal.events import PreflightMeasured
from slurm_forge.launch.conductor.rank_views import RankViews
from slurm_forge.recovery.monitor.isolation import (
    Group,
    Isolated,
    Isolation,
    Why,
    isolate,
)
from slurm_forge.recovery.monitor.preflight_verdict import (
    PreflightRefusal,
    oddities,
    of_collectives,
    of_reports,
    of_silence,
)

#: A connected rank says something every second.
_SILENT_S = 30.0
#: So many times as long as a look may take is waited for a rank that talks and does not come: it
#: may still be importing.
_PATIENCE = 5.0
#: And so long at least: imports from a file system that is cold or busy have nothing to do with how
#: long a look may take.
_IMPORTS_S = 300.0
#: Stopped, or dead: the kernel's letters.
_ENDED = ("T", "Z", "X")
#: What carries collectives between CPUs.
_GLOO = "gloo"
#: How long a collective of all, and then of a few, is given; NCCL takes seconds to connect.
_ALL_S = 60.0
_ALL_GLOO_S = 15.0
_FEW_S = 20.0
_FEW_GLOO_S = 10.0
#: Where some few have worked: what the slowest of them took, so many times, and never less than.
_TIMES_USUAL, _FEW_LEAST_S = 20.0, 3.0
#: How much later than that its ranks have said so.
_TO_SAY_SO_S = 3.0
#: Every rank of a gloo group connects to every other one.
_MOST_GLOO = 64
#: What is published must fit on a line of the channel.
_LONGEST = 60_000
#: Of the bandwidth that the site says there is: less is looked into.
_SLOW = 0.5


@dataclass(slots=True)
class _Round:
    number: int
    asked_at: float
    within_s: float
    hosts: tuple[Group, ...]
    ranks: tuple[tuple[int, ...], ...]
    results: dict[int, PreflightTried] = field(default_factory=dict)


class PreflightMonitor:
    """``on_message`` what ranks say, ``poll`` several times a second; ``refused`` is the verdict.

    ``expected`` is the bus bandwidth in bytes per second that the site says there is between nodes.
    ``reports`` and ``isolated`` tell afterwards what it rests on.
    """

    def __init__(
        self,
        hub: Hub,
        within: timedelta,
        clock: Callable[[], float],
        *,
        expected: float | None = None,
        wall: Callable[[], float] = time.time,
        views: RankViews | None = None,
    ) -> None:
        self._hub = hub
        self._views = views or RankViews(hub, clock)
        self._within_s = within.total_seconds()
        self._clock = clock
        self._wall = wall
        self._expected = expected
        self.reports: dict[int, NodeReport] = {}
        #: By how many seconds the clock of a rank's host is ahead of ours.
        self.ahead: dict[int, float] = {}
        self.isolated: Isolated | None = None
        #: Why the launch must not go on.
        self.refused: PreflightRefusal | None = None
        self.over = False
        self.bytes_per_s: float | None = None
        self._started_at: float | None = None
        self._last = clock()
        self._isolation: Isolation | None = None
        self._round: _Round | None = None
        self._rounds = self._groups = 0
        #: The longest that a group of a few took which worked.
        self._usual_s = 0.0
        self._slow = self._too_many = False
        self._failures: dict[str, str] = {}

    def on_message(self, rank: int, message: Message) -> None:
        """A rank has looked at its node, or tried a collective."""
        if isinstance(message, PreflightReport):
            try:
                report = NodeReport.from_text(message.body)
            except ControlChannelError as error:
                report = NodeReport(rank=rank, host=self._host(rank), python=error.message[:80])
            self._last = self._clock()
            self._started_at = self._last if self._started_at is None else self._started_at
            self.reports[rank] = report
            self.ahead[rank] = report.sent - self._wall() if report.sent else 0.0
        elif isinstance(message, PreflightTried):
            round_ = self._round
            if round_ is not None and message.round == round_.number:
                round_.results[rank] = message

    def poll(self, now: float) -> PreflightMeasured | None:
        """Go on with it; what is to be written down once there is a verdict."""
        self._views.note_poll(now)
        if self.over or self._started_at is None:
            return None
        if self._round is not None:
            return self._poll_round(self._round, now)
        missing = [r for r in range(self._hub.world_size) if r not in self.reports]
        if missing:
            self.refused = self._of_silence(missing, now)
            return self._finish(now) if self.refused is not None else None
        self.refused = of_reports(self.reports.values())
        if self.refused is not None or not all(each.full for each in self.reports.values()):
            return self._finish(now)
        self._isolation = isolate(tuple(self._ranks()), most=self._most)
        return self._advance(None, now)

    # -- who is there ------------------------------------------------------------------------

    def _host(self, rank: int) -> str:
        return self._hub.host_of(rank) or "?"

    def _ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each host that try collectives: one of each with gloo, else all."""
        by_host: defaultdict[str, list[int]] = defaultdict(list)
        for rank in sorted(self.reports):
            by_host[self.reports[rank].host].append(rank)
        every = self._backend != _GLOO
        return {host: tuple(ranks if every else ranks[:1]) for host, ranks in by_host.items()}

    @property
    def _backend(self) -> str:
        backends = {each.backend for each in self.reports.values()}
        return backends.pop() if len(backends) == 1 else _GLOO

    @property
    def _most(self) -> int | None:
        return _MOST_GLOO if self._backend == _GLOO else None

    @property
    def _hosts(self) -> int:
        return len({each.host for each in self.reports.values()})

    def _of_silence(self, missing: Iterable[int], now: float) -> PreflightRefusal | None:
        members, waited = self._hub.members(), now - max(self._last, self._views.fresh_from)
        there = {r: members[r] for r in missing if r in members and members[r].connected}
        hosts = len({each.host for each in members.values()})
        silent = {r: m.host for r, m in there.items() if now - m.last_message_at > _SILENT_S}
        frozen = {r: host for r, host in silent.items() if not self._is_at_it(r, now)}
        if frozen and waited > _SILENT_S:
            return of_silence(frozen, hosts, timedelta(seconds=waited), frozen=True)
        # Somebody who has not even joined is waited for elsewhere: there is no name for them here.
        patience_s = max(_PATIENCE * self._within_s, _IMPORTS_S)
        if waited > patience_s and len(members) == self._hub.world_size:
            late = {rank: member.host for rank, member in there.items()}
            return of_silence(late, hosts, timedelta(seconds=waited), frozen=False)
        return None

    def _is_at_it(self, rank: int, now: float) -> bool:
        """Whether its monitor says that it lives: an import may hold the interpreter for long."""
        view = self._hub.monitors().get(rank)
        if view is None or view.pulse is None or now - view.last_message_at > _SILENT_S:
            return False
        return view.state not in _ENDED

    # -- rounds ------------------------------------------------------------------------------

    def _advance(self, outcomes: tuple[bool, ...] | None, now: float) -> PreflightMeasured | None:
        """Hand the outcomes to the search, and ask for what it wants to know next."""
        isolation = self._isolation
        assert isolation is not None  # noqa: S101  begun before any round
        try:
            groups = next(isolation) if outcomes is None else isolation.send(outcomes)
        except StopIteration as stop:
            self.isolated = stop.value
            first = {host: each[0] for host, each in self._ranks().items()}
            self.refused = of_collectives(
                stop.value, first, self._failures, self._hosts, slow=self._slow
            )
            return self._finish(now)
        ranks = self._ranks()
        within_s = min(self._within_s, self._limit_s)
        numbered = tuple(tuple(r for host in group for r in ranks[host]) for group in groups)
        order = PreflightRound(groups=numbered, within_s=within_s, backend=self._backend)
        if len(order.to_text()) > _LONGEST:
            self._too_many = True
            return self._finish(now)
        self._rounds += 1
        self._groups += len(groups)
        self._round = _Round(self._rounds, now, within_s, groups, numbered)
        self._publish(order)
        return None

    @property
    def _limit_s(self) -> float:
        """How long a group of the next round may take."""
        if self._rounds == 0:
            return _ALL_GLOO_S if self._backend == _GLOO else _ALL_S
        few = _FEW_GLOO_S if self._backend == _GLOO else _FEW_S
        if self._usual_s == 0.0:
            return few
        return min(few, max(_FEW_LEAST_S, _TIMES_USUAL * self._usual_s))

    def _poll_round(self, round_: _Round, now: float) -> PreflightMeasured | None:
        expected_ranks = {rank for group in round_.ranks for rank in group}
        late = now - round_.asked_at > round_.within_s + _TO_SAY_SO_S
        if not expected_ranks <= set(round_.results) and not late:
            return None
        self._round = None
        outcomes, slowest = [], []
        for hosts, ranks in zip(round_.hosts, round_.ranks, strict=True):
            answers = [round_.results.get(rank) for rank in ranks]
            worked = all(each is not None and each.ok for each in answers)
            speeds = [each.bytes_per_s for each in answers if each is not None]
            slowest += [min(speeds)] if worked else []
            text = next((each.text for each in answers if each and each.text), "no answer")
            if worked and round_.number > 1:
                self._usual_s = max(self._usual_s, *(each.seconds for each in answers if each))
            if not worked:
                self._failures.update(dict.fromkeys(hosts, text))
            outcomes.append(worked and not (self._slow and self._is_slow(min(speeds))))
        if round_.number == 1 and all(outcomes):
            self.bytes_per_s = min(slowest)
            if self._is_slow(self.bytes_per_s):
                self._slow = True
                self._failures = dict.fromkeys(
                    self._ranks(), f"{self.bytes_per_s / 1e9:.1f} GB/s among all"
                )
                outcomes = [False] * len(outcomes)
        return self._advance(tuple(outcomes), now)

    def _is_slow(self, bytes_per_s: float) -> bool:
        return self._expected is not None and bytes_per_s < _SLOW * self._expected

    # -- the end -----------------------------------------------------------------------------

    def _publish(self, groups: PreflightRound) -> None:
        number = self._rounds if groups.groups else self._rounds + 1
        self._hub.publish(round_key(number), groups.to_text())

    def _finish(self, now: float) -> PreflightMeasured:
        self.over = True
        if self.refused is None:
            self._publish(PreflightRound())
        findings = list(oddities(self.reports.values(), self.ahead))
        if self._too_many:
            findings.append("too many ranks for trials of collectives in groups")
        isolated = self.isolated
        if isolated is not None and isolated.why is not Why.FINE and self.refused is None:
            findings.append(_UNNAMED[isolated.why] + _first(self._failures.values()))
        refused = self.refused
        return PreflightMeasured(
            ok=refused is None,
            hosts=self._hosts,
            seconds=round(now - (self._started_at or now), 3),
            bad=() if refused is None else refused.hosts,
            told=tuple(findings[:16]),
            rounds=self._rounds,
            groups=self._groups,
            bytes_per_s=self.bytes_per_s,
        )


_UNNAMED = {
    Why.FOUND: "a collective fails, but not because of a few nodes",
    Why.EVERYBODY: "no two of the nodes that were tried together can run a collective",
    Why.NOT_AGAIN: "a collective failed, but worked when it was tried again",
    Why.AT_SCALE: "a collective of all nodes fails, but none of a part of them",
}


def _first(texts: Iterable[str]) -> str:
    text = next(iter(texts), "")
    return f" ({text})" if text else ""
