"""Turns observations into an incident and an incident into a decision; called by ``launch``.

Pure: values in, values out.
"""

from slurm_forge.recovery.incident.classify import classify
from slurm_forge.recovery.incident.launch_facts import LaunchFacts
from slurm_forge.recovery.policy.decide import decide

__all__ = ["LaunchFacts", "classify", "decide"]
