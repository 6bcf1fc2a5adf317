"""The messages between the supervisor and the standing agent of each rank, one line each.

They use a channel beside the control channel, which lives as long as the job step, across all of
its launches, and has a nonce of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from slurm_forge.control.messages.message import Int, Message
from slurm_forge.control.messages.protocol import decode_by


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello(Message):
    """First line of an agent after the handshake: which rank it serves."""

    m: Literal["agent"] = "agent"
    rank: Int
    world: Int
    host: str
    pid: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReady(Message):
    """The rank's imports are done and took ``seconds``.

    ``why_not`` says why this process can't be forked, so that workers start from scratch; else
    it is empty.
    """

    m: Literal["ready"] = "ready"
    seconds: float
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker(Message):
    """Start the rank of a launch: its control channel, and when the launch began (epoch).

    ``nonce`` is that of the control channel, which shares this channel's secret.
    ``in_process``: an unwound worker may continue instead of a new one.  ``variables``
    (``NAME=value``) are missing in the agent's own environment; the names in ``without`` are to be
    removed from it.
    """

    m: Literal["begin"] = "begin"
    attempt: Int
    launch: Int
    channel: str
    nonce: str
    started: float
    in_process: bool
    variables: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Message):
    """The rank of the launch runs as ``pid``; ``how`` is a word of ``Start``."""

    m: Literal["begun"] = "begun"
    launch: Int
    pid: Int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNotice(Message):
    """The agent got a signal; it is recorded, and nothing else happens."""

    m: Literal["noticed"] = "noticed"
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded(Message):
    """The worker of a launch was reaped, and so was everything that it had started.

    ``signal`` is ``"SIGSEGV"`` or empty, ``code`` the exit status otherwise.  ``ours``: the agent
    ended it.  ``memory`` is the kernel's account, empty if memory was not the cause.  ``others``
    were killed after it; ``left`` describes what could not be ended, and is usually empty.
    ``parked``: the process lives on, unwound, and waits for the next launch.
    """

    m: Literal["ended"] = "ended"
    launch: Int
    pid: Int
    signal: str
    code: Int
    ours: bool
    memory: str
    others: Int
    left: str
    parked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker(Message):
    """Kill the worker of this launch, and everything that it started, now."""

    m: Literal["end"] = "end"
    launch: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShutdown(Message):
    """No launch follows: kill what is still running and exit with 0."""

    m: Literal["leave"] = "leave"


AgentMessage = Annotated[
    AgentHello
    | AgentReady
    | StartWorker
    | WorkerStarted
    | AgentNotice
    | WorkerEnded
    | KillWorker
    | AgentShutdown,
    Field(discriminator="m"),
]


@cache
def _adapter() -> TypeAdapter[Message]:
    return TypeAdapter(AgentMessage)


def decode_agents(line: bytes) -> Message:
    """Decode a line of this channel; ``ControlChannelError`` for any other."""
    return decode_by(_adapter(), line)
