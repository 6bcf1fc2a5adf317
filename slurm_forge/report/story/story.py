"""What ``explain`` tells, as values.  Every field is a key of ``explain --json``.

Times are seconds since the epoch, durations seconds (``…_s``), steps are optimizer steps done.
None is "the journal does not say" (or "not yet") throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.report.story.pace_story import (
    SlowStory,
    TrendStory,
)
from slurm_forge.report.story.pieces import (
    ActStory,
    ComebackStory,
    FailedSave,
    FailingSaves,
    HeldStory,
    LateProbe,
    LoggedFigure,
    NoticeStory,
    Observation,
    ParameterChange,
    PlanInForce,
    RejectedCheckpoint,
    SampleRange,
    ScienceChange,
    SkipStory,
    StrikeStory,
    WaitingStory,
)

__all__ = [
    "ActStory",
    "AttemptStory",
    "CheckpointStory",
    "ComebackStory",
    "DecisionStory",
    "FailedSave",
    "FailingSaves",
    "HeldStory",
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
    "SlowStory",
    "StrikeStory",
    "TrendStory",
    "WaitingStory",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStory:
    """What was done about an incident; ``rung`` counts from 0 in the cause's ladder.

    ``target`` is the checkpoint that a rollback goes back to (None: the start), ``target_trust``
    how far that was trusted.  ``in_process``: it was carried out while the ranks went on.
    ``plan`` is what was in force afterwards, at the step of the incident.  ``wait_s`` is how long
    the next start is put off.
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
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentStory:
    """What happened: cause, confidence, evidence, and the decision if one was taken.

    ``onset`` is the first bad step and ``step`` the last, ``samples`` what they were taken on;
    ``repeats`` whether the step was bad again when it was computed again.  Training began again at
    ``resumed_step`` (None: not yet, or it never stopped), ``repeated_steps`` had to be done again,
    which took ``lost_s``: measured from the incident until training was past it, else the time of
    the work that was thrown away.  ``recovered``: training has got past it.

    What it cost: ``repeated_s`` of training were thrown away, the start after it took
    ``startup_s``, and for ``idle_s`` the ranks held their nodes and did neither.  Over all
    ``ranks``, in rank-seconds (times the run's ``gpus_per_rank`` GPU-seconds): ``lost_rank_s`` is
    repeated work and start-up, ``idle_rank_s`` the rest.  ``found_out`` is when a later attempt
    learned of it (``time`` is the last sign of life then); None: it was seen when it happened.
    ``repeated_at_least``: more steps than that may have been done again, since the ranks ended
    without a word of how far they were.
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
    ranks: int | None = None
    repeated_s: float = 0.0
    startup_s: float = 0.0
    idle_s: float = 0.0
    lost_rank_s: float = 0.0
    idle_rank_s: float = 0.0
    struck: tuple[StrikeStory, ...] = ()
    found_out: float | None = None
    repeated_at_least: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStory:
    """One start of all ranks.

    ``ended`` is None while it runs or where it went without a word; ``last_seen`` is its last line.
    ``agreed_s`` is from the notice until all ranks knew where to stop, ``notice_to_saved_s`` from
    the notice until the stop's checkpoint was committed.  ``repeated_steps`` of this launch had to
    be done again by a later one (None: nothing has been resumed since).  ``training_s`` is from the
    first step to the last one seen.  ``program`` is how far a program got that keeps its own
    checkpoints, empty where nothing told (None: ranks of ours).
    """

    number: int
    started: float
    ended: float | None
    last_seen: float
    outcome: str
    world_size: int
    nodes: tuple[str, ...]
    #: From what ranks were started: cold, warm or in_process.
    start: str
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
    program: str | None = None
    slow: tuple[SlowStory, ...] = ()
    trends: tuple[TrendStory, ...] = ()
    #: Bytes per second of the last probe that measured it, and why there are none any more.
    bandwidth: float | None = None
    probe_off: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStory:
    """One Slurm start of the job.

    ``waited_s`` is the time before it: since the end of the attempt before, or since it was
    submitted.  ``outcome`` is what it left the run as, empty while it runs or where it went
    without a word.  ``logs`` are the files that hold its output, named from the current folder.
    ``found_out`` is when a later attempt learned how this one, which could not say so, had ended;
    ``struck`` are strikes for what is not in the journal (any more).
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
    held: HeldStory | None = None
    struck: tuple[StrikeStory, ...] = ()
    found_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStory:
    """The whole run.

    ``goodput`` is ``kept_s`` (time spent on steps that stayed) over ``elapsed_s`` (since the first
    start, until now, until the last step where it trains, or until the run came to rest).
    ``training_s`` counts repeated steps too.
    ``startup_s`` is what the very first launch took until it trained, ``ending_s`` what a finished
    run took after its last step: no run is spared these.
    ``committed_step`` is that of the newest checkpoint, of those on disk where somebody looked.
    ``next`` is what a person can do now, ``next_time`` what would make another run smoother.
    ``warnings`` are about the journal itself: damaged lines, files that could not be read.
    ``memory`` is what the job asks for per node, in bytes.  ``jobs`` are all that it has run as.

    ``waited_s`` is the time that it waited to be started, the first time, Slurm's own delay and
    the present wait too; ``queued_s`` is what of it lies in ``elapsed_s``, and for ``rest_s`` of
    that nobody had asked for it to go on.  ``lost_rank_s`` (repeated work, and every start-up but
    the first) and ``idle_rank_s`` (nodes held, neither training nor starting) are rank-seconds:
    times ``gpus_per_rank``, where that is known, GPU-seconds.

    ``may_be_further``: training may have done more steps than ``step``, since its ranks ended
    without a word of how far they were.
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
    jobs: tuple[str, ...] = ()
    waited_s: float = 0.0
    queued_s: float = 0.0
    rest_s: float = 0.0
    lost_rank_s: float = 0.0
    idle_rank_s: float = 0.0
    starts: int = 0
    gpus_per_rank: float | None = None
    nodes_asked: int | None = None
    waiting: WaitingStory | None = None
    failing_saves: FailingSaves | None = None
    repeated_at_least: bool = False
    may_be_further: bool = False
