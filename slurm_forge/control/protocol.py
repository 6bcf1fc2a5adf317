"""The messages on the control channel, one JSON object per line."""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from slurm_forge.control.link_words import Links, LookAtLinks, PortsSeen
from slurm_forge.control.message import Message
from slurm_forge.control.pace_words import Paced
from slurm_forge.control.probe_words import ProbeArrived, ProbeBroke, ProbeDone
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


class RequestKind(str, Enum):
    """What all ranks are asked to do at the same step."""

    STOP = "stop"
    SAVE = "save"
    PROBE = "probe"
    #: An instability that rank 0 has judged: its cause and text in ``reason``.
    RECOVER = "recover"
    #: A limit on the gradient norm, a number in ``reason``: updates above it are left out.
    LIMIT = "limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First line of a rank: who it is, and that it belongs to this launch (the nonce)."""

    tag: ClassVar[str] = "hello"
    nonce: str
    rank: int
    world: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The hub's answer: it knows the nonce too."""

    tag: ClassVar[str] = "welcome"
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Message):
    """Every second: steps done, phase, and for how long the main thread has been there.

    ``begun`` counts steps that were begun, too: one more than ``step`` inside of one.  ``turn``
    counts rollbacks: the steps come again in each.
    """

    tag: ClassVar[str] = "beat"
    turn: int
    step: int
    begun: int
    phase: str
    since_s: float
    started: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """A rank saw something (a signal); what it meant is decided later, from evidence."""

    tag: ClassVar[str] = "notice"
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Message):
    """The hub asks all ranks for something, at a step yet to be agreed.

    ``round`` counts how often it was asked anew.
    """

    tag: ClassVar[str] = "request"
    id: int
    kind: RequestKind
    reason: str
    round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class At(Message):
    """A rank's answer: the last position it passed, or the one it is ``waiting`` in front of.

    ``path`` names the phases since the step boundary.  A ``round`` one above that of the request
    asks the hub to ask everybody anew.
    """

    tag: ClassVar[str] = "at"
    id: int
    round: int
    position: Position
    path: str
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Message):
    """The agreed position: every rank acts at the first position not before it."""

    tag: ClassVar[str] = "target"
    id: int
    round: int
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn(Message):
    """The hub gives a request up that found no target in time: nobody waits for one any more."""

    tag: ClassVar[str] = "withdrawn"
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Message):
    """A value for everybody (the rendezvous of the process group); the hub passes it on."""

    tag: ClassVar[str] = "publish"
    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft(Message):
    """The hub knows how long the ranks have until they are ended, counted from now."""

    tag: ClassVar[str] = "time_left"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """Rank 0: a checkpoint is on disk, and what it cost."""

    tag: ClassVar[str] = "committed"
    step: int
    seconds: float
    blocked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCommitted(Message):
    """Rank 0: a save came to nothing; training goes on."""

    tag: ClassVar[str] = "not_committed"
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Message):
    """This rank stopped, as all did, after ``step`` steps; ``checkpoint`` is what was committed."""

    tag: ClassVar[str] = "stopped"
    step: int
    checkpoint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Through(Message):
    """The program of this rank has returned after ``step`` steps; the end is still to be agreed."""

    tag: ClassVar[str] = "through"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Message):
    """The program reached its end and the last checkpoint is committed."""

    tag: ClassVar[str] = "finished"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """Last words of a rank: what was raised, where.  It issues no collective any more."""

    tag: ClassVar[str] = "failed"
    step: int
    phase: str
    error: str
    text: str
    trace: str
    cause: str
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover(Message):
    """The run can't cure this in the process; the launch is to be ended and decided on.

    ``decided`` is the id of the incident where rank 0 has written the decision down already.
    """

    tag: ClassVar[str] = "recover"
    cause: str
    step: int
    text: str
    decided: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose(Message):
    """Rank 0: all ranks are to be asked for this, at a step that they agree on."""

    tag: ClassVar[str] = "propose"
    kind: RequestKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cured(Message):
    """Rank 0: an incident was dealt with in the process; ``text`` is one line for people.

    Training goes on after ``step`` steps, which may be fewer than before.
    """

    tag: ClassVar[str] = "cured"
    step: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(Message):
    """This rank left out the update of ``step`` because its gradient norm was above the limit.

    All ranks say it, or they have parted.
    """

    tag: ClassVar[str] = "left_out"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(Message):
    """First line of a rank's witness, which belongs to the launch and is no member of it."""

    tag: ClassVar[str] = "attend"
    nonce: str
    rank: int
    world: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse(Message):
    """A witness, every second: where its worker is, in what, and since when.

    ``phase_no`` and ``poll`` are those of its position, ``kind`` is what its durations are compared
    with.  ``since_s`` leaves out the time that the witness was stopped itself.  ``mute_s``: since
    any Python thread of the worker ran.  ``state`` is the kernel's letter, ``cpu_s`` what it used.
    """

    tag: ClassVar[str] = "pulse"
    turn: int
    step: int
    begun: int
    phase_no: int
    poll: int
    phase: str
    kind: str
    since_s: float
    mute_s: float
    state: str
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasted(Message):
    """A witness: its worker was in a stretch of this kind for so long, and went on."""

    tag: ClassVar[str] = "lasted"
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStacks(Message):
    """The hub asks all witnesses for their workers' stacks, to be kept with that launch."""

    tag: ClassVar[str] = "take_stacks"
    id: int
    attempt: int
    launch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks(Message):
    """What a witness has found: the main thread's stack as ``text``, the whole in ``file``.

    ``how`` is where it comes from; ``state`` the kernel's letter for the process then.
    """

    tag: ClassVar[str] = "stacks"
    id: int
    how: str
    state: str
    cpu_s: float
    file: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """The launch is over: every rank leaves at once, without another collective."""

    tag: ClassVar[str] = "abort"
    reason: str


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
