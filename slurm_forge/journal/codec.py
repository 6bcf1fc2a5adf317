"""Events to one line of JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache

from pydantic import TypeAdapter, ValidationError

from slurm_forge.journal.events import Event

#: Version of the line format.  Readers skip lines of a kind they do not know.
FORMAT = 1
#: One event is small; a longer line is damage, or somebody filling the disk.
LINE_LIMIT = 1 << 18
#: The launch of an event that belongs to none, such as what a person asked for: it comes after
#: every launch of its attempt.
NO_LAUNCH = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event and its place: the attempt and launch that it belongs to, its writer, and its order.

    ``logical_time`` (Lamport) is greater than that of whatever its writer had written or read
    before; 0 in lines of older versions.  ``time`` is the writer's clock, for people.
    """

    attempt: int
    launch: int
    sequence: int
    time: float
    writer: str
    event: Event
    logical_time: int = 0


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Event]:
    return TypeAdapter(Event)


def encode(record: Record) -> bytes:
    """One line, newline included."""
    body = {
        "v": FORMAT,
        "attempt": record.attempt,
        "launch": record.launch,
        "seq": record.sequence,
        "time": record.time,
        "logical_time": record.logical_time,
        "event": _adapter().dump_python(record.event, mode="json"),
    }
    return json.dumps(body, separators=(",", ":"), allow_nan=True).encode() + b"\n"


def decode(line: bytes, writer: str) -> Record | None:
    """The record on a line; None for a kind from a newer version; ``ValueError`` for damage."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"line of {len(line)} bytes")
    try:
        body = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(body, dict) or not isinstance(body.get("event"), dict):
        raise ValueError("not an event")
    try:
        event = _adapter().validate_python(body["event"])
    except ValidationError as error:
        if any(e["type"] == "union_tag_invalid" for e in error.errors()):
            return None
        raise ValueError(str(error)) from error
    try:
        record = Record(
            attempt=int(body["attempt"]),
            launch=int(body["launch"]),
            sequence=int(body["seq"]),
            time=float(body["time"]),
            writer=writer,
            event=event,
            logical_time=int(body.get("logical_time", 0)),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"field missing: {error}") from error
    if not math.isfinite(record.time):
        raise ValueError("a time that can't be ordered")
    return record
