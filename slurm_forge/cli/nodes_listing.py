"""What ``nodes`` prints with ``--json``: the keys stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.node_ledger import NodeLedger
from slurm_forge.recovery.nodes import Standing, standings

__all__ = ["NodeLine", "NodesListed", "Noted", "StrikeLine", "list_nodes"]

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
    """One node: left out while its score is at the threshold, or because a person struck it.

    ``until`` is when that ends; null where it does not by itself, or where it is not left out.
    """

    node: str
    left_out: bool
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


def list_nodes(ledger: NodeLedger, *, every: bool) -> NodesListed:
    """Read the ledger; ``every`` also lists nodes that hardly anything is left against."""
    reading, rules = ledger.read(), ledger.rules
    found = standings(reading.ledger, ledger.clock(), rules)
    shown = [each for each in found if every or each.convicted or each.score >= _LITTLE]
    return NodesListed(
        cluster=ledger.cluster,
        folder=None if ledger.folder is None else str(ledger.folder),
        threshold=rules.threshold,
        cap=f"a job leaves out at most {100 * rules.most_share:.0f} % of its partition, the worst "
        "first, and never more than it can do without",
        known=len(found),
        nodes=tuple(map(_line, shown)),
        skipped=reading.skipped,
        problems=reading.problems,
    )


def _line(standing: Standing) -> NodeLine:
    strikes = standing.strikes
    return NodeLine(
        node=standing.node,
        left_out=standing.convicted,
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
