"""Cause before cure: from observations to an incident, from an incident to a decision.  Pure."""

from slurm_forge.recovery.incident.classify import (
    LaunchFacts,
    classify,
)
from slurm_forge.recovery.policy.decide import decide

__all__ = ["LaunchFacts", "classify", "decide"]
