"""What ranks and the hub exchange before training begins, to see whether nodes are fit.

A rank checks its node and reports (``PreflightReport``).  When all have, the hub publishes under
``round_key`` which ranks are to try a collective together (``PreflightRound``), again and again
until it knows enough; each of them reports how that went (``PreflightTried``).
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
    """How much is looked at: nothing, what costs nothing, or everything and together."""

    OFF = "off"
    CHEAP = "cheap"
    FULL = "full"


class CheckVerdict(str, Enum):
    """What a check came to.  ``odd`` is told and nothing is done about it."""

    FINE = "fine"
    ODD = "odd"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at; ``text`` says what was seen, in a few words."""

    name: str
    verdict: CheckVerdict
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a rank found on its node.

    ``device`` is the type of device that it computes on (``cpu``, ``cuda``, ``xpu``), ``backend``
    what carries collectives there; ``full`` whether it will take part in collectives, too; ``sent``
    its clock when it said so, in seconds since the epoch, ``seconds`` how long it took to look.
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
        """JSON; long texts of checks lose their ends so that it fits on a line of the channel."""
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
    """A rank has looked at its node: ``body`` is a ``NodeReport`` as text."""

    m: Literal["preflight_report"] = "preflight_report"
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightTried(Message):
    """How a rank's collective of that round went.

    ``bytes_per_s`` is the bus bandwidth of a large all-reduce, 0 where it was not measured.
    """

    m: Literal["preflight_tried"] = "preflight_tried"
    round: Int
    ok: bool
    seconds: float
    bytes_per_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRound:
    """What the hub has the ranks do in a round: these groups of them try a collective each.

    None at all: the preflight is over, and training begins.  ``within_s`` is how long a group may
    take, ``backend`` is ``gloo`` or ``nccl``.
    """

    groups: tuple[tuple[Int, ...], ...] = ()
    within_s: float = 0.0
    backend: str = "gloo"

    def to_text(self) -> str:
        """JSON, as short as can be: it names every rank."""
        return json.dumps(asdict(self), separators=(",", ":"))


def round_key(number: int) -> str:
    """Under which the hub publishes what is done in that round, counted from 1."""
    return f"preflight/{number}"


def store_key(number: int, group: int) -> str:
    """Under which the first rank of a group publishes where the others find it."""
    return f"preflight/{number}/{group}"
