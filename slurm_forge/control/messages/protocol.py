"""The control channel's lines: which messages there are, one JSON object per line.

What they say stands in the words of each side: ``hub_words``, ``rank_words``, ``witness_words``,
``probe_words``.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from slurm_forge.control.messages.hub import (
    Abort,
    Publish,
    Request,
    RequestKind,
    Target,
    TimeLeft,
    Welcome,
    Withdrawn,
)
from slurm_forge.control.messages.links import (
    Links,
    LookAtLinks,
    PortsSeen,
)
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import (
    Attend,
    Lasted,
    Pulse,
    Stacks,
    TakeStacks,
)
from slurm_forge.control.messages.preflight import (
    PreflightReport,
    PreflightTried,
)
from slurm_forge.control.messages.probe import (
    ProbeArrived,
    ProbeBroke,
    ProbeDone,
)
from slurm_forge.control.messages.rank import (
    At,
    Beat,
    Committed,
    Cured,
    Failed,
    Finished,
    Hello,
    LeftOut,
    NotCommitted,
    Notice,
    Propose,
    Recover,
    Stopped,
    Through,
)
from slurm_forge.control.messages.step_timing import Paced
from slurm_forge.errors import ControlChannelError
from slurm_forge.vocabulary.position import Position

__all__ = [
    "LINE_LIMIT",
    "Abort",
    "At",
    "Attend",
    "Beat",
    "Committed",
    "Cured",
    "Failed",
    "Finished",
    "Hello",
    "Lasted",
    "LeftOut",
    "Links",
    "LookAtLinks",
    "Message",
    "NotCommitted",
    "Notice",
    "Paced",
    "PortsSeen",
    "PreflightReport",
    "PreflightTried",
    "ProbeArrived",
    "ProbeBroke",
    "ProbeDone",
    "Propose",
    "Publish",
    "Pulse",
    "Recover",
    "Request",
    "RequestKind",
    "Stacks",
    "Stopped",
    "TakeStacks",
    "Target",
    "Through",
    "TimeLeft",
    "Welcome",
    "Withdrawn",
    "decode",
    "encode",
    "same_nonce",
]

#: Last words carry a traceback; anything longer is not ours.
LINE_LIMIT = 1 << 16
#: Texts that may lose their beginning so that a line fits, and how much of one is kept at most.
_CUT = ("trace", "text", "reason")
_KEPT = 12_000

_KINDS: tuple[type[Message], ...] = (
    Hello,
    Welcome,
    Beat,
    Notice,
    Request,
    At,
    Target,
    Withdrawn,
    Publish,
    TimeLeft,
    Committed,
    NotCommitted,
    Stopped,
    Through,
    Finished,
    Failed,
    Recover,
    Propose,
    Cured,
    LeftOut,
    ProbeArrived,
    ProbeBroke,
    ProbeDone,
    Paced,
    PreflightReport,
    PreflightTried,
    Attend,
    Pulse,
    Lasted,
    TakeStacks,
    Stacks,
    LookAtLinks,
    Links,
    PortsSeen,
    Abort,
)


def encode(message: Message) -> bytes:
    """One line, newline included; long texts lose their beginning so that a line always fits.

    ``ValueError`` for what is too long and can't be cut (a published value).
    """
    body: dict[str, Any] = {"m": message.tag, **asdict(message)}
    kept = _KEPT
    while True:
        for key in _CUT:
            if isinstance(body.get(key), str):
                body[key] = body[key][-kept:]
        line = json.dumps(body).encode() + b"\n"
        if len(line) <= LINE_LIMIT:
            return line
        if kept < 64:
            raise ValueError(f"message of {len(line)} bytes")
        kept //= 2  # escapes make a text up to six times as long


def decode(line: bytes, kinds: Sequence[type[Message]] = _KINDS) -> Message:
    """The message on a line; ``ControlChannelError`` when it is none of ``kinds``."""
    try:
        body = json.loads(line)
        tag = body.pop("m")
        kind = next(kind for kind in kinds if kind.tag == tag)
        known = {f.name: f for f in fields(kind)}
        if set(body) != set(known):
            raise ValueError(f"fields of {tag}: {sorted(body)}")
        for name, value in body.items():
            body[name] = _value(str(known[name].type), value)
        return kind(**body)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        StopIteration,
        OverflowError,
        RecursionError,
    ) as error:
        raise ControlChannelError(
            f"a line on the control channel can't be read: {error!r}",
            next_step="Are all ranks running the same version of slurm_forge?",
        ) from error


def same_nonce(given: str, expected: str) -> bool:
    """Compare in constant time whatever characters a stranger has sent."""
    return hmac.compare_digest(
        given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass")
    )


def _value(annotation: str, value: object) -> object:
    match annotation:
        case "Position":
            if not isinstance(value, list) or len(value) != len(Position._fields):
                raise TypeError("position")
            return Position(*(_integer(part) for part in value))
        case "RequestKind":
            return RequestKind(value)
        case "int":
            return _integer(value)
        case "tuple[int, ...]":
            if not isinstance(value, list):
                raise TypeError("list of int")
            return tuple(_integer(part) for part in value)
        case "tuple[str, ...]":
            if not isinstance(value, list) or not all(type(part) is str for part in value):
                raise TypeError("list of str")
            return tuple(value)
        case "float":
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise TypeError("float")
            return float(value)
        case "str | None":
            if value is not None and not isinstance(value, str):
                raise TypeError("str or None")
            return value
        case _:
            expected = {"str": str, "bool": bool}[annotation]
            if type(value) is not expected:
                raise TypeError(annotation)
            return value


def _integer(value: object) -> int:
    # Beyond 64 bits no count of ours goes, and Python refuses to print very long ones.
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError("int")
    return value
