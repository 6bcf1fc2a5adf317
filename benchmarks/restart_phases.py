"""Where each second of a start goes, from the queue to the first new step, as rank 0 sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.marks import What, earliest, read_marks
from benchmarks.tables import cell, paired_ratio, plain, spread, table
from slurm_forge.journal import events as ev
from slurm_forge.journal import read_journal
from slurm_forge.run_directory import RunDirectory

_TORCHRUN = "torch.distributed.run"
_AGENT = "slurm_forge.process agent"
_SUPERVISOR = "slurm_forge.process supervise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a phase was over, and the processor time of rank 0's process by then, if it is its."""

    title: str
    time: float
    cpu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """The second start of a job.  ``moments`` are in order; each is the end of a phase."""

    queued: float
    moments: tuple[Moment, ...]
    load_average: float

    def seconds(self, title: str) -> float | None:
        """How long the phase took; None where this way has no such phase."""
        before = self.queued
        for each in self.moments:
            if each.title == title:
                return each.time - before
            before = each.time
        return None

    def cpu(self, title: str) -> float | None:
        """How much processor time rank 0 used in it."""
        before = 0.0
        for each in self.moments:
            if each.title == title:
                return None if each.cpu is None else each.cpu - before
            before = before if each.cpu is None else each.cpu
        return None

    @property
    def total(self) -> float:
        """From the queue to the first step."""
        return self.moments[-1].time - self.queued

    @property
    def own(self) -> float:
        """From the batch script to the first step: what is not Slurm's delay."""
        return self.moments[-1].time - self.moments[0].time

    @property
    def rank_cpu(self) -> float:
        """Processor time of rank 0's process up to its first step."""
        return self.moments[-1].cpu or 0.0


QUEUE = "in the queue, to the batch script"
SCRIPT = "batch script, to the supervisor's interpreter"
CLAIM = "supervisor: imports, claim"
LAUNCH = "supervisor: to srun"
SRUN = "srun, to the first interpreter of rank 0"
LAUNCHER = "torchrun: imports, meeting, its worker's interpreter"
BEFORE = "imports before torch"
TORCH = "import torch"
REST = "imports after torch"
MET = "preflight, process groups"
BUILT = "model, optimizer, DDP"
LOADED = "state loaded"
STEPPED = "first step"
_ROWS = (
    QUEUE, SCRIPT, CLAIM, LAUNCH, SRUN, LAUNCHER, BEFORE, TORCH, REST, MET, BUILT, LOADED, STEPPED
)  # fmt: skip


def read_cold_start(
    folder: Path, run: RunDirectory | None, *, queued: float, load_average: float
) -> ColdStart:
    """Of the second start of a job (``SLURM_RESTART_COUNT`` 1)."""
    marks = [each for each in read_marks(folder) if each.start == 1]
    script = earliest(marks, What.SCRIPT).time
    met, built = earliest(marks, What.MET), earliest(marks, What.BUILT)
    stepped = earliest(marks, What.STEP)
    found = [Moment(title=QUEUE, time=script)]
    told = _interpreters(folder)
    if run is None:
        launchers = [each for each in told if _TORCHRUN in each.argv]
        worker = [each for each in told if _TORCHRUN not in each.argv]
        began = _of(worker, "interpreter")
        before = began.parents_cpu
        imported, loaded = earliest(marks, What.IMPORTED), earliest(marks, What.LOADED)
        found += [
            Moment(title=SRUN, time=_of(launchers or worker, "interpreter").time),
            *([Moment(title=LAUNCHER, time=began.time, cpu=before)] if launchers else []),
            _moment(BEFORE, _of(worker, "import torch"), before),
            # Behind it is the script's own: DDP and the loader.
            Moment(title=TORCH, time=imported.time, cpu=before + imported.cpu),
            Moment(title=MET, time=met.time, cpu=before + met.cpu),
            Moment(title=BUILT, time=built.time, cpu=before + built.cpu),
            Moment(title=LOADED, time=loaded.time, cpu=before + loaded.cpu),
        ]
    else:
        records, _ = read_journal(run)
        mine = [each for each in records if each.attempt == 2]
        begun = next(each.time for each in mine if isinstance(each.event, ev.AttemptStarted))
        launched = next(each.time for each in mine if isinstance(each.event, ev.LaunchStarted))
        resumed = next(each.time for each in mine if isinstance(each.event, ev.Resumed))
        supervisor = [each for each in told if _SUPERVISOR in each.argv or "supervise" in each.argv]
        agent = [each for each in told if _AGENT in each.argv]
        forked = _of(agent, "fork")
        before = forked.cpu
        found += [
            Moment(title=SCRIPT, time=max(e.time for e in supervisor if e.what == "interpreter")),
            Moment(title=CLAIM, time=begun),
            Moment(title=LAUNCH, time=launched),
            Moment(title=SRUN, time=_of(agent, "interpreter").time, cpu=0.0),
            _moment(BEFORE, _of(agent, "import torch")),
            _moment(TORCH, _of(agent, "import slurm_forge.training.rank.main")),
            _moment(REST, forked),
            # The worker's own clock of processor time begins with it.
            Moment(title=MET, time=met.time, cpu=before + met.cpu),
            Moment(title=BUILT, time=built.time, cpu=before + built.cpu),
            Moment(title=LOADED, time=resumed),
        ]
    found.append(Moment(title=STEPPED, time=stepped.time, cpu=before + stepped.cpu))
    return ColdStart(queued=queued, moments=tuple(found), load_average=load_average)


