"""The control channel: a line protocol over TCP between ranks and their conductor; used by both.

Nothing here runs per step: a rank compares two numbers at a boundary, and
sends only when something was requested.

Entry: ``hub``, ``member``.
"""

from slurm_forge.control.brief import BRIEF_KEY, LaunchBrief
from slurm_forge.control.gathering import RankPosition, RequestAnswers
from slurm_forge.control.hub import Hub, HubEvent, MemberView
from slurm_forge.control.member import HUB_GONE, Member

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
