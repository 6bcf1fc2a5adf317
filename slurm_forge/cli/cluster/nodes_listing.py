"""What ``nodes`` prints with ``--json``: the keys stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_forge.node_ledger import NodeLedger
from slurm_forge.recovery.nodes.exclusion import excluded_by_ledger, most_excluded
from slurm_forge.recovery.nodes.score import NodeScore, node_scores

_SHOWN = 5
#: Below it a node is only listed when all are asked for.
_LITTLE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeLine:
    """One strike that counts."""

    time: float
    weight: float
    cause: str
    run: str
    incident: str
    by: str
    until: float | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLine:
    """One node: convicted while its score is at the threshold, or because a person struck it.

    ``left_out``: a job of one node in a partition that has it would leave it out now, so that it is
    not one too many; null where the partitions are not known.  ``until`` is when the conviction
    ends; null where it does not by itself, or where there is none.
    """

    node: str
    convicted: bool
    left_out: bool | None
    by_hand: bool
    score: float
    until: float | None
    last: float
    causes: tuple[str, ...]
    runs: tuple[str, ...]
    strikes: tuple[StrikeLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesListed:
    """What ``nodes list`` prints; ``known`` is how many nodes anything counts against."""

    cluster: str
    folder: str | None
    threshold: float
    cap: str
    known: int
    nodes: tuple[NodeLine, ...]
    skipped: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What ``nodes release`` and ``nodes strike`` print with ``--json``."""

    cluster: str
    verb: str
    nodes: tuple[str, ...]
    until: float | None
    why: str


def list_nodes(
    ledger: NodeLedger, *, every: bool, partitions: Mapping[str, frozenset[str]]
) -> NodesListed:
    """Read the ledger; ``every`` also lists nodes that hardly anything is left against.

    ``partitions`` are the cluster's with their nodes; empty where they are not known.
    """
    reading, rules, now = ledger.read(), ledger.rules, ledger.clock()
    scores = node_scores(reading.ledger, now, rules)
    shown = [each for each in scores if every or each.convicted or each.score >= _LITTLE]
    out = {
        each.node
        for nodes in set(partitions.values())
        for each in excluded_by_ledger(reading.ledger, now, rules, partition=nodes, needed=1)
    }
    sizes = {name: len(nodes) for name, nodes in partitions.items()}
    named = [f"{most_excluded(n, rules)} of {n} in {name}" for name, n in sizes.items()]
    more = ", …" if len(named) > _SHOWN else ""
    return NodesListed(
        cluster=ledger.cluster,
        folder=None if ledger.folder is None else str(ledger.folder),
        threshold=rules.threshold,
        cap=f"a job excludes at most {100 * rules.most_share:.0f} % of its partition for what runs "
        "report, at least one node"
        + (f" ({', '.join(named[:_SHOWN])}{more})" if named else "")
        + ", the worst first, and always keeps as many nodes as it needs",
        known=len(scores),
        nodes=tuple(_line(each, each.node in out if partitions else None) for each in shown),
        skipped=reading.skipped,
        problems=(*reading.problems, *reading.of_others),
    )


def _line(standing: NodeScore, left_out: bool | None) -> NodeLine:
    strikes = standing.strikes
    return NodeLine(
        node=standing.node,
        convicted=standing.convicted,
        left_out=left_out,
        by_hand=standing.by_hand,
        score=standing.score,
        until=standing.until,
        last=strikes[0].time,
        causes=tuple(dict.fromkeys(each.cause for each in strikes)),
        runs=tuple(dict.fromkeys(each.run for each in strikes if each.run)),
        strikes=tuple(
            StrikeLine(
                time=each.time,
                weight=each.weight,
                cause=each.cause,
                run=each.run,
                incident=each.incident_id,
                by=each.by,
                until=each.until,
                why=each.why,
            )
            for each in strikes
        ),
    )
