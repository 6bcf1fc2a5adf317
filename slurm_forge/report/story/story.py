"""The story of a run, as values.

Fields are the keys of ``explain --json``; of events and plans ``report/encoding.py`` names them.

Times are seconds since the epoch, durations seconds (``…_s``), steps are optimizer steps done.
None is "the journal does not say" (or "not yet") throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from slurm_forge.journal import events as ev
from slurm_forge.report.story.time_use import TimeSpan
from slurm_forge.vocabulary.cause import Evidence
from slurm_forge.vocabulary.decision import Change
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Timed(Generic[E]):
    """A journal event, and when it was written."""

    time: float
    event: E


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """A recovery plan; ``lr_scale`` is its factor on the learning rate at the step in question.

    ``lr_back_step`` is where the ramp is back at 1 (None: it stays).  ``rolled_back_to`` is the
    step that training went back to, None where it did not, or has long got past the trouble.
    """

    plan: RecoveryPlan
    lr_scale: float
    lr_back_step: int | None
    rolled_back_to: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingSaves:
    """Every save since the last checkpoint has failed: ``count`` of them, the first at ``since``.

    ``reason`` is that of the last one.  ``committed_step`` is the step of the last checkpoint
    (None: there is none); ``at_risk_steps`` are lost if the run stops now.
    """

    count: int
    since: float
    first_step: int
    last_step: int
    reason: str
    committed_step: int | None
    at_risk_steps: int


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
    evidence: tuple[Evidence, ...] = ()

    @property
    def count(self) -> int:
        """How many steps."""
        return self.last_step - self.first_step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFigure:
    """The newest value that ``run.log`` was given under a name."""

    name: str
    value: float
    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComebackStory:
    """A request to come back: ``outcome`` is ``intended``, ``done`` or ``failed``.

    ``by`` is who asked: ``supervisor``, ``deputy`` (rank 0 in its place), ``cli`` (a person).
    """

    time: float
    outcome: str
    method: str
    job: str
    successor: str | None
    reason: str
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStory:
    """Slurm was asked to put the job back into the queue, held.

    ``confirmed``: it said that it did; ``refused``: it did not take that, and ``refusal`` says why.
    With neither, its answer is unknown, and anybody's release ends the hold.
    """

    time: float
    job: str
    reason: str
    refused: bool = False
    confirmed: bool = False
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStory:
    """Why a job waits, as Slurm said when it was asked: its words, and ours (``text``).

    ``state`` and ``reason`` are empty where Slurm does not know the job; ``expected`` is when it
    may, or is thought to, start.  ``next`` is what to do about it; ``held``: until it is released.
    """

    job: str
    state: str
    reason: str
    text: str
    held: bool
    expected: float | None
    next: str


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
class SlowStory:
    """Ranks of a host that were slower than the others, in ``words`` too.

    ``steps`` of them cost ``cost_s``.  ``over`` is when it had passed (None: not yet, or nobody saw
    it).
    """

    time: float
    event: ev.StragglerSeen
    words: str
    steps: int = 0
    cost_s: float = 0.0
    over: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendStory:
    """A figure of all ranks that was worse than it used to be, until ``over``."""

    time: float
    event: ev.TrendSeen
    over: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStory:
    """What was done about an incident; ``rung`` counts from 0 in the cause's ladder.

    ``target`` is the checkpoint that a rollback goes back to (None: the start), ``target_trust``
    how far that was trusted.  ``in_process``: it was carried out while the ranks kept running.
    ``plan`` is what was in force afterwards, at the step of the incident.  ``wait_s`` is how long
    the next start is put off.
    """

    time: float
    action: str
    reason: str
    rung: int | None
    changes: tuple[Change, ...]
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
    ``resumed_step`` (None: not yet, or it never stopped), ``repeated_steps`` had to be done again.
    ``lost_s`` is from the incident until training was past it, where that was measured, else
    ``repeated_s``: it is no part of any sum.  ``recovered``: training has got past it.

    What it cost: ``repeated_s`` of training were thrown away, the start after it took
    ``startup_s``, and for ``idle_s`` the ranks held their nodes and did neither.  Over all
    ``ranks``, in rank-seconds (times the run's ``gpus_per_rank`` GPU-seconds): ``lost_rank_s`` is
    repeated work and start-up, ``idle_rank_s`` the rest.  ``found_out`` is when a later attempt
    learned of it (``time`` is the last sign of life then); None: it was seen when it happened.
    ``repeated_at_least``: more steps than that may have been done again, since the ranks ended
    without a message of how far they were.
    """

    id: str
    time: float
    cause: str
    confidence: str
    step: int | None
    rank: int | None
    hosts: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    decision: DecisionStory | None
    onset: int | None = None
    samples: SampleWindow | None = None
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
    struck: tuple[ev.NodesStruck, ...] = ()
    found_out: float | None = None
    repeated_at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeStory:
    """Training began; ``start_s`` is from the start of the launch until here.

    ``after`` is the incident that it was for.
    """

    time: float
    event: ev.Resumed
    start_s: float | None
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStory:
    """One start of all ranks.

    ``ended`` is None while it runs or where it went without a word; ``last_seen`` is its last line.
    ``agreed_s`` is from the notice until all ranks knew where to stop, ``notice_to_saved_s`` from
    the notice until the stop's checkpoint was committed.  ``repeated_steps`` of this launch had to
    be done again by a later one (None: nothing has been resumed since).  ``training_s`` is from the
    first step to the last one seen.  ``program`` is how far a program got that keeps its own
    checkpoints, empty if unknown (None: ranks of ours).
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
    notices: tuple[Timed[ev.NoticeSeen], ...]
    stop_step: int | None
    agreed_s: float | None
    stop_checkpoint: Timed[ev.CheckpointCommitted] | None
    notice_to_saved_s: float | None
    incidents: tuple[IncidentStory, ...]
    checkpoints: tuple[Timed[ev.CheckpointCommitted], ...]
    failed_saves: tuple[Timed[ev.CheckpointFailed], ...]
    rejected: tuple[Timed[ev.CheckpointRejected], ...]
    skipped: tuple[SkipStory, ...]
    probes: int
    slowest_probe_s: float | None
    late_probes: tuple[Timed[ev.ProbeMeasured], ...]
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
    ``struck`` are strikes for what is not in the journal (any more).  ``code`` names the snapshot
    that its ranks import from, empty where that is the work tree.
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
    struck: tuple[ev.NodesStruck, ...] = ()
    found_out: float | None = None
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStory:
    """The whole run.

    ``goodput`` is ``kept_s`` (time spent on kept steps) over ``elapsed_s`` (from the first
    start to now, to the last step of a run that is training, or to the end of one that is not).
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
    without a message of how far they were.  ``spans`` are what each moment was spent on.
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
    spans: tuple[TimeSpan, ...] = ()
