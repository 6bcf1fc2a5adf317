"""What ranks and the hub exchange before training begins, to check that nodes are fit.

A rank checks its node and reports (``PreflightReport``).  When all have, the hub publishes under
``round_key`` which ranks are to try a collective together (``PreflightRound``), repeatedly until
it knows enough; each of them reports the outcome (``PreflightTried``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Literal

from slurm_forge.control.messages.message import Int, Message
from slurm_forge.errors import ControlChannelError
from slurm_forge.json_codec import dumps, parse


class Thoroughness(str, Enum):
    """How much is checked: nothing, what costs nothing, or everything including collectives."""

    OFF = "off"
    CHEAP = "cheap"
    FULL = "full"


class CheckVerdict(str, Enum):
    """The outcome of a check.  ``odd`` is reported and has no consequence."""

    FINE = "fine"
    ODD = "odd"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check; ``text`` describes the observation in a few words."""

    name: str
    verdict: CheckVerdict
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a rank found on its node.

    ``device`` is the type of device that it computes on (``cpu``, ``cuda``, ``xpu``), ``backend``
    the backend of collectives there; ``full`` whether it will take part in collectives, too;
    ``sent`` its clock at that moment, in seconds since the epoch, ``seconds`` the duration.
    """

    rank: Int
    host: str
    local_rank: Int = 0
    device: str = "cpu"
    backend: str = "gloo"
    python: str = ""
    torch: str = ""
    full: bool = False
    sent: float = 0.0
    seconds: float = 0.0
    checks: tuple[Check, ...] = field(default=())

    def to_text(self) -> str:
        """JSON; long texts of checks lose their ends so that it fits into a line of the channel."""
        body = asdict(self)
        for check in body["checks"]:
            check["text"] = check["text"][:400]
        return dumps(body).decode()

    @classmethod
    def from_text(cls, text: str) -> NodeReport:
        """Read what ``to_text`` wrote; ``ControlChannelError`` for anything else."""
        try:
            return parse(cls, text)
        except ValueError as error:
            raise ControlChannelError(
                f"a rank's report about its node can't be read: {error}",
                next_step="Are all ranks running the same version of slurm_forge?",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport(Message):
    """A rank has checked its node: ``body`` is a ``NodeReport`` as text."""

    m: Literal["preflight_report"] = "preflight_report"
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightTried(Message):
    """The outcome of a rank's collective in that round.

    ``bytes_per_s`` is the bus bandwidth of a large all-reduce, 0 if not measured.
    """

    m: Literal["preflight_tried"] = "preflight_tried"
    round: Int
    ok: bool
    seconds: float
    bytes_per_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRound:
    """A round of the preflight: each of these groups of ranks tries a collective.

    No groups at all: the preflight is over, and training begins.  ``within_s`` is how long a group
    may take, ``backend`` is ``gloo`` or ``nccl``.
    """

    groups: tuple[tuple[Int, ...], ...] = ()
    within_s: float = 0.0
    backend: str = "gloo"

    def to_text(self) -> str:
        """JSON, as short as possible: it names every rank."""
        return json.dumps(asdict(self), separators=(",", ":"))


def round_key(number: int) -> str:
    """The key under which the hub publishes that round, counted from 1."""
    return f"preflight/{number}"


def store_key(number: int, group: int) -> str:
    """The key under which the first rank of a group publishes its store's address."""
    return f"preflight/{number}/{group}"
