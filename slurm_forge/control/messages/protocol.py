"""The lines of the control channel: its messages, one JSON object per line."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from slurm_forge.control.messages.hub import (
    Abort,
    Publish,
    Request,
    RequestTarget,
    RequestWithdrawn,
    TimeLeft,
)
from slurm_forge.control.messages.links import LinkReport, PortReport, QueryLinks
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import (
    MonitorHeartbeat,
    MonitorHello,
    PhaseDuration,
    StackReport,
    TakeStacks,
)
from slurm_forge.control.messages.preflight import PreflightReport, PreflightTried
from slurm_forge.control.messages.probe import ProbeArrived, ProbeBroke, ProbeDone
from slurm_forge.control.messages.rank import (
    FunctionReturned,
    Heartbeat,
    Hello,
    Notice,
    PositionReport,
    RankFailed,
    RankFinished,
    RankStopped,
    RecoveryNeeded,
    RequestProposal,
    RolledBack,
    SaveCommitted,
    SaveFailed,
    UpdateSkipped,
)
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.control.session import LINE_LIMIT
from slurm_forge.errors import ControlChannelError
from slurm_forge.json_codec import dumps

#: Texts that may be cut at the beginning so that a line fits, and the length that is kept.
_CUT = ("trace", "text", "reason")
_KEPT = 12_000

_T = TypeVar("_T")

ControlMessage = Annotated[
    Hello
    | Heartbeat
    | Notice
    | Request
    | PositionReport
    | RequestTarget
    | RequestWithdrawn
    | Publish
    | TimeLeft
    | SaveCommitted
    | SaveFailed
    | RankStopped
    | FunctionReturned
    | RankFinished
    | RankFailed
    | RecoveryNeeded
    | RequestProposal
    | RolledBack
    | UpdateSkipped
    | ProbeArrived
    | ProbeBroke
    | ProbeDone
    | StepTiming
    | PreflightReport
    | PreflightTried
    | MonitorHello
    | MonitorHeartbeat
    | PhaseDuration
    | TakeStacks
    | StackReport
    | QueryLinks
    | LinkReport
    | PortReport
    | Abort,
    Field(discriminator="m"),
]


def encode(message: Message) -> bytes:
    """One line, newline included; long texts are cut at the beginning so that the line fits.

    Raises:
        ValueError: It is too long and can't be cut (a published value).
    """
    body: dict[str, Any] = {each.name: getattr(message, each.name) for each in fields(message)}
    most = _KEPT
    while True:
        for key in _CUT:
            if isinstance(body.get(key), str):
                body[key] = body[key][-most:]
        line = dumps(body) + b"\n"
        if len(line) <= LINE_LIMIT:
            return line
        if most < 64:
            raise ValueError(f"message of {len(line)} bytes")
        most //= 2  # escapes lengthen a text up to six times


@cache
def _adapter() -> TypeAdapter[Message]:
    return TypeAdapter(ControlMessage)


def decode(line: bytes) -> Message:
    """One member's message on the control channel; ``ControlChannelError`` for any other line."""
    return decode_text(line, 1)


def decode_text(text: bytes, members: int) -> Message:
    """Decode a message that this many members send together.

    Raises:
        ControlChannelError: It is no message, or its columns have another number of members.
    """
    message = decode_by(_adapter(), text)
    if any(len(column) != members for column in message.values):
        raise unreadable(f"it is not what {members} members say ({type(message).__name__})")
    return message


def decode_by(adapter: TypeAdapter[_T], line: bytes) -> _T:
    """The value on a line.

    Args:
        adapter: For the type of the value: the union of a channel's messages.
        line: With or without its newline.

    Raises:
        ControlChannelError: The line holds no such value.
    """
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        what = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, what["loc"]))[:100]
        raise unreadable(f"{what['msg'][:100]} ({where})") from error


def unreadable(why: str) -> ControlChannelError:
    """The error for a line that no process of this version sends."""
    return ControlChannelError(
        f"a line on the control channel can't be read: {why}",
        next_step="Are all ranks running the same version of slurm_forge?",
    )
