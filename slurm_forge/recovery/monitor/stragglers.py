"""Which ranks are persistently slower than the others, and whether the node is to blame: pure.

Ranks are compared with those of the other hosts (on one host: with each other) by medians, window
by window.  A rank is reported if it was slower in several windows in a row, by more than the others
differ among themselves; its node is called slow only if a trial, the same piece of work everywhere,
confirms it.  A rank that has more work by design (rank 0 that logs, longer samples, another stage
of a pipeline) has it from the beginning, and its trial is as fast as everybody's: it is not
reported.  A rank whose own part has *become* longer is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from slurm_forge.recovery.monitor.straggler_reports import (
    StepTimes,
    Straggler,
    StragglerCause,
    StragglerEnd,
)

#: Windows in a row, and steps in them, before a report; and windows before it is over.
_ROW = 3
_STEPS = 12
_OVER = 3
#: Windows at the start that are ignored: files are read for the first time, code is compiled.
_SKIPPED = 2
#: Windows that define what is usual for a rank.
_USUAL = 8
#: A difference must be this many times the others' spread, or the error of the rank's own median.
_SPREADS = 3.0
#: Trials that count: the newest ones of each rank; this many must follow the beginning.
_TRIALS = 3
#: More trials if the rank has long had more work: each further trial is another chance to err.
_MANY_TRIALS = 6
_NEW_TRIALS = 3
#: A trial confirms if it explains this much of the slowdown.
_EXPLAINS = 0.4
#: With more hosts than this, the median of all is as good as that of all others.
_MANY_HOSTS = 8
#: Windows of a row that count, an hour at default settings: more work by design lasts for weeks.
_KEPT = 240
#: A rank that was slow for this many windows has long had more work.
_LONG = 24


@dataclass(frozen=True, slots=True)
class Peers:
    """The other ranks: their median and their spread."""

    middle: float
    spread: float


@dataclass(slots=True)
class _Row:
    """A host that was slow in all of the last windows."""

    since_step: int
    #: In how many of them each rank was slow, and the ranks in the last one.
    ranks: Counter[int] = field(default_factory=Counter)
    last: frozenset[int] = frozenset()
    windows: int = 0
    steps: int = 0
    trials: int = 0
    factors: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    lost: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that were in half of them: windows of two ranks do not begin together."""
        least = self.windows / 2
        return tuple(sorted(rank for rank, count in self.ranks.items() if count >= least))


@dataclass(slots=True)
class _Named:
    """A host that has been reported, until it is over."""

    straggler: Straggler
    well: int = 0
    steps: int = 0
    lost_s: float = 0.0


