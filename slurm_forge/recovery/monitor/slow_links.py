"""Whether what ranks exchange takes longer than it used to in this run: pure.

From fine probes (latency of a small all-reduce, bandwidth of a large one) and from the steps (what
the rank that waits least for the others spends outside of its own part).  Nobody is named: these
figures are of all ranks together.  Who is behind it is told by stragglers and by the network watch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median

from slurm_forge.recovery.monitor.drift import (
    Drift,
    Drifted,
)

__all__ = ["Figure", "LinkPast", "SlowLinks", "Slower", "lateness"]

#: Twice as slow is what no run does by itself.
_FACTOR = 2.0
#: Probes are looked at every so often only, and a shared machine is slow for some milliseconds.
_LATENCY_FLOOR_S = 0.005
_EXCHANGE_FLOOR_S = 0.002
_ROW = 5
_FIRST = 8
#: Large probes are rare.
_LARGE_ROW = 3
_LARGE_FIRST = 3


class Figure(str, Enum):
    """What is compared with its own past."""

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    EXCHANGE = "exchange"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class LinkPast:
    """What was usual in earlier attempts; 0 where nothing is known.  Seconds, bytes per second."""

    latency_s: float = 0.0
    bandwidth: float = 0.0
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slower:
    """A figure is no longer what it was, or is again."""

    figure: Figure
    drifted: Drifted


class SlowLinks:
    """``probed`` after each fine probe, ``stepped`` after each window of steps."""

    def __init__(self) -> None:
        self._latency = Drift(_FACTOR, row=_ROW, first=_FIRST, skip=1, floor=_LATENCY_FLOOR_S)
        self._bandwidth = Drift(_FACTOR, row=_LARGE_ROW, first=_LARGE_FIRST, rising=False)
        self._exchange = Drift(_FACTOR, row=_ROW, first=_FIRST, skip=2, floor=_EXCHANGE_FLOOR_S)

    def recall(self, past: LinkPast) -> None:
        """Earlier attempts had the same hardware: compare with what was better then."""
        self._latency.recall(past.latency_s)
        self._bandwidth.recall(past.bandwidth)
        self._exchange.recall(past.exchange_s)

    def probed(self, latency_s: float, bandwidth: float, at: float) -> tuple[Slower, ...]:
        """A probe was fine; ``bandwidth`` in bytes per second, 0 where it was a small one."""
        found = [(Figure.LATENCY, self._latency.note(latency_s, at))]
        if bandwidth > 0:
            found.append((Figure.BANDWIDTH, self._bandwidth.note(bandwidth, at)))
        return tuple(Slower(figure, drifted) for figure, drifted in found if drifted is not None)

    def stepped(self, exchange_s: float, at: float) -> tuple[Slower, ...]:
        """What the rank that waits least spends outside of its own part of a step."""
        drifted = self._exchange.note(exchange_s, at)
        return () if drifted is None else (Slower(Figure.EXCHANGE, drifted),)

    @property
    def usual(self) -> LinkPast:
        """What is usual by now."""
        return LinkPast(self._latency.usual, self._bandwidth.usual, self._exchange.usual)

    @property
    def slower(self) -> tuple[Slower, ...]:
        """What is worse than usual now."""
        each = (
            (Figure.LATENCY, self._latency.drifted),
            (Figure.BANDWIDTH, self._bandwidth.drifted),
            (Figure.EXCHANGE, self._exchange.drifted),
        )
        return tuple(Slower(figure, drifted) for figure, drifted in each if drifted is not None)


def lateness(arrivals: Mapping[int, float]) -> dict[int, float]:
    """How long after the middle of all each rank came to a probe, in seconds; never below 0."""
    if not arrivals:
        return {}
    middle = median(arrivals.values())
    return {rank: max(0.0, at - middle) for rank, at in arrivals.items()}
