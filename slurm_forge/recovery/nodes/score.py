"""What strikes add up to: how bad each node is, and until when.  Pure.

Strikes lose half of their weight in every half-life.  Strikes by one person's runs within the same
few hours and for the same cause are shared out between the nodes that they name: a program that
crashes everywhere convicts no node, while a node that fails where others don't is convicted.  Of
the strikes of one run in the same hours, at one node and for one cause, only one counts: a program
with a fault of its own may be restarted again and again where it failed.  A driver's error text and
Slurm's node failure count fully on their own: programs don't cause them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from slurm_forge.recovery.nodes.statements import (
    BY_HAND,
    Ledger,
    NodeRules,
    Strike,
)
from slurm_forge.vocabulary.cause import REPORTED_NODE_FAULTS

#: Who reported it, and for which cause.
_Source = tuple[str, str]
_BY_AUTHORITY = frozenset(cause.value for cause in REPORTED_NODE_FAULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScore:
    """The ledger's verdict on one node.

    ``convicted``: it is to be excluded if the cap allows, until ``until`` (None: until somebody
    releases it, or not convicted).  ``by_hand``: a person struck it.  ``strikes`` are those that
    nobody has released, the newest first.
    """

    node: str
    score: float
    convicted: bool
    by_hand: bool
    until: float | None
    strikes: tuple[Strike, ...]


def node_scores(ledger: Ledger, now: float, rules: NodeRules) -> tuple[NodeScore, ...]:
    """The verdicts on all nodes with strikes, the worst first.

    Nodes struck by a person come first, then by score, then by name.
    """
    strikes = _once(ledger.strikes)
    freed = _released(ledger, now)
    counted = {each for each in strikes if each.time > freed.get(each.node, -math.inf)}
    fraction = _shares(_one_of_a_run(strikes, counted, rules), rules)
    of_node: defaultdict[str, list[Strike]] = defaultdict(list)
    for strike in strikes:
        if strike in counted and not _expired(strike, now):
            of_node[strike.node].append(strike)
    weighing = _Weighing(fraction, now, rules)
    scores = [weighing.score(node, each) for node, each in of_node.items()]
    return tuple(sorted(scores, key=lambda each: (not each.by_hand, -each.score, each.node)))


def faded(strike: Strike, now: float, rules: NodeRules) -> float:
    """The remaining weight of one strike, before anything is shared out."""
    if strike.cause == BY_HAND:
        return 0.0 if _expired(strike, now) else strike.weight
    return strike.weight * _decay(now - strike.time, rules)


def _once(strikes: Iterable[Strike]) -> list[Strike]:
    """Remove duplicates: an incident strikes a node once, by the heaviest and earliest entry."""
    unique: dict[tuple[str, ...], Strike] = {}
    for strike in sorted(set(strikes), key=_order):
        if not strike.incident_id:
            unique[strike.node, repr(_order(strike))] = strike
        else:
            key = (strike.node, _who(strike), strike.run, strike.incident_id)
            best = unique.setdefault(key, strike)
            if strike.weight > best.weight:
                unique[key] = strike
    return sorted(unique.values(), key=_order)


def _order(strike: Strike) -> tuple[float, str, str, str, str, str, float, float, str]:
    until = math.inf if strike.until is None else strike.until
    return (
        strike.time,
        strike.node,
        strike.cause,
        strike.by,
        strike.run,
        strike.incident_id,
        strike.weight,
        until,
        strike.why,
    )


def _one_of_a_run(
    strikes: Sequence[Strike], counted: Collection[Strike], rules: NodeRules
) -> list[Strike]:
    """Keep one of the strikes that a run repeats in the same hours: the heaviest.

    ``strikes`` are ordered by time.  A released strike never replaces one that is not.
    """
    reach = rules.together.total_seconds()
    first_times: dict[tuple[object, ...], float] = {}
    heaviest: dict[tuple[object, ...], Strike] = {}
    for strike in strikes:
        key: tuple[object, ...] = (strike,)
        if strike.cause != BY_HAND and not _is_authoritative(strike, rules):
            group = (_who(strike), strike.run, strike.node, strike.cause, strike in counted)
            if strike.time > first_times.get(group, -math.inf) + reach:
                first_times[group] = strike.time
            key = (*group, first_times[group])
        best = heaviest.setdefault(key, strike)
        if strike.weight > best.weight:
            heaviest[key] = strike
    return sorted(heaviest.values(), key=_order)


def _is_authoritative(strike: Strike, rules: NodeRules) -> bool:
    """Whether a driver or Slurm reported it about this very node."""
    return strike.cause in _BY_AUTHORITY and strike.weight >= rules.sure


def _shares(strikes: Sequence[Strike], rules: NodeRules) -> dict[Strike, float]:
    """The node's share of what its source reported around the same time for the same cause.

    ``strikes`` are ordered by time.  The share of a strike does not depend on the present.
    """
    groups: defaultdict[_Source, list[Strike]] = defaultdict(list)
    fraction: dict[Strike, float] = {}
    for strike in strikes:
        if strike.cause != BY_HAND and _is_authoritative(strike, rules):
            fraction[strike] = 1.0
        elif strike.cause != BY_HAND:
            groups[_source(strike)].append(strike)
    reach = rules.together.total_seconds()
    for group in groups.values():
        everywhere = _Sums(group)
        by_node: defaultdict[str, list[Strike]] = defaultdict(list)
        for strike in group:
            by_node[strike.node].append(strike)
        for here in by_node.values():
            on_node = _Sums(here)
            for strike in here:
                span = strike.time - reach, strike.time + reach
                total = everywhere.between(*span)
                fraction[strike] = min(1.0, on_node.between(*span) / total) if total > 0 else 0.0
    return fraction


class _Sums:
    """Sums of weights over intervals of time."""

    def __init__(self, strikes: Sequence[Strike]) -> None:
        self._times = [strike.time for strike in strikes]
        self._sums = [0.0, *accumulate(strike.weight for strike in strikes)]

    def between(self, first: float, last: float) -> float:
        """The sum from ``first`` to ``last``, both included."""
        end, begin = bisect_right(self._times, last), bisect_left(self._times, first)
        return self._sums[end] - self._sums[begin]


def _who(strike: Strike) -> str:
    """The source: a user, else a run."""
    return strike.by or strike.run


def _source(strike: Strike) -> _Source:
    return _who(strike), strike.cause


def _released(ledger: Ledger, now: float) -> dict[str, float]:
    """The time until which a node is released.

    A release dated in the future would cancel strikes that have not happened yet.
    """
    latest: dict[str, float] = {}
    for release in ledger.releases:
        latest[release.node] = max(min(release.time, now), latest.get(release.node, -math.inf))
    return latest


def _expired(strike: Strike, now: float) -> bool:
    return strike.cause == BY_HAND and strike.until is not None and strike.until <= now


@dataclass(frozen=True, slots=True)
class _SourceWeight:
    """What one source reports against one node now: the part that counts, and all of it."""

    counts: float
    total: float

    def at(self, factor: float, most: float) -> float:
        """The score once everything has faded by ``factor``."""
        total = self.total * factor
        return self.counts * factor * (min(1.0, most / total) if total > 0 else 1.0)


@dataclass(frozen=True, slots=True)
class _Weighing:
    """What is needed to weigh the strikes of one node."""

    fraction: Mapping[Strike, float]
    now: float
    rules: NodeRules

    def score(self, node: str, strikes: list[Strike]) -> NodeScore:
        rules, now = self.rules, self.now
        by_hand = [strike for strike in strikes if strike.cause == BY_HAND]
        sources = self._sources(strikes)
        score = _score(sources, 1.0, rules)
        until = now + _seconds_above(sources, rules)
        if by_hand:
            ends = [math.inf if strike.until is None else strike.until for strike in by_hand]
            until = max(until, *ends)
        convicted = bool(by_hand) or score >= rules.threshold
        return NodeScore(
            node=node,
            score=score + rules.threshold if by_hand else score,
            convicted=convicted,
            by_hand=bool(by_hand),
            until=until if convicted and math.isfinite(until) else None,
            strikes=tuple(sorted(strikes, key=_order, reverse=True)),
        )

    def _sources(self, strikes: Iterable[Strike]) -> list[_SourceWeight]:
        counts: defaultdict[_Source, list[tuple[float, float]]] = defaultdict(list)
        for strike in strikes:
            part = self.fraction.get(strike)  # None: by hand, or repeated by a run
            if part is not None:
                weight = strike.weight * _decay(self.now - strike.time, self.rules)
                counts[_source(strike)].append((weight * part, weight))
        return [
            _SourceWeight(
                math.fsum(part for part, _ in each), math.fsum(total for _, total in each)
            )
            for each in counts.values()
        ]


def _score(sources: Sequence[_SourceWeight], factor: float, rules: NodeRules) -> float:
    return math.fsum(each.at(factor, rules.most_alone) for each in sources)


def _seconds_above(sources: Sequence[_SourceWeight], rules: NodeRules) -> float:
    """For how long the score stays at the threshold or above, to the second; 0 if below it."""
    if _score(sources, 1.0, rules) < rules.threshold:
        return 0.0
    low, high = 0.0, 1.0
    half_life = rules.half_life.total_seconds()
    while _score(sources, 0.5 ** (high / half_life), rules) >= rules.threshold:
        low, high = high, high * 2
    while high - low > 1.0:
        middle = (low + high) / 2
        if _score(sources, 0.5 ** (middle / half_life), rules) >= rules.threshold:
            low = middle
        else:
            high = middle
    return high


def _decay(age: float, rules: NodeRules) -> float:
    """The remaining share of a weight at that age; a clock that is ahead makes nothing heavier."""
    return float(0.5 ** (max(0.0, age) / rules.half_life.total_seconds()))
