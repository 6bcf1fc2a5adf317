"""``status SWEEP``: the runs of a sweep as one thing.  Fields are keys of ``--json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_forge.report import text as t
from slurm_forge.report.status.run_listing import ListedRun

#: In this order; what is not listed (``unreadable``) comes last.
_ORDER = (
    "finished", "running", "requeued", "submitted", "new", "held", "stopped", "cancelled",
)  # fmt: skip
#: What a person may want to see to.
_RESTS = ("held", "stopped", "cancelled", "unreadable")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRunStatus:
    """A run of the sweep: the settings that differ from the others', and its state."""

    run: str
    settings: dict[str, Any]
    status: str
    words: str
    job: str
    step: int | None
    total_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """A sweep: how many of its runs there are of each ``status``, and each of them.

    ``done`` is whether all are finished; ``limit`` is how many run at once, None is all; ``next``
    is what a person can do.
    """

    sweep: str
    path: str
    done: bool
    limit: int | None
    counts: dict[str, int]
    runs: tuple[SweepRunStatus, ...]
    next: tuple[str, ...]


def sweep_status(
    name: str,
    path: str,
    reference: str,
    limit: int | None,
    runs: Sequence[tuple[dict[str, Any], ListedRun]],
) -> SweepStatus:
    """The sweep from the lines of its runs, each with its own settings."""
    counted = Counter(line.status for _, line in runs)
    known = [*_ORDER, *sorted(set(counted) - set(_ORDER))]
    counts = {status: counted[status] for status in known if counted[status]}
    resting = [line for _, line in runs if line.status in _RESTS]
    steps = []
    if resting:
        steps = [
            f"what happened: slurm-forge explain {_beside(reference, resting[0].run)}",
            f"continue all that is held, stopped or cancelled: slurm-forge requeue {reference}",
        ]
    return SweepStatus(
        sweep=name,
        path=path,
        done=counted["finished"] == len(runs),
        limit=limit,
        counts=counts,
        runs=tuple(
            SweepRunStatus(
                run=line.run,
                settings=settings,
                status=line.status,
                words=line.words,
                job=line.job,
                step=line.step,
                total_steps=line.total_steps,
            )
            for settings, line in runs
        ),
        next=tuple(steps),
    )


def sweep_text(sweep: SweepStatus) -> str:
    """One line about all, one for each run, why those rest that do, what to do next."""
    total = len(sweep.runs)
    counts = ", ".join(f"{count} {status}" for status, count in sweep.counts.items())
    limit = "" if sweep.limit is None else f" ({sweep.limit} at once)"
    lines = [f"{t.clean(sweep.sweep, 64)}: {total} runs{limit}: {counts}"]
    rows = [_cells(run) for run in sweep.runs]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for run, row in zip(sweep.runs, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "   ".join(cells).rstrip())
        if run.status in _RESTS:
            lines.append(f"      {t.clean(run.words, 300)}")
    lines += [f"next: {each}" for each in sweep.next]
    return "\n".join(lines) + "\n"


def _cells(run: SweepRunStatus) -> tuple[str, ...]:
    settings = " ".join(f"{key}={_shown(value)}" for key, value in run.settings.items())
    step = "" if run.step is None else f"step {t.number(run.step)}"
    if step and run.total_steps is not None:
        step += f" of {t.number(run.total_steps)}"
    return t.clean(run.run, 64), run.status, t.clean(settings, 120), step


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _beside(reference: str, run: str) -> str:
    """What to type to mean a run that lies beside what ``reference`` means."""
    folder, slash, _ = reference.rpartition("/")
    return f"{folder}{slash}{run}"
