"""What is said of nodes, and the rules by which it is weighed.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

#: The cause of a strike that a person made.
BY_HAND = "by_hand"
#: No single strike weighs more.
MOST_WEIGHT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Something that speaks against a node.

    ``time`` and ``until`` are seconds since the epoch.  ``run`` is the path of the run, ``by`` the
    name of its user.  A person's strike (``cause`` is ``BY_HAND``) does not fade: it is enough by
    itself until ``until``, and where that is None until somebody releases the node.
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
    """A person trusts a node again: what was said of it up to ``time`` no longer counts."""

    node: str
    time: float
    by: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that is known, in any order; doubles do no harm."""

    strikes: tuple[Strike, ...] = ()
    releases: tuple[NodeRelease, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRules:
    """How strikes are weighed.

    ``together`` is how near in time strikes are taken for consequences of one thing;
    ``most_alone`` is the most that one person's runs can say against a node for one cause: less
    than twice the threshold, so that of nodes struck together at most one is convicted.  ``sure``
    is the least weight at which a driver's or Slurm's word stands by itself, whatever is said of
    other nodes.  ``most_unknown`` is how many are left out where the partition's size is not known.
    """

    half_life: timedelta = timedelta(days=3)
    threshold: float = 1.0
    most_share: float = 0.1
    most_unknown: int = 4
    together: timedelta = timedelta(hours=6)
    most_alone: float = 1.9
    sure: float = 0.75
