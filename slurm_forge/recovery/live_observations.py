"""The observations of a live check of a cluster: values only, sent from the job as JSON.

Times are seconds since the epoch on the clock of the node where they were taken, unless stated
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Receiver(str, Enum):
    """Where a listener runs below Slurm, and whether it handles a signal."""

    #: The process that replaced the batch script by ``exec``.
    BATCH = "batch step"
    #: A task of srun, the direct child of slurmstepd, with our own handlers.
    TASK = "task"
    #: The same program without any handler.
    TASK_PLAIN = "task, no handler"
    #: Our handlers below a ``bash -c`` that remains in between.
    SHELL = "below a shell"
    TORCHRUN = "below torchrun"
    #: Forked by the task as a data loader does, shielded, and as torch leaves it.
    WORKER = "loader worker"
    WORKER_PLAIN = "loader worker, no shield"


class RoundKind(str, Enum):
    """What was sent, and by whom."""

    #: By Slurm itself, because of ``--signal``.
    WARNING = "Slurm's warning before the limit"
    STEPS_USER = "user signal to the steps"
    STEPS_TERM = "SIGTERM to the steps"
    BATCH_USER = "user signal to the batch step"


class Fate(str, Enum):
    """What happened to a listener in a round."""

    #: Its handler ran.
    HEARD = "heard"
    #: No signal reached it, and it lives.
    NOTHING = "nothing"
    #: The signal killed it.
    DIED = "died"
    #: It ended together with a process between it and Slurm.
    CARRIED_OFF = "carried off"
    #: It was not there when the signal was sent.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One listener in one round.  ``signals`` in order of arrival, by name.

    ``after_s`` counts from the sending; None if it is unknown when Slurm sent it, and then only
    ``at`` is available.
    """

    way: Receiver
    host: str
    fate: Fate
    signals: tuple[str, ...] = ()
    at: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRound:
    """One signal and all observations of it.

    ``sent_at`` is when scancel was called, ``answered_s`` how long it took.  For a WARNING it is
    unknown; ``before_end_s`` is how long before the job's end it first arrived, and ``asked_s`` how
    long before the end it was requested.
    """

    kind: RoundKind
    signal: str
    sightings: tuple[Sighting, ...] = ()
    sent_at: float | None = None
    answered_s: float | None = None
    before_end_s: float | None = None
    asked_s: float | None = None
    problem: str = ""

    def of(self, way: Receiver) -> tuple[Sighting, ...]:
        """The listeners of that kind, on every host."""
        return tuple(each for each in self.sightings if each.way is way)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStorage:
    """The run directory as one node sees it.  None means "not tried"; seconds are durations.

    ``lock_refused``: a lock that the login node holds was refused here.
    """

    visible: bool = False
    writable: bool = False
    exclusive: bool | None = None
    renamed_s: float | None = None
    synced_s: float | None = None
    lock_refused: bool | None = None
    no_locks: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """A path from one node to another's control channel: name or address, and its duration."""

    address: str
    connected_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """One compute node.  Bytes, seconds; None means "could not be determined".

    ``commands`` are Slurm's commands that answered here, ``silent`` those that exist and did not.
    """

    host: str
    storage: NodeStorage = NodeStorage()
    commands: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    may_submit: bool | None = None
    python: str = ""
    package: bool | None = None
    torch: str | None = None
    torch_s: float | None = None
    internet: bool | None = None
    proxy: bool = False
    memory_free: int | None = None
    shm_free: int | None = None
    memory_limit: int | None = None
    memory_asked: int | None = None
    locked_memory: int | None = None
    open_files: int | None = None
    #: How the nodes that connected to this job's channel reached it.
    reaches: tuple[Reach, ...] = ()
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """The job's own report: written by the job, once, at its end."""

    nonce: str
    job: str
    host: str
    started_at: float
    ended_at: float
    end_time: float | None
    rounds: tuple[SignalRound, ...]
    nodes: tuple[NodeSeen, ...]
    torch_left_out: str = ""
    #: False until the report is complete; a job that was cut off leaves it so.
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What only the login node and the job together can determine.

    ``clock_ahead_s`` is the node's clock against the login node's, give or take ``clock_give_s``.
    ``seen_after_s``: the longest time until a new file of one side was visible on the other.
    """

    clock_ahead_s: float | None = None
    clock_give_s: float | None = None
    seen_after_s: float | None = None
    #: A lock that the node holds was refused on the login node.
    lock_refused: bool | None = None
    exclusive: bool | None = None
    content_right: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSeen:
    """The whole check.  ``problem`` says why there is no ``report``.

    ``pending_s`` is from sbatch to the start, ``requeued_s`` from the job's own requeue until it
    ran again; None if it did not, or was not tried.
    """

    job: str
    partition: str | None = None
    qos: str | None = None
    nodes: int = 1
    report: JobSeen | None = None
    meeting: Meeting = Meeting()
    pending_s: float | None = None
    requeued_s: float | None = None
    requeue_tried: bool = False
    folder: str = ""
    problem: str = ""
