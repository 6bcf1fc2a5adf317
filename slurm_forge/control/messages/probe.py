"""What ranks report about a collective probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slurm_forge.control.messages.message import Int, Message

#: The reason in a request for a probe that also measures bandwidth.
BANDWIDTH = "bandwidth"
#: The reason in a request to abandon the probe under way, which hangs, and all further ones.
ABANDON = "abandon"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeArrived(Message):
    """A rank has issued its part of probe ``id``; ``gpu``: a hung probe occupies its device."""

    m: Literal["probe_arrived"] = "probe_arrived"
    id: Int
    gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeDone(Message):
    """A rank's part of probe ``id`` is complete, ``latency_s`` after it was issued.

    ``wrong`` names the ranks whose values arrived changed.  ``bandwidth`` is the bus bandwidth in
    bytes per second, 0 if not measured.
    """

    columns: ClassVar[tuple[str, ...]] = ("latency_s", "wrong", "bandwidth")

    m: Literal["probe_done"] = "probe_done"
    id: Int
    latency_s: tuple[float, ...]
    wrong: tuple[tuple[Int, ...], ...]
    bandwidth: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeBroke(Message):
    """A rank's part of probe ``id`` raised an error: its group can't be used any more."""

    m: Literal["probe_broke"] = "probe_broke"
    id: Int
    text: str
