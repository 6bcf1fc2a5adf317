"""What recovery has set for this rank: the one place where it changes while training goes on."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.training.verdict import LARGEST
from slurm_forge.vocabulary.plan import RecoveryPlan

__all__ = ["InForce"]


@dataclass(slots=True)
class InForce:
    """The recovery plan, and the largest gradient norm whose update is applied.

    Changed on all ranks at the same step boundary only.
    """

    plan: RecoveryPlan
    limit: float = LARGEST
