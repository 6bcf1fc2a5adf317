"""What ranks say about their health: the answers to a probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurm_forge.control.messages.message import Message

__all__ = ["BANDWIDTH", "ProbeArrived", "ProbeBroke", "ProbeDone"]

#: The reason of a request for a probe that measures bandwidth, too.
BANDWIDTH = "bandwidth"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeArrived(Message):
    """A rank has issued its part of probe ``id``; ``gpu``: on a device that a hung one occupies."""

    tag: ClassVar[str] = "probe_arrived"
    id: int
    gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeDone(Message):
    """A rank's part of probe ``id`` is complete, so long after it was issued.

    ``wrong`` are the ranks whose values arrived changed.  ``bandwidth`` is the bus bandwidth in
    bytes per second, 0 where none was measured.
    """

    tag: ClassVar[str] = "probe_done"
    id: int
    latency_s: float
    wrong: tuple[int, ...]
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeBroke(Message):
    """A rank's part of probe ``id`` ended in an error: its group can't be used any more."""

    tag: ClassVar[str] = "probe_broke"
    id: int
    text: str
