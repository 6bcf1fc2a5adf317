"""What ``doctor --live`` prints: who saw which signal, what follows from it, or one document."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from slurm_forge.recovery.live_findings import LiveFinding, Mark
from slurm_forge.recovery.live_observations import (
    Fate,
    JobSeen,
    LiveSeen,
    Receiver,
    RoundKind,
    Sighting,
)
from slurm_forge.recovery.policy.prediction import Prediction
from slurm_forge.report import text as t
from slurm_forge.report.encoding import to_json

#: Fields of a prediction that are durations.
_SPANS = ("notice", "kill_wait", "delay", "exempt", "lead")
_COLUMNS = {
    RoundKind.WARNING: "Slurm's warning",
    RoundKind.STEPS_USER: "USR2, steps",
    RoundKind.STEPS_TERM: "TERM, steps",
    RoundKind.BATCH_USER: "USR2, batch",
}


def live_text(observed: LiveSeen, results: tuple[LiveFinding, ...]) -> str:
    """For people."""
    partition, qos = t.clean(observed.partition or "?", 64), t.clean(observed.qos or "?", 64)
    where = f"job {observed.job} in partition {partition}, QOS {qos}"
    report = observed.report
    lines = []
    if report is not None:
        lines = [f"{where}, on {t.nodes(_hosts(report))}", "", *_table(report), ""]
        lines += [f"  {t.clean(report.torch_left_out, 200)}", ""] if report.torch_left_out else []
        for each in results:
            lines.append(f"{each.mark.value:<8} {each.about:<8} {t.clean(each.text, 400)}")
            lines += [f"{'':<17} {t.clean(each.advice, 400)}"] if each.advice else []
    if observed.problem:
        lines.append(f"{where}: {t.clean(observed.problem, 1000)}")
    if observed.folder:
        lines.append(f"kept: {observed.folder}")
    return "\n".join(lines) + "\n"


def _table(report: JobSeen) -> list[str]:
    """A row for each receiver on each host, a column for each signal."""
    rounds = [each for each in report.rounds if each.sightings]
    rows: list[tuple[str, ...]] = [("", *(_COLUMNS[each.kind] for each in rounds))]
    hosts = {s.host for each in rounds for s in each.sightings}
    for way in Receiver:
        for host in sorted({s.host for each in rounds for s in each.of(way)}):
            cells = []
            for each in rounds:
                sightings = [s for s in each.of(way) if s.host == host]
                cells.append(_cell(sightings[0], each.before_end_s) if sightings else "")
            name = f"{way.value} on {host}" if len(hosts) > 1 else way.value
            rows.append((name, *cells))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(f"{c:<{w}}" for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _cell(sighting: Sighting, before_end_s: float | None) -> str:
    after = "" if sighting.after_s is None else f" {sighting.after_s:.2f} s"
    match sighting.fate:
        case Fate.HEARD:
            if before_end_s is not None:
                return f"heard {before_end_s:.0f} s before"
            return f"heard{after}"
        case Fate.DIED:
            return f"died{after}"
        case Fate.CARRIED_OFF:
            return f"ended{after}"
        case Fate.ABSENT:
            return "not there"
    return "-"


def _hosts(report: JobSeen) -> tuple[str, ...]:
    return tuple(dict.fromkeys((report.host, *(node.host for node in report.nodes))))


def live_json(
    observed: LiveSeen, results: tuple[LiveFinding, ...], prediction: Prediction | None
) -> str:
    """For programs: the keys stay as they are."""
    fine = None
    if observed.report is not None:
        fine = not observed.problem and all(each.mark is not Mark.PROBLEM for each in results)
    return to_json(
        {
            "ok": fine,
            "seen": observed,
            "prediction": None if prediction is None else _in_seconds(prediction),
            "findings": results,
        }
    )


def _in_seconds(prediction: Prediction) -> dict[str, Any]:
    """Durations under names that end in ``_s``."""
    values: dict[str, Any] = {}
    for each in fields(prediction):
        value = getattr(prediction, each.name)
        if each.name in _SPANS:
            values[f"{each.name}_s"] = None if value is None else value.total_seconds()
        else:
            values[each.name] = value
    return values
