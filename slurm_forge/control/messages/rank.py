"""What a rank tells the hub: who and where it is, what became of saves, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.vocabulary.position import Position

__all__ = [
    "At",
    "Beat",
    "Committed",
    "Cured",
    "Failed",
    "Finished",
    "Hello",
    "LeftOut",
    "NotCommitted",
    "Notice",
    "Propose",
    "Recover",
    "Stopped",
    "Through",
]


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