class StragglerDetector:
    """Call ``window`` repeatedly with the last reports of all ranks.

    ``factor``: the slowdown from which a rank counts as slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        #: The factor below which it is over; in between nothing changes.
        self._exit = 1 + (factor - 1) / 2
        self._windows = 0
        self._rows: dict[str, _Row] = {}
        self._named: dict[str, _Named] = {}
        self._trials: dict[int, deque[float]] = {}
        self._usual: dict[int, list[float]] = {}
        self._latest_step = 0

    @property
    def named(self) -> tuple[Straggler, ...]:
        """The hosts that are slow now."""
        return tuple(each.straggler for _, each in sorted(self._named.items()))

    def trial(self, rank: int) -> float:
        """The median of a rank's newest trials in seconds; 0 if there was none."""
        newest = self._newest(rank)
        return median(newest) if newest else 0.0

    def _newest(self, rank: int, count: int = _TRIALS) -> list[float]:
        return list(self._trials.get(rank, ()))[-count:]

    def window(self, readings: Sequence[StepTimes]) -> tuple[Straggler | StragglerEnd, ...]:
        """Add a window of all ranks; the hosts that became slow with it, or ceased to be."""
        for each in readings:
            if each.trial_s > 0:
                trials = self._trials.setdefault(each.rank, deque(maxlen=_MANY_TRIALS))
                trials.append(each.trial_s)
        self._windows += 1
        self._latest_step = max((each.step for each in readings), default=0)
        if self._windows <= _SKIPPED or len(readings) < 2:
            return ()
        hosts = _by_host(readings)
        own = _others_of(hosts, {r.rank: r.own_s for r in readings if r.own_s > 0})
        changes: list[Straggler | StragglerEnd] = []
        slow = {
            host: members
            for host, on_it in hosts.items()
            if (members := [r for r in on_it if self._is_slow(r, own)])
        }
        has_own_times = any(reading.own_s > 0 for reading in readings)
        if not has_own_times:
            slow = self._slow_by_trial(hosts)
        if _too_many(slow, hosts, readings):
            slow = {}
        for host in hosts:
            if host in self._named:
                changes += self._go_on(
                    host, slow.get(host, []), hosts, own, has_own_times=has_own_times
                )
            elif host in slow:
                changes += self._add(host, slow[host], hosts, own, has_own_times=has_own_times)
            else:
                self._rows.pop(host, None)
        self._learn(readings, own)
        return tuple(changes)

    # -- who is slow in this window ------------------------------------------------------------

    def _is_slow(self, one: StepTimes, own: Mapping[int, Peers]) -> bool:
        others = own.get(one.rank)
        if one.own_s <= 0 or others is None or others.middle <= 0:
            return False
        # Once it has begun, half of it suffices to continue: figures scatter.
        row, named = self._rows.get(one.host), one.host in self._named
        in_progress = named or (row is not None and one.rank in row.ranks)
        if one.own_s < (self._exit if in_progress else self._factor) * others.middle:
            return False
        error = 1.25 * 1.5 * one.spread_s / max(1, one.count) ** 0.5
        return named or one.own_s - others.middle > _SPREADS * max(others.spread, error)

    def _slow_by_trial(self, hosts: Mapping[str, list[StepTimes]]) -> dict[str, list[StepTimes]]:
        """If own parts of steps are unknown: hosts that were slow in all of their newest trials."""
        rest = _others_of(hosts, {rank: self.trial(rank) for rank in self._trials})
        slow: dict[str, list[StepTimes]] = {}
        for host, on_it in hosts.items():
            limit = self._exit if host in self._named else self._factor
            for one in on_it:
                newest = self._newest(one.rank)
                others = rest.get(one.rank)
                if others is None or len(newest) < _TRIALS:
                    continue
                least = min(newest)
                if least >= limit * others.middle and least - others.middle > (
                    _SPREADS * others.spread
                ):
                    slow.setdefault(host, []).append(one)
        return slow

    # -- rows of windows -----------------------------------------------------------------------

    def _add(
        self,
        host: str,
        slow: list[StepTimes],
        hosts: Mapping[str, list[StepTimes]],
        own: Mapping[int, Peers],
        *,
        has_own_times: bool,
    ) -> list[Straggler | StragglerEnd]:
        ranks = frozenset(each.rank for each in slow)
        row = self._rows.get(host)
        if row is None or not row.last & ranks:
            row = self._rows[host] = _Row(since_step=min(r.step - r.count for r in slow))
        row.ranks.update(ranks)
        row.last, members = ranks, slow
        row.windows += 1
        row.steps += min(each.count for each in members)
        row.trials += any(each.trial_s > 0 for each in members)
        if has_own_times:
            row.factors.append(median(each.own_s / own[each.rank].middle for each in members))
            row.lost.append(max(each.own_s - own[each.rank].middle for each in members))
        if row.windows < _ROW or (has_own_times and row.steps < _STEPS):
            return []
        straggler = self._judge(host, row, hosts, has_own_times=has_own_times)
        if straggler is None:
            return []
        before = self._named.get(host)
        if before is not None:
            if not straggler.why.of_node:
                return []  # already reported
            before.straggler = replace(straggler, since_step=before.straggler.since_step)
            return [before.straggler]
        del self._rows[host]
        lost = row.steps * straggler.lost_s
        self._named[host] = _Named(straggler, steps=row.steps, lost_s=lost)
        return [straggler]

    def _judge(
        self, host: str, row: _Row, hosts: Mapping[str, list[StepTimes]], *, has_own_times: bool
    ) -> Straggler | None:
        """Why a host is persistently slow; None while unknown, or if it is the program's design."""
        if not row.members:
            return None
        factor = median(row.factors) if row.factors else 0.0
        if has_own_times and factor < self._factor:
            return None
        trial = self._trial_factor(row, hosts)
        why: StragglerCause | None = None
        if not has_own_times or (
            trial and row.trials >= _NEW_TRIALS and self._explains(trial, factor)
        ):
            why = StragglerCause.NODE
        elif row.trials >= _NEW_TRIALS and self._tries_well(row, hosts, factor):
            why = StragglerCause.WORK if self._is_new(row, factor) else None
        if why is None:
            return None
        return Straggler(
            host=host,
            ranks=row.members,
            factor=round(factor, 3),
            trial=round(trial, 3),
            why=why,
            since_step=max(0, row.since_step),
            lost_s=round(median(row.lost), 6) if row.lost else 0.0,
        )

    def _explains(self, trial: float, factor: float) -> bool:
        return trial >= self._exit and trial - 1 >= _EXPLAINS * (factor - 1)

    def _is_new(self, row: _Row, factor: float) -> bool:
        """Whether it has not always been so: then it is not the program's division of work."""
        usual = [self._usual.get(rank, []) for rank in row.members]
        if any(len(each) < _USUAL for each in usual):
            return False
        return factor >= self._factor * median(median(each) for each in usual)

    def _trial_factor(self, row: _Row, hosts: Mapping[str, list[StepTimes]]) -> float:
        rest = _others_of(hosts, {rank: self.trial(rank) for rank in self._trials})
        factors = []
        for rank in row.members:
            if rank not in rest or rest[rank].middle <= 0:
                continue
            # The best of its newest trials: a single disturbance by a neighbour is no evidence.
            many = _TRIALS if row.windows <= _LONG else _MANY_TRIALS
            least, others = min(self._newest(rank, many)), rest[rank]
            surely = least - others.middle > _SPREADS * others.spread
            factors.append(least / others.middle if surely else min(1.0, least / others.middle))
        return median(factors) if factors else 0.0

    def _tries_well(self, row: _Row, hosts: Mapping[str, list[StepTimes]], factor: float) -> bool:
        """Whether the trial shows a fast node; False if the trial is inconclusive."""
        rest = _others_of(hosts, {rank: self.trial(rank) for rank in self._trials})
        tried = [r for r in row.members if r in rest and rest[r].middle > 0]
        usual = 1 + (1 - _EXPLAINS) * (factor - 1)
        return bool(tried) and all(
            self.trial(r) < min(self._exit, usual) * rest[r].middle for r in tried
        )

    # -- who has been told of ------------------------------------------------------------------

    def _go_on(
        self,
        host: str,
        slow: list[StepTimes],
        hosts: Mapping[str, list[StepTimes]],
        own: Mapping[int, Peers],
        *,
        has_own_times: bool,
    ) -> list[Straggler | StragglerEnd]:
        named = self._named[host]
        if slow:
            if not named.straggler.why.of_node:  # the node may turn out to be the reason after all
                changes = self._add(host, slow, hosts, own, has_own_times=has_own_times)
                if changes:
                    return changes
            named.well = 0
            steps = min(each.count for each in slow)
            named.steps += steps
            more = [r.own_s - own[r.rank].middle for r in slow if r.rank in own and r.own_s > 0]
            named.lost_s += steps * max(more, default=0.0)
            return []
        named.well += 1
        self._rows.pop(host, None)
        if named.well < _OVER:
            return []
        del self._named[host]
        return [
            StragglerEnd(
                straggler=named.straggler,
                step=self._latest_step,
                steps=named.steps,
                lost_s=round(named.lost_s, 3),
            )
        ]

    def lost(self, host: str) -> tuple[int, float]:
        """Steps and seconds that a straggler has cost since it was reported."""
        named = self._named.get(host)
        return (0, 0.0) if named is None else (named.steps, named.lost_s)

    def _learn(self, readings: Sequence[StepTimes], own: Mapping[int, Peers]) -> None:
        """Learn what is usual for a rank from the first windows."""
        for each in readings:
            others = own.get(each.rank)
            durations = self._usual.setdefault(each.rank, [])
            if (
                others is not None
                and others.middle > 0
                and each.own_s > 0
                and len(durations) < _USUAL
            ):
                durations.append(each.own_s / others.middle)


