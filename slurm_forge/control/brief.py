"""What the conductor sends every rank of a launch, once, over the control channel."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from slurm_forge.control.messages.preflight import Thoroughness
from slurm_forge.vocabulary.plan import RecoveryPlan

#: Key under which the conductor publishes the brief.
BRIEF_KEY = "brief"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchBrief:
    """What every rank of a launch must know and agree on, published by the conductor.

    ``committed_step`` is the newest committed step in the run's history; unless it is None,
    starting from nothing is refused.  ``resume_step`` is the newest step that may be resumed from.
    ``preflight`` is how thoroughly nodes are checked before training.
    """

    attempt: int
    launch: int
    plan: RecoveryPlan
    committed_step: int | None
    resume_step: int | None = None
    preflight: Thoroughness = Thoroughness.OFF

    def to_text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self), sort_keys=True)
