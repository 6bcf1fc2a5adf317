"""What a rank's monitor reports about its worker, and what the hub requests from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slurm_forge.control.messages.message import (
    HEARTBEAT_WAITS_S,
    UNTIL_HEARTBEAT_S,
    Int,
    Message,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorHello(Message):
    """First line of a rank's monitor, which belongs to the launch but is no member of it."""

    m: Literal["attend"] = "attend"
    rank: Int
    world: Int
    host: str
    pid: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorHeartbeat(Message):
    """From a monitor, every second or two: where its worker is, in which phase, and since when.

    ``phase_no`` and ``poll`` are those of its position; ``kind`` selects the durations it is
    compared with.  ``since_s`` excludes time in which the monitor itself was stopped.  ``mute_s``:
    since any Python thread of the worker ran.  ``state`` is the kernel's letter.
    """

    columns: ClassVar[tuple[str, ...]] = ("since_s", "mute_s", "state")
    may_wait_s: ClassVar[float] = HEARTBEAT_WAITS_S

    m: Literal["pulse"] = "pulse"
    turn: Int
    step: Int
    begun: Int
    phase_no: Int
    poll: Int
    phase: str
    kind: str
    since_s: tuple[float, ...]
    mute_s: tuple[float, ...]
    state: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDuration(Message):
    """From a monitor: its worker spent this long in a stretch of this kind, then moved on."""

    may_wait_s: ClassVar[float] = UNTIL_HEARTBEAT_S

    m: Literal["lasted"] = "lasted"
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStacks(Message):
    """The hub asks all monitors for their workers' stacks, to be stored with that launch."""

    m: Literal["take_stacks"] = "take_stacks"
    id: Int
    attempt: Int
    launch: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReport(Message):
    """A monitor's result: the main thread's stack as ``text``, the whole dump in ``file``.

    ``how`` names its source; ``state`` is the kernel's letter for the process at that time.
    """

    m: Literal["stacks"] = "stacks"
    id: Int
    how: str
    state: str
    cpu_s: float
    file: str
    text: str
