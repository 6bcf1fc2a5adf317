"""What can be written in a journal: one frozen dataclass per kind of event.

Times are seconds since the epoch, durations seconds (``…_s``), steps are optimizer steps done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from slurm_forge.journal.changes import (
    DataPositionMissing,
    Forked,
    JobChanged,
    OptionsReplaced,
)
from slurm_forge.journal.comebacks import (
    Held,
    NodesStruck,
    RequeueDone,
    RequeueFailed,
    RequeueIntended,
)
from slurm_forge.journal.paces import PaceSampled, StragglerOver, StragglerSeen, TrendSeen
from slurm_forge.journal.positions import ReadPosition
from slurm_forge.vocabulary.cause import Evidence
from slurm_forge.vocabulary.decision import Decision, Incident
from slurm_forge.vocabulary.trust import Trust

__all__ = [
    "VIA_THIS_MACHINE",
    "Advanced",
    "AttemptEnded",
    "AttemptStarted",
    "CheckpointCommitted",
    "CheckpointFailed",
    "CheckpointJudged",
    "CheckpointMeasured",
    "CheckpointRejected",
    "CheckpointWitnessed",
    "CheckpointsPruned",
    "DataPositionMissing",
    "DecisionTaken",
    "EpochEnded",
    "Event",
    "Finished",
    "Forked",
    "Held",
    "IncidentSeen",
    "JobChanged",
    "LaunchEnded",
    "LaunchStarted",
    "Logged",
    "NodesStruck",
    "Note",
    "NoticeSeen",
    "OptionsReplaced",
    "PaceSampled",
    "PreflightMeasured",
    "ProbeMeasured",
    "ProbeOff",
    "Progress",
    "Recovered",
    "RequeueDone",
    "RequeueFailed",
    "RequeueIntended",
    "ResumeCompared",
    "Resumed",
    "StallSeen",
    "StepSkipped",
    "StopAgreed",
    "StragglerOver",
    "StragglerSeen",
    "StretchesLearned",
    "Submitted",
    "TrendSeen",
    "UnknownEvent",
    "UserAsked",
]

#: ``via`` of what runs on this machine alone, where no other node can be had.
VIA_THIS_MACHINE = "submitit local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job was handed to Slurm (or to the local executor) for this run."""

    job: str
    via: str
    kind: Literal["submitted"] = "submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    """One Slurm start of the job began.

    ``read`` is how far it had read the journal: what older attempts write after that does not
    count.  None in lines of older versions.  ``code`` names the snapshot of the code, empty where
    the entry is imported from the files as they are.
    """

    job: str
    restart_count: int
    nodes: tuple[str, ...]
    host: str
    via: str
    end_time: float | None = None
    read: ReadPosition | None = None
    code: str = ""
    kind: Literal["attempt_started"] = "attempt_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStarted:
    """All ranks of a launch were started; ``start`` is a word of ``Start``.

    ``variables`` are what the recovery plan adds to their environment, as ``NAME=value``.
    """

    world_size: int
    nodes: tuple[str, ...] = ()
    start: str = "cold"
    variables: tuple[str, ...] = ()
    kind: Literal["launch_started"] = "launch_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Training begins at ``step``: from ``checkpoint``, or from the start where it is None.

    ``until`` is the step at which the program will be done, where that is known.  The seconds
    show where the time of a start went, counted from the start of rank 0's process.  ``candidates``
    are the newest checkpoints at that time: what an older attempt publishes later is another
    branch.  ``global_batch`` are the samples of one step, where ``run.batches`` makes them.
    ``data_restarted``: the data source has no state, so it began anew (``exact: false``).
    ``inexact``: why it is not ``exact``, where that is anything but other random states.
    """

    step: int
    checkpoint: str | None
    world_size: int
    until: int | None = None
    exact: bool = True
    interpreter_s: float = 0.0
    rendezvous_s: float = 0.0
    load_s: float = 0.0
    candidates: tuple[str, ...] = ()
    global_batch: int | None = None
    data_restarted: bool = False
    inexact: str = ""
    kind: Literal["resumed"] = "resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Training makes progress: steps done, and samples consumed."""

    step: int
    consumed: int = 0
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """A program that keeps its own checkpoints is further than ever before, and what shows it.

    ``step`` where its output, or the name of its checkpoint, shows one.
    """

    what: str
    step: int | None = None
    kind: Literal["advanced"] = "advanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Figures the program logged (sampled: not every step)."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
    kind: Literal["logged"] = "logged"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """An epoch's samples are all consumed (counted from 0), those of skipped steps included.

    The seed and the epoch alone determine which ones, and in which order.
    """

    epoch: int
    step: int
    samples: int
    skipped_steps: int
    kind: Literal["epoch_ended"] = "epoch_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """A checkpoint exists from here on.

    ``seconds`` from the beginning of the save until it was on disk, of which training waited
    ``blocked_s``.  ``findings`` say what is not healthy in it: then it is suspect from the start.
    ``epoch`` is the number of completed passes over the data.
    """

    name: str
    step: int
    reason: str
    seconds: float
    size: int
    blocked_s: float = 0.0
    findings: tuple[str, ...] = ()
    epoch: int | None = None
    kind: Literal["checkpoint_committed"] = "checkpoint_committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A save failed; the previous checkpoint is untouched."""

    step: int
    reason: str
    kind: Literal["checkpoint_failed"] = "checkpoint_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected:
    """A checkpoint on disk was skipped by a resume, and why."""

    name: str
    reason: str
    kind: Literal["checkpoint_rejected"] = "checkpoint_rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointJudged:
    """A checkpoint is trusted more, or less, than before; ``reason`` says on what grounds.

    ``step`` is how far training was at that time, where the judgement is based on it.
    """

    name: str
    trust: Trust
    reason: str
    step: int | None = None
    kind: Literal["checkpoint_judged"] = "checkpoint_judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeasured:
    """An evaluation of what is in a checkpoint: the metric that ``keep_best`` uses."""

    name: str
    metric: str
    value: float
    kind: Literal["checkpoint_measured"] = "checkpoint_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWitnessed:
    """The loss of the first micro-batch after a checkpoint: a resume has to compute the same.

    ``samples`` is how many were in it: a different number means different samples.
    """

    name: str
    loss: float
    samples: int = 0
    kind: Literal["checkpoint_witnessed"] = "checkpoint_witnessed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCompared:
    """How a launch differs from what its checkpoint was written with; ``refused``: it was held."""

    checkpoint: str
    differences: tuple[str, ...]
    refused: bool = False
    kind: Literal["resume_compared"] = "resume_compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsPruned:
    """Checkpoints that were deleted by the retention rules (or to make room)."""

    names: tuple[str, ...]
    reason: str
    kind: Literal["checkpoints_pruned"] = "checkpoints_pruned"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped:
    """An update was skipped on all ranks; its samples count as consumed."""

    step: int
    first_sample: int
    samples: int
    consecutive: int
    #: What was found out about it: parameters, rank, samples; on the first one of a row.
    evidence: tuple[Evidence, ...] = ()
    kind: Literal["step_skipped"] = "step_skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What an incident has cost, once training is past the step that it happened at.

    ``steps`` were computed again, ``seconds`` went by from the incident until then.
    """

    incident_id: str
    steps: int
    seconds: float
    kind: Literal["recovered"] = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSeen:
    """A request to the run: a signal on a rank, a file, the clock."""

    what: str
    source: str
    kind: Literal["notice_seen"] = "notice_seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSeen:
    """The launch makes no progress: which ranks are late (none if all wait), and where.

    ``since_s`` is how long they have been where they are, ``limit_s`` what was allowed.  ``files``
    hold their stacks, relative to the run.
    """

    step: int
    late_ranks: tuple[int, ...]
    late_hosts: tuple[str, ...]
    since_s: float
    limit_s: float
    evidence: tuple[Evidence, ...] = ()
    files: tuple[str, ...] = ()
    kind: Literal["stall_seen"] = "stall_seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchesLearned:
    """The longest times that ranks stayed in a place before they continued, by kind of place."""

    seconds: dict[str, float]
    kind: Literal["stretches_learned"] = "stretches_learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgreed:
    """All ranks know where to stop.  ``seconds`` is from the notice to the agreed target."""

    step: int
    seconds: float
    kind: Literal["stop_agreed"] = "stop_agreed"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSeen:
    """Something went wrong or was requested: cause and evidence."""

    incident: Incident
    kind: Literal["incident"] = "incident"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTaken:
    """What is done about an incident, and the plan in force from here on."""

    decision: Decision
    kind: Literal["decision"] = "decision"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMeasured:
    """A collective probe: fine, or which ranks came late, or whose values were ``wrong``.

    Fine ones are sampled.  ``bandwidth`` is in bytes per second, where one was measured.
    """

    ok: bool
    step: int
    latency_s: float | None = None
    late_ranks: tuple[int, ...] = ()
    late_hosts: tuple[str, ...] = ()
    count: int = 1
    bandwidth: float | None = None
    wrong: bool = False
    evidence: tuple[Evidence, ...] = ()
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightMeasured:
    """Nodes were checked before a launch: which are refused (``bad``), and what else was observed.

    ``seconds`` is from the first rank's report to the verdict.  Collectives were tried in
    ``rounds`` rounds, with ``groups`` groups in all; ``bytes_per_s`` is the bus
    bandwidth of all nodes together.
    """

    ok: bool
    hosts: int
    seconds: float
    bad: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    rounds: int = 0
    groups: int = 0
    bytes_per_s: float | None = None
    kind: Literal["preflight"] = "preflight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOff:
    """The probe broke while training continued: there are no more probes in this launch."""

    step: int
    why: str
    kind: Literal["probe_off"] = "probe_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnded:
    """All ranks of a launch are gone, after ``step`` steps as far as is known.

    ``exact``: a rank said so itself at its end; else they may have come further.
    """

    outcome: str
    step: int | None = None
    exact: bool = False
    kind: Literal["launch_ended"] = "launch_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """The attempt is over; ``outcome`` is what it leaves the run as."""

    outcome: str
    kind: Literal["attempt_ended"] = "attempt_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run reached its end."""

    step: int
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAsked:
    """A person ran a command on the run (requeue, stop, reconcile, …)."""

    verb: str
    user: str
    kind: Literal["user_asked"] = "user_asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something worth reporting that fits no other kind."""

    text: str
    kind: Literal["note"] = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """What a later slurm_forge (``by``) wrote and this one does not know: never written by it."""

    kind: str
    by: str = ""


Event = Annotated[
    Submitted
    | AttemptStarted
    | LaunchStarted
    | Resumed
    | Progress
    | Advanced
    | Logged
    | EpochEnded
    | CheckpointCommitted
    | CheckpointFailed
    | CheckpointRejected
    | CheckpointJudged
    | CheckpointMeasured
    | CheckpointWitnessed
    | ResumeCompared
    | CheckpointsPruned
    | StepSkipped
    | Recovered
    | NoticeSeen
    | StopAgreed
    | StallSeen
    | StretchesLearned
    | IncidentSeen
    | DecisionTaken
    | PreflightMeasured
    | ProbeMeasured
    | ProbeOff
    | PaceSampled
    | StragglerSeen
    | StragglerOver
    | TrendSeen
    | RequeueIntended
    | RequeueDone
    | RequeueFailed
    | Held
    | NodesStruck
    | LaunchEnded
    | AttemptEnded
    | Finished
    | UserAsked
    | JobChanged
    | Forked
    | OptionsReplaced
    | DataPositionMissing
    | Note,
    Field(discriminator="kind"),
]
