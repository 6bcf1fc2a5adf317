"""Turns observations into an incident and an incident into a decision; called by ``launch``.

Pure: values in, values out.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_forge.recovery.incident.classify import classify
    from slurm_forge.recovery.incident.launch_facts import LaunchFacts
    from slurm_forge.recovery.policy.decide import decide

__all__ = ["LaunchFacts", "classify", "decide"]

#: Loaded on first use, so that importing one module does not load the others.
_WHERE = {
    "LaunchFacts": "slurm_forge.recovery.incident.launch_facts",
    "classify": "slurm_forge.recovery.incident.classify",
    "decide": "slurm_forge.recovery.policy.decide",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
