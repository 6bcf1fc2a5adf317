"""What a live look at a cluster has seen: values only, which travel from the job as JSON.

Times are seconds since the epoch on the clock of the node that they were taken on; what crosses
between nodes says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Receiver(str, Enum):
    """Where a listener sits below Slurm, and whether it knows what to do with a signal."""

    #: What the batch script has become by ``exec``.
    BATCH = "batch step"
    #: A task of srun, the direct child of slurmstepd, with our own handlers.
    TASK = "task"
    #: The same program without any handler.
    TASK_PLAIN = "task, no handler"
    #: Our handlers behind ``bash -c`` that stays in between.
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
    """What became of a listener in a round."""

    #: Its handler ran.
    HEARD = "heard"
    #: Nothing came to it, and it lives.
    NOTHING = "nothing"
    #: The signal killed it.
    DIED = "died"
    #: It ended with what stood between it and Slurm.
    CARRIED_OFF = "carried off"
    #: It was not there when the signal was sent.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One listener in one round.  ``signals`` in the order of their arrival, by name.

    ``after_s`` counts from the sending; None where nobody knows when Slurm sent it, and then
    ``at`` is all there is.
    """

    way: Receiver
    host: str
    fate: Fate
    signals: tuple[str, ...] = ()
    at: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRound:
    """One signal and everybody's sightings.

    ``sent_at`` is when scancel was called, ``answered_s`` how long it took.  Of a WARNING it is
    not known; ``before_end_s`` is how long before the job's end it was first heard, and
    ``asked_s`` how long before it should have been.
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
        """Of the listeners that sat there, on every host."""
        return tuple(each for each in self.sightings if each.way is way)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStorage:
    """The run folder as one node sees it.  None is "not tried", seconds are durations.

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
    """A way from one node to another's control channel: name or address, and the time it took."""

    address: str
    connected_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """One compute node.  Bytes, seconds; None is "could not be found out".

    ``commands`` are Slurm's that answered here, ``silent`` those that are there and did not.
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
    #: How the nodes that connect to this job's channel got there.
    reaches: tuple[Reach, ...] = ()
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """All that the job itself reports: written by it, once, at its end."""

    nonce: str
    job: str
    host: str
    started_at: float
    ended_at: float
    end_time: float | None
    rounds: tuple[SignalRound, ...]
    nodes: tuple[NodeSeen, ...]
    torch_left_out: str = ""
    #: False while more is to come; a job that was cut off leaves it so.
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What only two sides together can tell: the login node and the job.

    ``clock_ahead_s`` is the node's clock against the login node's, give or take ``clock_give_s``.
    ``seen_after_s``: how long until a new file of one side is there for the other, at worst.
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
    """The whole look.  ``problem`` says why there is no ``report``.

    ``pending_s`` is from sbatch to the start, ``requeued_s`` from the job's own requeue until it
    ran again; None where it did not, or was not tried.
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
