"""Texts about the nodes of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import tzinfo
from pathlib import PurePath

from slurm_forge.cli.cluster.nodes_listing import (
    NodeLine,
    NodesListed,
)
from slurm_forge.recovery.nodes.exclusion import ExcludedNode
from slurm_forge.recovery.nodes.statements import BY_HAND
from slurm_forge.report import text as t

_SHOWN = 5
_DAY_S = 86_400.0


def word(cause: str) -> str:
    """A cause in a sentence."""
    return "struck by a user" if cause == BY_HAND else cause


def leaves_out(nodes: Sequence[ExcludedNode], now: float, zone: tzinfo | None = None) -> str:
    """One sentence for the person who submits a job."""
    shown = ", ".join(
        f"{each.node} ({word(each.causes[0])} {t.ago(each.last, now)}, {_until(each, now, zone)})"
        for each in nodes[:_SHOWN]
    )
    more = f" and {t.number(len(nodes) - _SHOWN)} more" if len(nodes) > _SHOWN else ""
    return f"excluding {shown}{more}: slurm-forge nodes list"


def nodes_text(
    listed: NodesListed, *, now: float, every: bool = False, zone: tzinfo | None = None
) -> str:
    """A line per node; with ``every`` also a line per strike."""
    if listed.folder is None:
        return "no node ledger is kept: SLURM_FORGE_NODES=off\n"
    out = sum(map(_is_out, listed.nodes))
    over = sum(node.convicted for node in listed.nodes) - out
    count = f"{t.plural(out, 'node')} excluded" + (f", {over} used anyway" if over else "")
    head = f"{listed.cluster}   {count}   {t.clean(listed.folder, 300)}"
    lines = [head, *_table(listed.nodes, now, every, zone)]
    hidden = listed.known - len(listed.nodes)
    if hidden:
        lines.append(f"  and {t.plural(hidden, 'node')} with a low score: --all")
    if out or over:
        lines.append(f"  {listed.cap}")
        lines.append("  trust one again: slurm-forge nodes release NODE")
    if listed.skipped:
        lines.append(f"  {t.plural(listed.skipped, 'damaged line')} not read")
    lines += [f"  not read: {t.clean(problem, 300)}" for problem in listed.problems]
    return "\n".join(lines) + "\n"


def _table(
    nodes: Sequence[NodeLine], now: float, every: bool, zone: tzinfo | None
) -> Iterator[str]:
    rows = [_cells(node, now, zone) for node in nodes]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for node, row in zip(nodes, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"  {'   '.join(cells)}".rstrip()
        for strike in node.strikes if every else ():
            words = [t.moment(strike.time, now, zone), word(strike.cause), f"{strike.weight:.2f}"]
            words += [f"{PurePath(strike.run).name} {strike.incident}"] if strike.run else []
            words += [f"by {strike.by}"] if strike.by else []
            words += [f'"{strike.why}"'] if strike.why else []
            yield f"      {'   '.join(t.clean(each, 200) for each in words)}"


def _cells(node: NodeLine, now: float, zone: tzinfo | None) -> tuple[str, ...]:
    counted = Counter(strike.cause for strike in node.strikes)
    causes = ", ".join(
        f"{counted[cause]} {word(cause)}" if counted[cause] > 1 else word(cause)
        for cause in node.causes
    )
    names = [PurePath(run).name for run in node.runs]
    runs = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    reason = next((strike.why for strike in node.strikes if strike.why), "")
    return (
        node.node,
        _until(node, now, zone) if _is_out(node) else _in_use(node),
        f"score {node.score:.2f}",
        f"{causes}, last {t.ago(node.last, now)}",
        t.clean(f'"{reason}"' if reason else runs, 80),
    )


def _is_out(node: NodeLine) -> bool:
    """Whether jobs exclude it, as far as known."""
    return node.convicted if node.left_out is None else node.left_out


def _in_use(node: NodeLine) -> str:
    return "in use: too many" if node.convicted else "in use"


def _until(node: NodeLine | ExcludedNode, now: float, zone: tzinfo | None) -> str:
    if node.until is None:
        return "until released"
    if node.until - now < _DAY_S:
        return f"until {t.clock(node.until, zone)[:5]}"
    return f"until {t.moment(node.until, now, zone)}"
