"""The words between the supervisor and the standing agent of each rank, one line each.

A channel of its own, beside the control channel: it lives as long as the job step, over all of its
launches, and has a nonce of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurm_forge.control.messages.protocol import (
    Message,
    decode,
)

__all__ = [
    "AgentHello",
    "AgentWelcome",
    "Begin",
    "Begun",
    "End",
    "Ended",
    "Leave",
    "Noticed",
    "Ready",
    "decode_agents",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello(Message):
    """First line of an agent: whose it is, and that it belongs to this step (the nonce)."""

    tag: ClassVar[str] = "agent"
    nonce: str
    rank: int
    world: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWelcome(Message):
    """The supervisor's answer: it knows the nonce too."""

    tag: ClassVar[str] = "welcome_agent"
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """What a rank needs is imported, which took ``seconds``.

    ``why_not`` says why this process can't be forked, and workers start from nothing; else empty.
    """

    tag: ClassVar[str] = "ready"
    seconds: float
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Message):
    """Start the rank of a launch: its control channel, and when the launch was begun (epoch).

    ``in_process``: a worker that has unwound may go on instead of a new one.  ``variables``
    (``NAME=value``) are what the agent's own environment lacks, ``without`` the names that it has
    too many.
    """

    tag: ClassVar[str] = "begin"
    attempt: int
    launch: int
    channel: str
    nonce: str
    started: float
    in_process: bool
    variables: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Message):
    """The rank of the launch runs as ``pid``; ``how`` is a word of ``Start``."""

    tag: ClassVar[str] = "begun"
    launch: int
    pid: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(Message):
    """The agent got a signal, which is recorded and nothing else."""

    tag: ClassVar[str] = "noticed"
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Message):
    """The worker of a launch is reaped, and so is everything that it had started.

    ``signal`` is ``"SIGSEGV"`` or empty, ``code`` the exit status otherwise.  ``ours``: the agent
    ended it.  ``memory`` is what the kernel counted, empty where it was not memory.  ``others``
    were killed behind it; ``left`` describes what could not be ended, and is empty as a rule.
    ``parked``: the process lives on, unwound, and waits for the next launch.
    """

    tag: ClassVar[str] = "ended"
    launch: int
    pid: int
    signal: str
    code: int
    ours: bool
    memory: str
    others: int
    left: str
    parked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Message):
    """Kill the worker of that launch, and all that it started, now."""

    tag: ClassVar[str] = "end"
    launch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Message):
    """Nothing follows: kill what is left and exit with 0."""

    tag: ClassVar[str] = "leave"


_KINDS: tuple[type[Message], ...] = (
    AgentHello,
    AgentWelcome,
    Ready,
    Begin,
    Begun,
    Noticed,
    Ended,
    End,
    Leave,
)


def decode_agents(line: bytes) -> Message:
    """The message on a line; ``ControlChannelError`` when it is none of these."""
    return decode(line, _KINDS)
