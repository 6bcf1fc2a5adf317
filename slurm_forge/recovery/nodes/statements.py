"""Strikes and releases of nodes, and the rules by which they are weighed.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

#: The cause of a strike by a person.
BY_HAND = "by_hand"
#: No single strike weighs more.
MOST_WEIGHT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Evidence against a node.

    ``time`` and ``until`` are seconds since the epoch.  ``run`` is the path of the run, ``by`` the
    name of its user.  A person's strike (``cause`` is ``BY_HAND``) does not fade: it suffices alone
    until ``until``, or if that is None until somebody releases the node.
    """

    node: str
    time: float
    weight: float
    cause: str
    run: str = ""
    incident_id: str = ""
    by: str = ""
    until: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRelease:
    """A person trusts a node again: strikes up to ``time`` no longer count."""

    node: str
    time: float
    by: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """All strikes and releases, in any order; duplicates do no harm."""

    strikes: tuple[Strike, ...] = ()
    releases: tuple[NodeRelease, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRules:
    """How strikes are weighed.

    ``together`` is how close in time strikes count as consequences of one event;
    ``most_alone`` is the most that one person's runs can report against a node for one cause: less
    than twice the threshold, so that of nodes struck together at most one is convicted.  ``sure``
    is the least weight at which a report of a driver or of Slurm counts on its own, whatever is
    reported of other nodes.  ``most_unknown`` is the cap if the partition's size is unknown.
    """

    half_life: timedelta = timedelta(days=3)
    threshold: float = 1.0
    most_share: float = 0.1
    most_unknown: int = 4
    together: timedelta = timedelta(hours=6)
    most_alone: float = 1.9
    sure: float = 0.75
