"""What ``explain`` tells, as values.  Every field is a key of ``explain --json``.

Times are seconds since the epoch, durations seconds (``…_s``), steps are optimizer steps done.
None is "the journal does not say" (or "not yet") throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "ActStory",
    "AttemptStory",
    "CheckpointStory",
    "ComebackStory",
    "DecisionStory",
    "FailedSave",
    "IncidentStory",
    "LateProbe",
    "LaunchStory",
    "LoggedFigure",
    "NoticeStory",
    "Observation",
    "ParameterChange",
    "PlanInForce",
    "RejectedCheckpoint",
    "ResumeStory",
    "RunStory",
    "SampleRange",
    "ScienceChange",
    "SkipStory",
]


@dataclass(frozen=True, slots=True)
class Observation:
    """One piece of evidence: where it was seen, and its text."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """A parameter that a decision changed."""

    parameter: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, order=True)
class SampleRange:
    """Samples of the run's order, first and last one."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """A recovery plan; ``lr_scale`` is the factor on the learning rate where it is told.

    ``lr_back_step`` is where the ramp is back at 1 (None: it stays), ``skipped`` the samples that
    are left out, ``reseeded`` how often random numbers were drawn anew.  ``rolled_back_to`` is the
    step that training went back to, None where it did not, or has long got past the trouble.
    """

    lr_scale: float
    lr_factor: float
    lr_from_step: int
    lr_ramp_steps: int
    micro_batch: int | None
    mem_factor: float
    exclude_nodes: tuple[str, ...]
    lr_back_step: int | None
    skipped: tuple[SampleRange, ...]
    reseeded: int
    worker_factor: float
    rolled_back_to: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStory:
    """What was done about an incident; ``rung`` counts from 0 in the cause's ladder.

    ``target`` is the checkpoint that a rollback goes back to (None: the start), ``target_trust``
    how far that was trusted.  ``in_process``: it was carried out while the ranks went on.
    ``plan`` is what was in force afterwards, at the step of the incident.
    """

    time: float
    action: str
    reason: str
    rung: int | None
    changes: tuple[ParameterChange, ...]
    target: str | None
    target_step: int | None
    target_trust: str
    in_process: bool
    plan: PlanInForce


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentStory:
    """What happened: cause, confidence, evidence, and the decision if one was taken.

    ``onset`` is the first bad step and ``step`` the last, ``samples`` what they were taken on;
    ``repeats`` whether the step was bad again when it was computed again.  Training began again at
    ``resumed_step`` (None: not yet, or it never stopped), ``repeated_steps`` had to be done again,
    which took ``lost_s``: measured from the incident until training was past it, else the time of
    the work that was thrown away.  ``recovered``: training has got past it.
    """

    id: str
    time: float
    cause: str
    confidence: str
    step: int | None
    rank: int | None
    hosts: tuple[str, ...]
    evidence: tuple[Observation, ...]
    decision: DecisionStory | None
    onset: int | None = None
    samples: SampleRange | None = None
    repeats: bool | None = None
    micro_batch: int | None = None
    resumed_step: int | None = None
    repeated_steps: int | None = None
    lost_s: float | None = None
    recovered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeStory:
    """Training began at ``step``, from ``checkpoint`` or from the start.

    ``start_s`` is from the start of the launch until here; the other three say where it went.
    ``after`` is the incident that it was for.
    """

    time: float
    step: int
    checkpoint: str | None
    world_size: int
    exact: bool
    start_s: float | None
    interpreter_s: float
    rendezvous_s: float
    load_s: float
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStory:
    """A checkpoint that was committed at ``time``, ``save_s`` after its save began.

    ``findings`` say what was not healthy in it.
    """

    time: float
    name: str
    step: int
    reason: str
    save_s: float
    size: int
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that came to nothing."""

    time: float
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class RejectedCheckpoint:
    """A checkpoint that was passed over while resuming."""

    time: float
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStory:
    """Steps in a row whose update was not applied, and the samples they consumed (inclusive).

    ``undone``: training went back to before them, so that they are no part of the result.
    ``evidence`` is what was found out about the first of them.
    """

    first_step: int
    last_step: int
    first_sample: int
    last_sample: int
    undone: bool = False
    time: float = math.nan
    evidence: tuple[Observation, ...] = ()

    @property
    def count(self) -> int:
        """How many steps."""
        return self.last_step - self.first_step + 1


