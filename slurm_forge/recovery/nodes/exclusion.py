"""Which nodes are excluded, and how many at most.  Pure.

A node is excluded while the remaining weight of its strikes reaches the threshold, but never more
than a small share of a partition, and never so many that the job itself would not fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slurm_forge.recovery.nodes.score import (
    NodeScore,
    faded,
    node_scores,
)
from slurm_forge.recovery.nodes.statements import (
    BY_HAND,
    Ledger,
    NodeRules,
    Strike,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedNode:
    """An excluded node, until ``until`` (None: until somebody releases it).

    ``last`` is the time of its last strike, ``causes`` the reasons, the heaviest first.
    """

    node: str
    score: float
    until: float | None
    causes: tuple[str, ...]
    last: float


def excluded_by_ledger(
    ledger: Ledger,
    now: float,
    rules: NodeRules,
    *,
    partition: Collection[str] | None,
    needed: int,
    excluded: Collection[str] = (),
    spared: Collection[str] = (),
) -> tuple[ExcludedNode, ...]:
    """The nodes that a job excludes now, the worst first.

    ``partition`` are the nodes that the job could get (None: unknown), ``needed`` how many it
    needs, ``excluded`` those excluded anyway, ``spared`` those that the user requested by name.
    Strikes by a person are only limited by what the job needs.
    """
    candidates = None if partition is None else frozenset(partition)
    left_out, spared_nodes = frozenset(excluded), frozenset(spared)
    convicted = [
        each
        for each in node_scores(ledger, now, rules)
        if each.convicted
        and each.node not in left_out
        and each.node not in spared_nodes
        and (candidates is None or each.node in candidates)
    ]
    share = rules.most_unknown if candidates is None else most_excluded(len(candidates), rules)
    nodes_to_spare = (
        share
        if candidates is None
        else max(0, len(candidates) - len(candidates & left_out) - needed)
    )
    return tuple(
        ExcludedNode(
            node=each.node,
            score=each.score,
            until=each.until,
            causes=_causes(each.strikes, now, rules),
            last=max(strike.time for strike in each.strikes),
        )
        for each in _within(convicted, share)[:nodes_to_spare]
    )


def most_excluded(size: int, rules: NodeRules) -> int:
    """How many nodes of a partition of that size strikes of runs can exclude: at least one."""
    return max(1, math.floor(rules.most_share * size))


def spared(
    exclude: Iterable[str],
    partition: Collection[str] | None,
    needed: int,
    newest: Collection[str] = (),
    *,
    excluded: Collection[str] = (),
) -> tuple[str, ...]:
    """Of the nodes that a recovery plan excludes, as many as the job can do without, sorted.

    A job that requests more nodes than are left waits for ever.  ``partition`` are the nodes that
    it could get (None: unknown, and the plan is kept), ``needed`` how many it needs, ``newest``
    those with priority over the others, ``excluded`` those excluded anyway.
    """
    names = sorted(set(exclude))
    if partition is None:
        return tuple(names)
    candidates, first = frozenset(partition) - frozenset(excluded), frozenset(newest)
    there = sorted(
        (name for name in names if name in candidates), key=lambda name: name not in first
    )
    return tuple(sorted(there[: max(0, len(candidates) - needed)]))


def _within(convicted: Iterable[NodeScore], share: int) -> list[NodeScore]:
    """All nodes struck by people, and as many of the others as the limit allows."""
    within: list[NodeScore] = []
    for each in convicted:
        if not each.by_hand:
            share -= 1
        if each.by_hand or share >= 0:
            within.append(each)
    return within


def _causes(strikes: Iterable[Strike], now: float, rules: NodeRules) -> tuple[str, ...]:
    weights: defaultdict[str, float] = defaultdict(float)
    for strike in strikes:
        weights[strike.cause] += math.inf if strike.cause == BY_HAND else faded(strike, now, rules)
    return tuple(sorted(weights, key=lambda cause: (-weights[cause], cause)))
