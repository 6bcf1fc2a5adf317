"""A run as ``top`` shows it: its figures, its state and the line of Slurm about its job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_forge.journal import RunStatus
from slurm_forge.journal import events as ev
from slurm_forge.report.status.run_listing import ListedRun
from slurm_forge.report.status.status import Status
from slurm_forge.report.text import clean
from slurm_forge.report.top.pulse import Pulse, SavedStep
from slurm_forge.slurm.records import QueueRecord, is_slurm_job
from slurm_forge.slurm.states import PENDING_LIKE
from slurm_forge.slurm.text.array_tasks import tasks_of

#: A run that trains writes every few seconds; one that starts may take minutes.
_QUIET_S = 300.0
#: Slurm's answer counts only if it is so much newer than the last word of the run.
_SETTLED_S = 30.0
_WAITS = frozenset({RunStatus.SUBMITTED.value, RunStatus.REQUEUED.value})
_ORDER = {
    "unreadable": 0,
    "gone": 0,
    "held": 1,
    "quiet": 2,
    "running": 3,
    "starting": 4,
    "waiting": 5,
    "submitted": 5,
    "requeued": 5,
    "stopped": 6,
    "cancelled": 7,
    "new": 8,
    "finished": 9,
}


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """What Slurm said of all jobs of the user at ``time``: a line for each, by how it is named."""

    time: float
    jobs: Mapping[str, QueueRecord]

    @classmethod
    def of(cls, time: float, lines: Iterable[QueueRecord]) -> QueueSeen:
        """By job and by task: tasks of an array that wait together share a line."""
        jobs: dict[str, QueueRecord] = {}
        for line in lines:
            jobs[line.job_ref] = line
            array, bracket, tasks = line.job_ref.partition("_[")
            if bracket:
                jobs |= {f"{array}_{task}": line for task in tasks_of(tasks)}
            if "..." in tasks:  # squeue has cut it short
                jobs[f"{array}_"] = line
        return cls(time, jobs)

    def line_of(self, job: str) -> QueueRecord | None:
        """The line about a job; None where there is none."""
        array, _, task = job.partition("_")
        return self.jobs.get(job) or (self.jobs.get(f"{array}_") if task else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRow:
    """A run at this moment.

    ``state`` is a word of ``status``, or: waiting (in the queue), starting (its job runs, its ranks
    do not train yet), quiet (it runs and has not written for five minutes), gone (Slurm does not
    have its job).  ``words`` say it in a sentence.  ``attention``: a person should look at it.
    Times are seconds since the epoch; None is unknown.
    """

    name: str
    path: str
    state: str
    words: str
    job: str = ""
    attention: bool = False
    step: int | None = None
    total_steps: int | None = None
    step_s: float | None = None
    loss_name: str = ""
    loss: float | None = None
    losses: tuple[float, ...] = ()
    goodput: float | None = None
    limit: float | None = None
    seen: float | None = None
    attempt: int | None = None
    launch: int | None = None
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    slow: tuple[ev.StragglerSeen, ...] = ()
    figures: tuple[tuple[str, float], ...] = ()
    probe: ev.ProbeMeasured | None = None
    probe_off: str = ""
    saved: SavedStep | None = None
    next_save: float | None = None
    happened: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, str]:
        """Its place in the list: first what needs a person, last what is over."""
        return (_ORDER.get(self.state, 3), self.name)

    @property
    def is_live(self) -> bool:
        """Whether it trains, or will without anybody's doing."""
        return self.state in {"gone", "quiet", "running", "starting", "waiting"} | _WAITS


def row_of_line(line: ListedRun) -> TopRow:
    """A run of which no more is known than the line that ``status`` prints."""
    return TopRow(
        name=line.run,
        path=line.path,
        state=line.status,
        words=line.words,
        job=line.job,
        attention=line.status in ("held", "unreadable"),
        step=line.step,
        total_steps=line.total_steps,
    )


def row_of(
    status: Status, pulse: Pulse, *, now: float, queue: QueueSeen | None, goodput: float | None
) -> TopRow:
    """A run whose journal is read."""
    state, words = _state(status, pulse, now, queue)
    running = state in ("running", "quiet")
    slow = tuple(sorted(pulse.slow.values(), key=lambda each: -each.factor)) if running else ()
    return TopRow(
        name=status.run,
        path=status.path,
        state=state,
        words=words,
        job=status.job,
        attention=state in ("held", "gone", "quiet")
        or bool(slow)
        or status.failing_saves is not None,
        # How far a launch came is known best once it has ended.
        step=pulse.step if running and pulse.step is not None else status.step,
        total_steps=status.total_steps,
        step_s=pulse.step_s if running else None,
        loss_name=pulse.loss_name,
        loss=pulse.loss,
        losses=tuple(pulse.losses),
        goodput=goodput,
        limit=pulse.limit if running else None,
        seen=pulse.seen,
        attempt=status.attempt,
        launch=status.launch,
        world_size=pulse.world_size,
        nodes=pulse.nodes,
        slow=slow,
        figures=tuple(pulse.figures.items()),
        probe=pulse.probe if running else None,
        probe_off=pulse.probe_off if running else "",
        saved=pulse.saves[-1] if pulse.saves else None,
        next_save=pulse.next_save if running else None,
        happened=tuple(pulse.happened),
        next=_unheard(status) if state in ("quiet", "gone") else status.next,
        warnings=status.warnings,
    )


def _unheard(status: Status) -> tuple[str, ...]:
    """What to do about a run whose own files don't show what happened to it."""
    path = clean(status.path, 300)
    return (
        f"see what Slurm says of its job: slurm-forge status {path}",
        f"and what it printed last: slurm-forge logs {path} --errors",
    )


def _state(status: Status, pulse: Pulse, now: float, queue: QueueSeen | None) -> tuple[str, str]:
    """The word and the sentence, with Slurm's word where it was heard after the run's."""
    state = status.status
    waits, runs = state in _WAITS, state == RunStatus.RUNNING.value
    if queue is not None and (waits or runs) and is_slurm_job(status.job):
        line = queue.line_of(status.job)
        if line is not None and line.state in PENDING_LIKE:
            if waits:
                return "waiting", f"waiting in the queue: {line.reason or 'no reason given'}"
        elif line is not None and waits:
            return "starting", "its job runs; its ranks do not train yet"
        elif line is None and queue.time > (pulse.seen or 0.0) + _SETTLED_S:
            return "gone", f"Slurm no longer has job {status.job}"
    silent = now - pulse.seen if pulse.seen is not None else 0.0
    if runs and silent > _QUIET_S:
        return "quiet", f"{status.words}; nothing written for {silent / 60:.0f} min"
    return state, status.words
