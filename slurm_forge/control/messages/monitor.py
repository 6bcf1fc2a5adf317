"""What a rank's witness says of its worker, and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurm_forge.control.messages.message import Message

__all__ = [
    "Attend",
    "Lasted",
    "Pulse",
    "Stacks",
    "TakeStacks",
]


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
