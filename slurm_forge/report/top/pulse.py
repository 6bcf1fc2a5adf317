"""What a run does right now, kept up to date by each new record: no record is read twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import NO_LAUNCH
from slurm_forge.journal.order import by_person
from slurm_forge.report.status.event_lines import happening

_POINTS = 40
_LOSSES = 240
_SAVES = 6
_EVENTS = 40
#: What changes no more than figures; after any other record the state is worked out anew.
_FIGURES = (
    ev.Progress,
    ev.Logged,
    ev.PaceSampled,
    ev.ProbeMeasured,
    ev.PreflightMeasured,
    ev.EpochEnded,
    ev.CheckpointCommitted,
    ev.CheckpointJudged,
    ev.CheckpointMeasured,
    ev.CheckpointWitnessed,
    ev.CheckpointsPruned,
    ev.StepSkipped,
    ev.StragglerSeen,
    ev.StragglerOver,
    ev.TrendSeen,
    ev.StretchesLearned,
)


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint that was committed."""

    time: float
    step: int
    seconds: float


@dataclass(slots=True)
class Pulse:
    """Figures of the newest launch, and the last events of the run."""

    attempt: int = 0
    launch: int = 0
    nodes: tuple[str, ...] = ()
    world_size: int = 0
    #: When the job reaches its time limit, as far as it was known when the attempt began.
    limit: float | None = None
    step: int | None = None
    seen: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    saves: deque[SavedStep] = field(default_factory=lambda: deque(maxlen=_SAVES))
    probe: ev.ProbeMeasured | None = None
    probe_off: str = ""
    slow: dict[str, ev.StragglerSeen] = field(default_factory=dict)
    happened: deque[str] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    _loss: str = ""
    _points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_POINTS))

    def add(self, records: Iterable[Record]) -> bool:
        """Take in new records, the earliest first; whether the state of the run may be another."""
        changed = False
        for record in records:
            changed |= not isinstance(record.event, _FIGURES)
            line = happening(record)
            if line is not None:
                self.happened.append(line)
            if by_person(record) or record.launch >= NO_LAUNCH:
                continue
            if record.attempt > self.attempt:
                self._begin(record.attempt)
            if record.attempt == self.attempt:
                self._add(record)
        return changed

    @property
    def step_s(self) -> float | None:
        """Seconds per step, over the last records of the launch."""
        if len(self._points) < 2:
            return None
        (begin, first), (end, last) = self._points[0], self._points[-1]
        return (end - begin) / (last - first) if last > first and end > begin else None

    @property
    def loss(self) -> float | None:
        """The newest loss; where nothing is called so, the figure that is logged first."""
        return self.figures.get(self._loss)

    @property
    def loss_name(self) -> str:
        """What the program calls it."""
        return self._loss

    @property
    def next_save(self) -> float | None:
        """When the next checkpoint is due, by the time between the last ones."""
        times = [each.time for each in self.saves]
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        return times[-1] + gaps[len(gaps) // 2] if gaps else None

    def _begin(self, attempt: int) -> None:
        self.attempt, self.launch, self.world_size = attempt, 0, 0
        self.nodes, self.limit = (), None
        self._begin_launch(0)

    def _begin_launch(self, launch: int) -> None:
        self.launch = launch
        self.slow.clear()
        self.probe, self.probe_off = None, ""
        self._points.clear()

    def _add(self, record: Record) -> None:
        event, time = record.event, record.time
        if record.launch > self.launch:
            self._begin_launch(record.launch)
        elif record.launch < self.launch:
            return  # by another clock, or late: it says nothing about this launch
        self.seen = time if self.seen is None else max(self.seen, time)
        match event:
            case ev.AttemptStarted():
                self.nodes, self.limit = event.nodes, event.end_time
            case ev.LaunchStarted():
                self.world_size = event.world_size
                self.nodes = event.nodes or self.nodes
            case ev.Resumed() | ev.Progress():
                self._reach(time, event.step)
            case ev.Finished():
                self.step = event.step or self.step
            case ev.Logged():
                self._reach(time, event.step)
                self._log(event)
            case ev.CheckpointCommitted():
                self.saves.append(SavedStep(time, event.step, event.seconds))
            case ev.ProbeMeasured():
                self.probe = event
            case ev.ProbeOff():
                self.probe_off = event.why
            case ev.StragglerSeen():
                self.slow[event.host] = event
            case ev.StragglerOver():
                self.slow.pop(event.host, None)
            case ev.Advanced():
                self.step = event.step if event.step is not None else self.step
            case _:
                pass

    def _reach(self, time: float, step: int) -> None:
        self.step = step
        if self._points and step < self._points[-1][1]:
            self._points.clear()  # it went back
        self._points.append((time, step))

    def _log(self, event: ev.Logged) -> None:
        if not self._loss or (self._loss not in event.values and "loss" not in self._loss):
            names = sorted(event.values, key=lambda name: (name != "loss", "loss" not in name))
            self._loss = names[0] if names else ""
        self.figures.update(event.values)
        if self._loss in event.values:
            self.losses.append(event.values[self._loss])
