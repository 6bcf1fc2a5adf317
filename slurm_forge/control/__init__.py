"""The control channel: a line protocol over TCP between the ranks of a launch and its conductor.

Standard library only.  Nothing here runs per step: a rank compares two numbers at a boundary, and
talks only when somebody wants something.
"""

from slurm_forge.control.brief import BRIEF_KEY, LaunchBrief
from slurm_forge.control.gathering import Gathering, Place
from slurm_forge.control.hub import Hub, HubEvent, MemberView
from slurm_forge.control.member import HUB_GONE, Member
from slurm_forge.control.messages.protocol import (
    Request,
    RequestKind,
)

__all__ = [
    "BRIEF_KEY",
    "HUB_GONE",
    "Gathering",
    "Hub",
    "HubEvent",
    "LaunchBrief",
    "Member",
    "MemberView",
    "Place",
    "Request",
    "RequestKind",
]
