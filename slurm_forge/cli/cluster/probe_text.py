"""The findings of ``probe``: a row for each node, or one JSON document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slurm_forge.control.messages.preflight import Check, CheckVerdict, NodeReport
from slurm_forge.launch.diagnose.node_probe import ProbeResult
from slurm_forge.report import text as t
from slurm_forge.report.encoding import to_json

_SIGN = {
    CheckVerdict.FINE: "ok",
    CheckVerdict.ODD: "odd",
    CheckVerdict.BAD: "BAD",
    CheckVerdict.SKIPPED: "-",
}
_COLUMNS = ("gpu", "cpu", "memory", "storage", "other")
_OF = {
    "gpu": "gpu", "gpu memory": "gpu", "gpu computes": "gpu", "gpu health": "gpu",
    "cpu computes": "cpu", "memory": "memory", "storage": "storage", "lock": "storage",
}  # fmt: skip
_ORDER = (CheckVerdict.SKIPPED, CheckVerdict.FINE, CheckVerdict.ODD, CheckVerdict.BAD)
_CLOCK_SHOWN_S = 0.5


def probe_text(result: ProbeResult, struck: tuple[str, ...] = ()) -> str:
    """For people: a row per node, the findings, then the verdict."""
    bad = () if result.refused is None else result.refused.hosts
    rows: list[tuple[str, ...]] = [("node", *_COLUMNS, "clock", "")]
    lines: list[str] = []
    for report in result.reports:
        ahead = result.ahead.get(report.rank, 0.0)
        clock = f"{ahead:+.1f} s" if abs(ahead) > _CLOCK_SHOWN_S else "ok"
        rows.append((report.host, *_cells(report), clock, "refused" if report.host in bad else ""))
        lines += [
            f"  {report.host}: {check.name}: {t.clean(check.text, 300)}"
            for check in report.checks
            if check.verdict in (CheckVerdict.ODD, CheckVerdict.BAD)
        ]
    rows += [(node, *("-" for _ in _COLUMNS), "-", "no answer") for node in result.silent]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    table = ["  ".join(f"{c:<{w}}" for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    if len(rows) == 1:
        table = []
    return "\n".join([*table, *lines, *_verdict(result, struck)]) + "\n"


#: The basis of a verdict if nobody has answered.
_NEEDED = (
    "  On a cluster, does sinfo answer here? The nodes must be able to connect to this machine, "
    "see --folder, and have this Python, with torch."
)


def _cells(report: NodeReport) -> list[str]:
    cells = []
    for column in _COLUMNS:
        verdicts = [c.verdict for c in report.checks if _OF.get(c.name, "other") == column]
        worst = max(verdicts, key=_ORDER.index, default=CheckVerdict.SKIPPED)
        fine = column == "gpu" and worst is CheckVerdict.FINE
        cells.append(_gpus(report.checks) if fine else _SIGN[worst])
    return cells


def _gpus(checks: tuple[Check, ...]) -> str:
    text = next((check.text for check in checks if check.name == "gpu"), "")
    return "none" if text.startswith("0 ") else text.partition(" ")[0] + " ok"


def _verdict(result: ProbeResult, struck: tuple[str, ...]) -> list[str]:
    measured, isolated = result.measured, result.isolated
    if measured is None:
        return [f"could not look: {t.clean(result.problem, 1000)}", _NEEDED]
    lines = []
    if measured.bytes_per_s:
        speed = f"{measured.bytes_per_s / 1e9:.2f} GB/s"
        lines.append(f"together: {measured.hosts} nodes, all-reduce {speed} on the bus")
    elif isolated is not None and isolated.rounds:
        tried = f"{t.plural(isolated.rounds, 'round')}, {t.plural(isolated.groups, 'group')}"
        lines.append(f"together: a collective failed; {tried} tried")
    if result.refused is not None:
        refused = result.refused
        lines += [f"  {t.clean(each.text, 300)}" for each in refused.evidence]
        names = t.nodes(refused.hosts)
        lines.append(f"bad: {names}: {refused.cause.value} ({refused.confidence.value})")
        if struck:
            lines.append(f"struck: {t.nodes(struck)}.   trust again: slurm-forge nodes release …")
    else:
        shown = [text for text in measured.told if "collective" in text]
        lines += [f"  {t.clean(text, 300)}" for text in shown]
        lines.append(f"no node looks bad ({t.span(result.seconds)})")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeDocument:
    ok: bool | None
    nodes: tuple[dict[str, Any], ...]
    silent: tuple[str, ...]
    bad: tuple[str, ...]
    cause: str | None
    confidence: str | None
    evidence: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    rounds: int
    groups: int
    bytes_per_s: float | None
    struck: tuple[str, ...]
    seconds: float
    problem: str


def probe_json(result: ProbeResult, struck: tuple[str, ...] = ()) -> str:
    """For programs: the keys stay as they are."""
    refused, measured, isolated = result.refused, result.measured, result.isolated
    nodes = tuple(
        {**asdict(report), "clock_ahead_s": round(result.ahead.get(report.rank, 0.0), 3)}
        for report in result.reports
    )
    return to_json(
        _ProbeDocument(
            ok=None if measured is None else measured.ok,
            nodes=nodes,
            silent=result.silent,
            bad=() if refused is None else refused.hosts,
            cause=None if refused is None else refused.cause.value,
            confidence=None if refused is None else refused.confidence.value,
            evidence=() if refused is None else tuple(each.text for each in refused.evidence),
            links=() if isolated is None else isolated.links,
            rounds=0 if isolated is None else isolated.rounds,
            groups=0 if isolated is None else isolated.groups,
            bytes_per_s=None if measured is None else measured.bytes_per_s,
            struck=struck,
            seconds=round(result.seconds, 3),
            problem=result.problem,
        )
    )
