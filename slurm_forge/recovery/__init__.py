"""Cause before cure: from observations to an incident, from an incident to a decision.  Pure."""

from slurm_forge.recovery.classify import LaunchFacts, classify
from slurm_forge.recovery.decide import decide

__all__ = ["LaunchFacts", "classify", "decide"]
