"""An instability that all ranks know of, until it is decided on.

Also here: the recovery plan in force on this rank, the one place where it changes during training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Incident
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Instability:
    """The same on all ranks.  Steps are counted from 1: the first bad one and the last."""

    cause: Cause
    onset: int
    step: int
    text: str
    window: SampleWindow | None = None
    evidence: tuple[Evidence, ...] = ()
    repeats: bool | None = None
    rank: int | None = None
    hosts: tuple[str, ...] = ()
    in_memory: bool = False
    #: Who judged it.
    source: str = "all ranks"

    def incident(self, number: str) -> Incident:
        """The incident that is journalled and decided on."""
        return Incident(
            id=number,
            cause=self.cause,
            confidence=Confidence.CERTAIN,
            evidence=(Evidence(self.source, self.text), *self.evidence),
            step=self.step,
            rank=self.rank,
            hosts=self.hosts,
            onset=self.onset,
            window=self.window,
            repeats=self.repeats,
            in_memory=self.in_memory,
        )


@dataclass(slots=True)
class ActivePlan:
    """The recovery plan, and the largest gradient norm whose update is applied.

    Changed on all ranks at the same step boundary only.
    """

    plan: RecoveryPlan
    limit: float = math.inf
