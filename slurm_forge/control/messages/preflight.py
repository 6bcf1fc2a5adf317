"""What ranks and the hub say to each other before training begins, to see whether nodes are fit.

A rank looks at its node and says what it found (``PreflightReport``).  Where all have, the hub
publishes under ``round_key`` which ranks are to try a collective together (``Groups``), again and
again until it knows enough; each of them says how that went (``PreflightTried``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ClassVar

from slurm_forge.control.messages.message import Message
from slurm_forge.errors import ControlChannelError

__all__ = [
    "Check",
    "Groups",
    "NodeReport",
    "PreflightReport",
    "PreflightTried",
    "Thoroughness",
    "Verdict",
    "round_key",
    "store_key",
]


class Thoroughness(str, Enum):
    """How much is looked at: nothing, what costs nothing, or everything and together."""

    OFF = "off"
    CHEAP = "cheap"
    FULL = "full"


class Verdict(str, Enum):
    """What a check came to.  ``odd`` is told and nothing is done about it."""

    FINE = "fine"
    ODD = "odd"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at; ``text`` says what was seen, in a few words."""

    name: str
    verdict: Verdict
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a rank found on its node.

    ``device`` is what it computes on (``cuda`` or ``cpu``), ``full`` whether it will take part in
    collectives, too; ``sent`` its clock when it said so, in
    seconds since the epoch, ``seconds`` how long it took to look.
    """

    rank: int
    host: str
    local_rank: int = 0
    device: str = "cpu"
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
        return json.dumps(body)

    @classmethod
    def from_text(cls, text: str) -> NodeReport:
        """Read what ``to_text`` wrote; ``ControlChannelError`` for anything else."""
        try:
            body: dict[str, Any] = json.loads(text)
            checks = tuple(
                Check(
                    name=str(each["name"]),
                    verdict=Verdict(each["verdict"]),
                    text=str(each["text"]),
                    seconds=float(each["seconds"]),
                )
                for each in body.pop("checks")
            )
            return cls(
                rank=int(body["rank"]),
                host=str(body["host"]),
                local_rank=int(body["local_rank"]),
                device=str(body["device"]),
                python=str(body["python"]),
                torch=str(body["torch"]),
                full=bool(body["full"]),
                sent=float(body["sent"]),
                seconds=float(body["seconds"]),
                checks=checks,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ControlChannelError(
                f"what a rank says of its node can't be read: {error!r}",
                next_step="Are all ranks running the same version of slurm_forge?",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport(Message):
    """A rank has looked at its node: ``body`` is a ``NodeReport`` as text."""

    tag: ClassVar[str] = "preflight_report"
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightTried(Message):
    """How a rank's collective of that round went.

    ``bytes_per_s`` is the bus bandwidth of a large all-reduce, 0 where it was not measured.
    """

    tag: ClassVar[str] = "preflight_tried"
    round: int
    ok: bool
    seconds: float
    bytes_per_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """What the hub has the ranks do in a round: these groups of them try a collective each.

    None at all: the preflight is over, and training begins.  ``within_s`` is how long a group may
    take, ``backend`` is ``gloo`` or ``nccl``.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    within_s: float = 0.0
    backend: str = "gloo"

    def to_text(self) -> str:
        """JSON, as short as can be: it names every rank."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Groups:
        """Read what ``to_text`` wrote."""
        body = json.loads(text)
        return cls(
            groups=tuple(tuple(int(rank) for rank in group) for group in body["groups"]),
            within_s=float(body["within_s"]),
            backend=str(body["backend"]),
        )


def round_key(number: int) -> str:
    """Under which the hub publishes what is done in that round, counted from 1."""
    return f"preflight/{number}"


def store_key(number: int, group: int) -> str:
    """Under which the first rank of a group publishes where the others find it."""
    return f"preflight/{number}/{group}"
