"""What ranks say about their health: the answers to a probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slurm_forge.control.message import Message

__all__ = ["ProbeArrived", "ProbeDone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeArrived(Message):
    """A rank has issued its part of probe ``id``."""

    tag: ClassVar[str] = "probe_arrived"
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeDone(Message):
    """A rank's part of probe ``id`` is complete, with the right value or not."""

    tag: ClassVar[str] = "probe_done"
    id: int
    latency_s: float
    ok: bool
