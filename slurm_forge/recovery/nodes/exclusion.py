"""Which nodes are left out, and how many at most.  Pure.

A node is left out while what is left of its strikes reaches the threshold, but never more than a
small share of a partition and never so many that the job itself would not fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slurm_forge.recovery.nodes.score import (
    Standing,
    faded,
    standings,
)
from slurm_forge.recovery.nodes.statements import (
    BY_HAND,
    MOST_WEIGHT,
    Ledger,
    NodeRules,
    Release,
    Strike,
)

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
    "most_left_out",
    "spared",
    "standings",
]


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
    What the reader struck by hand is only bounded by what the job needs.
    """
    known = None if partition is None else frozenset(partition)
    left_out, wanted = frozenset(excluded), frozenset(spared)
    found = [
        each
        for each in standings(ledger, now, rules)
        if each.convicted
        and each.node not in left_out
        and each.node not in wanted
        and (known is None or each.node in known)
    ]
    share = rules.most_unknown if known is None else most_left_out(len(known), rules)
    room = share if known is None else max(0, len(known) - len(known & left_out) - needed)
    return tuple(
        Avoided(
            node=each.node,
            score=each.score,
            until=each.until,
            causes=_causes(each.strikes, now, rules),
            last=max(strike.time for strike in each.strikes),
        )
        for each in _within(found, share)[:room]
    )


def most_left_out(size: int, rules: NodeRules) -> int:
    """How many nodes of a partition of that size runs' strikes leave out at most: one at least."""
    return max(1, math.floor(rules.most_share * size))


def spared(
    exclude: Iterable[str],
    partition: Collection[str] | None,
    needed: int,
    newest: Collection[str] = (),
    *,
    excluded: Collection[str] = (),
) -> tuple[str, ...]:
    """Of the nodes that a recovery plan leaves out, as many as the job can do without, sorted.

    A job that asks for more nodes than are left waits for ever.  ``partition`` are the nodes that
    it could have (None: unknown, and the plan holds), ``needed`` how many it needs, ``newest``
    those that go before the others, ``excluded`` those left out anyway.
    """
    names = sorted(set(exclude))
    if partition is None:
        return tuple(names)
    known, first = frozenset(partition) - frozenset(excluded), frozenset(newest)
    there = sorted((name for name in names if name in known), key=lambda name: name not in first)
    return tuple(sorted(there[: max(0, len(known) - needed)]))


def _within(found: Iterable[Standing], share: int) -> list[Standing]:
    """As many as may be: what others say by hand takes half of the share, if there is more."""
    by_others = -(-share // 2)
    kept: list[Standing] = []
    for each in found:
        foreign = each.by_hand and not each.mine
        if each.own_hand:
            kept.append(each)
        elif share > 0 and not (foreign and by_others <= 0):
            share -= 1
            by_others -= foreign
            kept.append(each)
    return kept


def _causes(strikes: Iterable[Strike], now: float, rules: NodeRules) -> tuple[str, ...]:
    weights: defaultdict[str, float] = defaultdict(float)
    for strike in strikes:
        weights[strike.cause] += math.inf if strike.cause == BY_HAND else faded(strike, now, rules)
    return tuple(sorted(weights, key=lambda cause: (-weights[cause], cause)))