def print_phases(found: Mapping[str, list[ColdStart]]) -> None:
    """One column per way; the totals, and their ratio to the first way round by round."""
    ways = [way for way, rounds in found.items() if rounds]
    rows = [
        (title, *(cell(spread(each.seconds(title) for each in found[way])) for way in ways))
        for title in _ROWS
    ]
    totals: tuple[tuple[str, Callable[[ColdStart], float]], ...] = (
        ("batch script to first step", lambda each: each.own),
        ("queue to first step", lambda each: each.total),
        ("cpu s of rank 0's processes", lambda each: each.rank_cpu),
    )
    rows += [
        (title, *(cell(spread(of(each) for each in found[way])) for way in ways))
        for title, of in totals
    ]
    print(table(("seconds: median (least-most)", *ways), rows))
    rows = [
        (title, *(cell(spread(each.cpu(title) for each in found[way])) for way in ways))
        for title in (LAUNCHER, BEFORE, TORCH, REST, MET, BUILT, STEPPED)
    ]
    print("\nprocessor seconds of rank 0's processes (torchrun's own are among them)")
    print(table(("", *ways), rows))
    if ways[1:]:
        print(f"\nas multiples of {ways[0]}, round by round")
        first = found[ways[0]]
        print(
            table(
                ("", *ways[1:]),
                [
                    (
                        title,
                        *(
                            cell(
                                paired_ratio(
                                    [of(each) for each in found[way]], [of(each) for each in first]
                                )
                            )
                            for way in ways[1:]
                        ),
                    )
                    for title, of in totals
                ],
            )
        )


def phases_as_json(found: Mapping[str, list[ColdStart]]) -> dict[str, Any]:
    """Every moment of every round, beside what they come to."""
    return {
        way: {
            "seconds": {t: plain(spread(each.seconds(t) for each in rounds)) for t in _ROWS},
            "total": plain(spread(each.total for each in rounds)),
            "cpu": {t: plain(spread(each.cpu(t) for each in rounds)) for t in _ROWS},
            "own": plain(spread(each.own for each in rounds)),
            "rounds": [asdict(each) for each in rounds],
        }
        for way, rounds in found.items()
    }


# -- facts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Told:
    """A line of ``interpreter_marks``."""

    what: str
    argv: str
    time: float
    cpu: float
    parents_cpu: float


def _interpreters(folder: Path) -> list[_Told]:
    """Those of the second start."""
    path = folder / "interpreters.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        _Told(what, argv, time, cpu, parents)
        for what, argv, time, cpu, start, parents in lines
        if start == 1
    ]


def _of(told: list[_Told], what: str, argv: str = "") -> _Told:
    """The first; ``ValueError`` where there is none."""
    found = min(
        (each for each in told if each.what == what and argv in each.argv),
        key=lambda each: each.time,
        default=None,
    )
    if found is None:
        raise ValueError(f"no interpreter told of {what!r} {argv}")
    return found


def _moment(title: str, told: _Told, before: float = 0.0) -> Moment:
    return Moment(title=title, time=told.time, cpu=before + told.cpu)
