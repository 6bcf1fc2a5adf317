"""One strike or release as a line of JSON, and back: facts, no files."""

from __future__ import annotations

import json
import math
from typing import Any

from slurm_forge.errors import ConfigError
from slurm_forge.recovery.nodes.statements import BY_HAND, MOST_WEIGHT, NodeRelease, Strike
from slurm_forge.slurm.text.nodelist import check_node_name
from slurm_forge.vocabulary.cause import Cause

Entry = Strike | NodeRelease

#: Longer lines are not ours.
_MOST_LINE = 8192
_VERSION = 1
_CAUSES = frozenset({BY_HAND, *(cause.value for cause in Cause)})
#: A clock may be ahead by this much; what claims to be later is not believed.
_AHEAD_S = 600.0
_LONGEST = {"run": 1024, "incident": 80, "by": 64, "why": 300}


def line_of(entry: Entry) -> bytes:
    """The line, with its newline; texts that are too long are cut."""
    body: dict[str, Any] = {
        "v": _VERSION,
        "kind": "strike" if isinstance(entry, Strike) else "release",
        "node": check_node_name(entry.node),
        "time": entry.time,
    }
    if isinstance(entry, Strike):
        body |= {"weight": entry.weight, "cause": entry.cause}
        body |= {"run": entry.run, "incident": entry.incident_id, "until": entry.until}
    body |= {"by": entry.by, "why": entry.why}
    for name, most in _LONGEST.items():
        if name in body:
            body[name] = _clean(body[name])[:most]
    fields = {name: value for name, value in body.items() if value not in ("", None)}
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def parse_line(line: bytes, now: float) -> Entry | None:
    """What the line says; None where that can't be believed."""
    try:
        body = json.loads(line.decode("utf-8"))
        if not isinstance(body, dict) or body.get("v") != _VERSION:
            return None
        node = check_node_name(_text(body, "node", 255))
        time = _number(body, "time")
        if not 0 < time <= now + _AHEAD_S:
            return None
        by, why = _text(body, "by"), _text(body, "why")
        if body.get("kind") == "release":
            return NodeRelease(node=node, time=time, by=by, why=why)
        if body.get("kind") != "strike":
            return None
        weight, cause = _number(body, "weight"), _text(body, "cause", 40)
        until = None if body.get("until") is None else _number(body, "until")
        if not 0 < weight <= MOST_WEIGHT or cause not in _CAUSES:
            return None
        return Strike(
            node=node,
            time=time,
            weight=weight,
            cause=cause,
            run=_text(body, "run"),
            incident_id=_text(body, "incident"),
            by=by,
            until=until if cause == BY_HAND else None,
            why=why,
        )
    except (ValueError, ConfigError, RecursionError, OverflowError):
        return None


def parse_lines(data: bytes, now: float) -> tuple[list[Entry], int]:
    """What the lines say, and how many say nothing."""
    entries: list[Entry] = []
    bad = 0
    for line in data.split(b"\n"):
        entry = parse_line(line, now) if 0 < len(line) <= _MOST_LINE else None
        if entry is not None:
            entries.append(entry)
        elif line.strip():
            bad += 1
    return entries, bad


def _text(body: dict[str, Any], name: str, most: int = 0) -> str:
    value = body.get(name, "")
    if not isinstance(value, str) or len(value) > (most or _LONGEST[name]):
        raise ValueError(f"{name} is not text, or too long")
    if not value.isprintable():
        raise ValueError(f"{name} can't be printed")
    return value


def _number(body: dict[str, Any], name: str) -> float:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is not finite")
    return float(value)


def _clean(text: str) -> str:
    one_line = " ".join(text.split())
    return "".join(each if each.isprintable() else "?" for each in one_line)
