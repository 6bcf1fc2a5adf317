"""The control channel: a line protocol over TCP between ranks and their conductor; used by both.

Nothing here runs per step: a rank compares two numbers at a boundary, and
sends only when something was requested.

Entry: ``hub``, ``member``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_forge.control.brief import BRIEF_KEY, LaunchBrief
    from slurm_forge.control.gathering import RankPosition, RequestAnswers
    from slurm_forge.control.hub import Hub
    from slurm_forge.control.hub_events import HubEvent
    from slurm_forge.control.member import HUB_GONE, Member
    from slurm_forge.control.roster import MemberView

__all__ = [
    "BRIEF_KEY",
    "HUB_GONE",
    "Hub",
    "HubEvent",
    "LaunchBrief",
    "Member",
    "MemberView",
    "RankPosition",
    "RequestAnswers",
]

#: Loaded on first use, so that importing one module does not load the others.
_WHERE = {
    "BRIEF_KEY": "slurm_forge.control.brief",
    "HUB_GONE": "slurm_forge.control.member",
    "Hub": "slurm_forge.control.hub",
    "HubEvent": "slurm_forge.control.hub_events",
    "LaunchBrief": "slurm_forge.control.brief",
    "Member": "slurm_forge.control.member",
    "MemberView": "slurm_forge.control.roster",
    "RankPosition": "slurm_forge.control.gathering",
    "RequestAnswers": "slurm_forge.control.gathering",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
