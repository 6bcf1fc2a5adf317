"""Events about a run that comes back, or waits: what was asked of Slurm, and nodes left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What a person does for a run to go on.
GO_ON = frozenset({"submit", "run", "requeue", "release"})
#: ``method`` where the run is left to another task of its array, which Slurm starts by itself.
NEXT_TASK = "next task of the array"
#: ``method`` where somebody else, Slurm perhaps, had put the job back into the queue.
FOUND_QUEUED = "found in the queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueIntended:
    """Durable intent, written before Slurm is asked; ``reconcile`` carries it out if necessary."""

    job: str
    method: str
    reason: str
    kind: Literal["requeue_intended"] = "requeue_intended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueDone:
    """Slurm accepted it: the same job again, or ``successor``."""

    job: str
    method: str
    successor: str | None = None
    kind: Literal["requeue_done"] = "requeue_done"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueFailed:
    """Slurm did not accept it; the intent stays open."""

    job: str
    method: str
    reason: str
    kind: Literal["requeue_failed"] = "requeue_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The job waits in the queue, held: its release continues the run.

    ``restart_count`` is that of the attempt which requested it; a later start was released, where
    Slurm has ``confirmed`` that it holds the job (else it may have started it by itself).  The
    ``job`` of a chain of array tasks is the array: the tasks that have not started wait.  Not
    ``queued``: nothing waits there, the run is held by this line alone.
    """

    job: str
    restart_count: int
    reason: str
    confirmed: bool = False
    queued: bool = True
    kind: Literal["held"] = "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesStruck:
    """Nodes that an incident started on were noted in the node ledger.

    ``excluded`` are those of them that are excluded from now on, ``until`` the earliest time at
    which one of those may be used again.
    """

    nodes: tuple[str, ...]
    cause: str
    incident_id: str = ""
    excluded: tuple[str, ...] = ()
    until: float | None = None
    kind: Literal["nodes_struck"] = "nodes_struck"
