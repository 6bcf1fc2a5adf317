"""Which nodes are left out, and for how long: strikes that fade.  Pure.

What a run saw of a node is a strike.  Strikes lose half of their weight in every half-life; a node
is left out while what is left of them reaches the threshold, but never more than a small share of
a partition and never so many that the job itself would not fit.  What one person's runs say in the
same few hours, for the same cause, is shared out between the nodes they say it of: a program that
crashes everywhere convicts no node, one node that fails where others don't is convicted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

__all__ = [
    "BY_HAND",
    "MOST_WEIGHT",
    "Avoided",
    "Ledger",
    "NodeRules",
    "Release",
    "Standing",
    "Strike",
    "avoided",
    "faded",
    "standings",
]

#: The cause of a strike that a person made.
BY_HAND = "by_hand"
#: No single strike weighs more.
MOST_WEIGHT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Something that speaks against a node.

    ``time`` and ``until`` are seconds since the epoch.  ``run`` is the path of the run, ``by`` the
    user.  A person's strike (``cause`` is ``BY_HAND``) does not fade: it is enough by itself until
    ``until``, and where that is None until somebody releases the node.
    """

    node: str
    time: float
    weight: float
    cause: str
    run: str = ""
    incident_id: str = ""
    by: str = ""
    until: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A person trusts a node again: what was said of it up to ``time`` no longer counts."""

    node: str
    time: float
    by: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that is known, in any order; doubles do no harm."""

    strikes: tuple[Strike, ...] = ()
    releases: tuple[Release, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRules:
    """How strikes are weighed.

    ``together`` is how near in time strikes are taken for consequences of one thing;
    ``most_alone`` is the most that one person's runs can say against a node for one cause: less
    than twice the threshold, so that of nodes struck together at most one is convicted.
    ``most_unknown`` is how many are left out where the partition's size is not known.
    """

    half_life: timedelta = timedelta(days=3)
    threshold: float = 1.0
    most_share: float = 0.1
    most_unknown: int = 4
    together: timedelta = timedelta(hours=6)
    most_alone: float = 1.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the ledger says of one node.

    ``convicted``: it is to be left out where the cap allows, until ``until`` (None: until somebody
    releases it, or not convicted).  ``strikes`` are those that count, the newest first.
    """

    node: str
    score: float
    convicted: bool
    by_hand: bool
    until: float | None
    strikes: tuple[Strike, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoided:
    """A node that is left out, until ``until`` (None: until somebody releases it).

    ``last`` is when it was last struck, ``causes`` what for, the heaviest first.
    """

    node: str
    score: float
    until: float | None
    causes: tuple[str, ...]
    last: float


def avoided(
    ledger: Ledger,
    now: float,
    rules: NodeRules,
    *,
    partition: Collection[str] | None,
    needed: int,
    excluded: Collection[str] = (),
    spared: Collection[str] = (),
) -> tuple[Avoided, ...]:
    """The nodes that a job is to leave out now, the worst first.

    ``partition`` are the nodes that the job could have (None: unknown), ``needed`` how many it
    needs, ``excluded`` those left out anyway, ``spared`` those that somebody asked for by name.
    """
    known = None if partition is None else frozenset(partition)
    left_out, wanted = frozenset(excluded), frozenset(spared)
    most = _cap(rules, known, needed, left_out)
    found = [
        each
        for each in standings(ledger, now, rules)
        if each.convicted
        and each.node not in left_out
        and each.node not in wanted
        and (known is None or each.node in known)
    ]
    return tuple(
        Avoided(
            node=each.node,
            score=each.score,
            until=each.until,
            causes=_causes(each.strikes, now, rules),
            last=max(strike.time for strike in each.strikes),
        )
        for each in found[:most]
    )


def standings(ledger: Ledger, now: float, rules: NodeRules) -> tuple[Standing, ...]:
    """What is said of every node that anything counts against, the worst first.

    Worst are those that a person struck, then by score, then by name.
    """
    strikes = _once(ledger.strikes)
    fraction = _shares(strikes, rules)
    freed = _released(ledger.releases)
    of_node: defaultdict[str, list[Strike]] = defaultdict(list)
    for strike in strikes:
        if strike.time > freed.get(strike.node, -math.inf) and not _expired(strike, now):
            of_node[strike.node].append(strike)
    found = [_standing(node, given, fraction, now, rules) for node, given in of_node.items()]
    return tuple(sorted(found, key=lambda each: (not each.by_hand, -each.score, each.node)))


def faded(strike: Strike, now: float, rules: NodeRules) -> float:
    """What is left of the weight of one strike, before anything is shared out."""
    if strike.cause == BY_HAND:
        return 0.0 if _expired(strike, now) else strike.weight
    return strike.weight * _left(now - strike.time, rules)


def _cap(
    rules: NodeRules, partition: frozenset[str] | None, needed: int, excluded: frozenset[str]
) -> int:
    if partition is None:
        return rules.most_unknown
    share = max(1, math.floor(rules.most_share * len(partition)))
    room = len(partition) - len(partition & excluded) - needed
    return max(0, min(share, room))


def _once(strikes: Iterable[Strike]) -> list[Strike]:
    """Without doubles: of one incident a node is struck once, by the heaviest, the earliest."""
    kept: dict[tuple[str, ...], Strike] = {}
    for strike in sorted(set(strikes), key=_order):
        if not strike.incident_id:
            kept[strike.node, repr(_order(strike))] = strike
        else:
            key = (strike.node, strike.by, strike.run, strike.incident_id)
            best = kept.setdefault(key, strike)
            if strike.weight > best.weight:
                kept[key] = strike
    return sorted(kept.values(), key=_order)


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


def _shares(strikes: Sequence[Strike], rules: NodeRules) -> dict[Strike, float]:
    """Of what its source said around the same time for the same cause, how much fell on its node.

    ``strikes`` are ordered by time.  The share of a strike does not depend on the present.
    """
    groups: defaultdict[tuple[str, str], list[Strike]] = defaultdict(list)
    for strike in strikes:
        if strike.cause != BY_HAND:
            groups[_source(strike)].append(strike)
    reach = rules.together.total_seconds()
    fraction: dict[Strike, float] = {}
    for group in groups.values():
        whole = _Sums(group)
        by_node: defaultdict[str, list[Strike]] = defaultdict(list)
        for strike in group:
            by_node[strike.node].append(strike)
        for mine in by_node.values():
            own = _Sums(mine)
            for strike in mine:
                span = strike.time - reach, strike.time + reach
                total = whole.between(*span)
                fraction[strike] = min(1.0, own.between(*span) / total) if total > 0 else 0.0
    return fraction


class _Sums:
    """Sums of weights over spans of time."""

    def __init__(self, strikes: Sequence[Strike]) -> None:
        self._times = [strike.time for strike in strikes]
        self._sums = [0.0, *accumulate(strike.weight for strike in strikes)]

    def between(self, first: float, last: float) -> float:
        """Of all from ``first`` to ``last``, both included."""
        end, begin = bisect_right(self._times, last), bisect_left(self._times, first)
        return self._sums[end] - self._sums[begin]


def _source(strike: Strike) -> tuple[str, str]:
    """Who said it (a user, else a run), and what."""
    return strike.by or strike.run, strike.cause


def _released(releases: Iterable[Release]) -> dict[str, float]:
    latest: dict[str, float] = {}
    for release in releases:
        latest[release.node] = max(release.time, latest.get(release.node, -math.inf))
    return latest


def _expired(strike: Strike, now: float) -> bool:
    return strike.cause == BY_HAND and strike.until is not None and strike.until <= now


@dataclass(frozen=True, slots=True)
class _Said:
    """What one source says against one node now: what counts of it, and all of it."""

    counts: float
    whole: float

    def at(self, left: float, most: float) -> float:
        """When everything has faded to ``left`` of now."""
        whole = self.whole * left
        return self.counts * left * (min(1.0, most / whole) if whole > 0 else 1.0)


def _standing(
    node: str, strikes: list[Strike], fraction: dict[Strike, float], now: float, rules: NodeRules
) -> Standing:
    by_hand = [strike for strike in strikes if strike.cause == BY_HAND]
    counts: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for strike in strikes:
        if strike.cause != BY_HAND:
            weight = strike.weight * _left(now - strike.time, rules)
            counts[_source(strike)].append((weight * fraction[strike], weight))
    said = [
        _Said(math.fsum(part for part, _ in each), math.fsum(whole for _, whole in each))
        for each in counts.values()
    ]
    score = _score(said, 1.0, rules)
    until = now + _seconds_above(said, rules)
    if by_hand:
        ends = [math.inf if strike.until is None else strike.until for strike in by_hand]
        until = max(until, *ends)
    convicted = bool(by_hand) or score >= rules.threshold
    return Standing(
        node=node,
        score=score + rules.threshold if by_hand else score,
        convicted=convicted,
        by_hand=bool(by_hand),
        until=until if convicted and math.isfinite(until) else None,
        strikes=tuple(sorted(strikes, key=_order, reverse=True)),
    )


def _score(said: Sequence[_Said], left: float, rules: NodeRules) -> float:
    return math.fsum(each.at(left, rules.most_alone) for each in said)


def _seconds_above(said: Sequence[_Said], rules: NodeRules) -> float:
    """For how long the score stays at the threshold or above, to the second; 0 if it is below."""
    if _score(said, 1.0, rules) < rules.threshold:
        return 0.0
    low, high = 0.0, 1.0
    half_life = rules.half_life.total_seconds()
    while _score(said, 0.5 ** (high / half_life), rules) >= rules.threshold:
        low, high = high, high * 2
    while high - low > 1.0:
        middle = (low + high) / 2
        if _score(said, 0.5 ** (middle / half_life), rules) >= rules.threshold:
            low = middle
        else:
            high = middle
    return high


def _left(age: float, rules: NodeRules) -> float:
    """How much of a weight is left at that age; a clock that is ahead makes nothing heavier."""
    return float(0.5 ** (max(0.0, age) / rules.half_life.total_seconds()))


def _causes(strikes: Iterable[Strike], now: float, rules: NodeRules) -> tuple[str, ...]:
    weights: defaultdict[str, float] = defaultdict(float)
    for strike in strikes:
        weights[strike.cause] += math.inf if strike.cause == BY_HAND else faded(strike, now, rules)
    return tuple(sorted(weights, key=lambda cause: (-weights[cause], cause)))
