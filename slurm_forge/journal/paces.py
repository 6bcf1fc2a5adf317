"""Events about slow nodes; ``pace`` and ``trend`` are read, and no longer written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePace:
    """A node's own part of a step and its trial, in times what they are with the others.

    ``late_s`` is how long after the others it comes to probes, lately.
    """

    host: str
    own: float
    trial: float
    late_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSampled:
    """How fast the run is, in the middle of all ranks: 0 where nothing is known.

    ``own_s`` is a rank's own part of a step, ``exchange_s`` what the rank that waits least spends
    outside of it, ``latency_s`` and ``bandwidth`` (bytes per second) are of probes.  ``usual_…`` is
    what later figures are compared with.  ``nodes`` are the slowest ones.
    """

    step: int
    world_size: int
    own_s: float
    exchange_s: float
    trial_s: float
    latency_s: float = 0.0
    bandwidth: float = 0.0
    usual_own_s: float = 0.0
    usual_exchange_s: float = 0.0
    usual_trial_s: float = 0.0
    usual_latency_s: float = 0.0
    usual_bandwidth: float = 0.0
    nodes: tuple[NodePace, ...] = ()
    kind: Literal["pace"] = "pace"


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSeen:
    """Ranks of a host are ``factor`` times as slow as the others, since ``since_step``.

    ``trial`` is the factor of the same work everywhere (0: none was tried), ``why`` node, starved
    or work; each step takes ``lost_s`` longer for all ranks.
    """

    step: int
    since_step: int
    ranks: tuple[int, ...]
    host: str
    factor: float
    trial: float
    why: str
    lost_s: float = 0.0
    queued: float = -1.0
    throttled: int = -1
    kind: Literal["straggler"] = "straggler"


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerOver:
    """A straggler is as fast as the others again: what it has cost all ranks, in seconds."""

    step: int
    host: str
    ranks: tuple[int, ...]
    steps: int
    lost_s: float
    kind: Literal["straggler_over"] = "straggler_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendSeen:
    """A figure of all ranks (own, exchange, latency, bandwidth) is worse than it used to be.

    ``over``: it is as before again.  ``since`` is in seconds since 1970, ``was`` and ``now`` are
    seconds, or bytes per second.
    """

    step: int
    figure: str
    was: float
    now: float
    since: float
    over: bool = False
    kind: Literal["trend"] = "trend"
