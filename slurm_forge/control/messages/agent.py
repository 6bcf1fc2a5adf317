"""The words between the supervisor and the standing agent of each rank, one line each.

A channel of its own, beside the control channel: it lives as long as the job step, over all of its
launches, and has a nonce of its own.
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
    """First line of an agent, behind the handshake: whose it is."""

    m: Literal["agent"] = "agent"
    rank: Int
    world: Int
    host: str
    pid: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReady(Message):
    """What a rank needs is imported, which took ``seconds``.

    ``why_not`` says why this process can't be forked, and workers start from nothing; else empty.
    """

    m: Literal["ready"] = "ready"
    seconds: float
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker(Message):
    """Start the rank of a launch: its control channel, and when the launch was begun (epoch).

    ``nonce`` is that of the control channel, whose secret is that of this one.
    ``in_process``: a worker that has unwound may go on instead of a new one.  ``variables``
    (``NAME=value``) are what the agent's own environment lacks, ``without`` the names that it has
    too many.
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
    """The agent got a signal, which is recorded and nothing else."""

    m: Literal["noticed"] = "noticed"
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded(Message):
    """The worker of a launch is reaped, and so is everything that it had started.

    ``signal`` is ``"SIGSEGV"`` or empty, ``code`` the exit status otherwise.  ``ours``: the agent
    ended it.  ``memory`` is what the kernel counted, empty where it was not memory.  ``others``
    were killed behind it; ``left`` describes what could not be ended, and is empty as a rule.
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
    """Kill the worker of that launch, and all that it started, now."""

    m: Literal["end"] = "end"
    launch: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShutdown(Message):
    """Nothing follows: kill what is left and exit with 0."""

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
    """The message on a line; ``ControlChannelError`` when it is none of these."""
    return decode_by(_adapter(), line)