def _by_host(readings: Sequence[StepTimes]) -> dict[str, list[StepTimes]]:
    """The readings of every host, by rank."""
    hosts: dict[str, list[StepTimes]] = {}
    for each in sorted(readings, key=lambda one: one.rank):
        hosts.setdefault(each.host, []).append(each)
    return hosts


def _others_of(
    hosts: Mapping[str, list[StepTimes]], values: Mapping[int, float]
) -> dict[int, Peers]:
    """For each rank, the ranks of other hosts; on a single host all other ranks of it."""
    on_hosts = {
        host: known
        for host, on_it in hosts.items()
        if (known := {r.rank: values[r.rank] for r in on_it if r.rank in values})
    }
    peers: dict[int, Peers] = {}
    if len(on_hosts) > _MANY_HOSTS:
        everybody = list(values.values())
        rest = Peers(median(everybody), _spread_of(everybody))
        return dict.fromkeys(values, rest)
    for host, own in on_hosts.items():
        if len(on_hosts) > 1:
            others = [v for other, each in on_hosts.items() if other != host for v in each.values()]
            peers.update(dict.fromkeys(own, Peers(median(others), _spread_of(others))))
            continue
        for rank in own:
            others = [value for other, value in own.items() if other != rank]
            if others:
                peers[rank] = Peers(median(others), _spread_of(others))
    return peers


def _too_many(
    slow: Mapping[str, list[StepTimes]],
    hosts: Mapping[str, list[StepTimes]],
    readings: Sequence[StepTimes],
) -> bool:
    """Never more than a minority: if most are slow, it is the program, or the others are fast."""
    if len(hosts) > 1:
        return len(slow) > max(1, (len(hosts) - 1) // 2)
    ranks = sum(len(each) for each in slow.values())
    return ranks > max(1, (len(readings) - 1) // 2)


def _spread_of(values: Sequence[float]) -> float:
    """A robust standard deviation: from the median distance to the median."""
    if not values:
        return 0.0
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)