@dataclass(frozen=True, slots=True)
class NoticeStory:
    """Somebody wanted something of the run: a signal, a file, the clock."""

    time: float
    what: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LateProbe:
    """A collective probe that failed, and who came late."""

    time: float
    step: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFigure:
    """The newest value that ``run.log`` was given under a name."""

    name: str
    value: float
    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStory:
    """One start of all ranks.

    ``ended`` is None while it runs or where it went without a word; ``last_seen`` is its last line.
    ``agreed_s`` is from the notice until all ranks knew where to stop, ``notice_to_saved_s`` from
    the notice until the stop's checkpoint was committed.  ``repeated_steps`` of this launch had to
    be done again by a later one (None: nothing has been resumed since).  ``training_s`` is from the
    first step to the last one seen.
    """

    number: int
    started: float
    ended: float | None
    last_seen: float
    outcome: str
    world_size: int
    nodes: tuple[str, ...]
    step: int | None
    resumes: tuple[ResumeStory, ...]
    training_s: float
    repeated_steps: int | None
    repeated_s: float
    notices: tuple[NoticeStory, ...]
    stop_step: int | None
    agreed_s: float | None
    stop_checkpoint: CheckpointStory | None
    notice_to_saved_s: float | None
    incidents: tuple[IncidentStory, ...]
    checkpoints: tuple[CheckpointStory, ...]
    failed_saves: tuple[FailedSave, ...]
    rejected: tuple[RejectedCheckpoint, ...]
    skipped: tuple[SkipStory, ...]
    probes: int
    slowest_probe_s: float | None
    late_probes: tuple[LateProbe, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComebackStory:
    """A request to come back: ``outcome`` is ``intended``, ``done`` or ``failed``."""

    time: float
    outcome: str
    method: str
    job: str
    successor: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStory:
    """One Slurm start of the job.

    ``waited_s`` is the time before it: since the end of the attempt before, or since it was
    submitted.  ``outcome`` is what it left the run as, empty while it runs or where it went
    without a word.  ``logs`` are the files that hold its output, named from the current folder.
    """

    number: int
    job: str
    via: str
    host: str
    nodes: tuple[str, ...]
    waited_s: float | None
    started: float
    ended: float | None
    last_seen: float
    outcome: str
    launches: tuple[LaunchStory, ...]
    comebacks: tuple[ComebackStory, ...]
    notes: tuple[str, ...]
    logs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActStory:
    """A person used the command line: submitted the run as ``job``, or used another verb on it."""

    time: float
    verb: str
    user: str | None
    job: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScienceChange:
    """One thing that makes this run differ from an undisturbed one.

    ``science`` is False for what changes only how it is computed (the micro-batch, memory, nodes).
    """

    parameter: str
    text: str
    science: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStory:
    """The whole run.

    ``goodput`` is ``kept_s`` (time spent on steps that stayed) over ``elapsed_s`` (since the first
    start, until now or until the run came to rest).  ``training_s`` counts repeated steps too.
    ``startup_s`` is what the very first launch took until it trained, ``ending_s`` what a finished
    run took after its last step: no run is spared these.
    ``next`` is what a person can do now, ``next_time`` what would make another run smoother.
    ``warnings`` are about the journal itself: damaged lines, files that could not be read.
    ``memory`` is what the job asks for per node, in bytes.
    """

    run: str
    path: str
    status: str
    words: str
    reason: str
    job: str
    step: int | None
    total_steps: int | None
    committed_step: int | None
    started: float | None
    last_seen: float | None
    elapsed_s: float | None
    training_s: float
    kept_s: float
    repeated_s: float
    repeated_steps: int
    goodput: float | None
    startup_s: float
    ending_s: float
    attempts: tuple[AttemptStory, ...]
    acts: tuple[ActStory, ...]
    changes: tuple[ScienceChange, ...]
    next: tuple[str, ...]
    next_time: tuple[str, ...]
    warnings: tuple[str, ...]
    memory: int | None = None
