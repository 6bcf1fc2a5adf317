"""``status`` without a run: a line for every run or sweep in a folder.  Fields are keys of
``--json``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_forge.report import text as t
from slurm_forge.slurm.records import is_slurm_job

if TYPE_CHECKING:  # a thousand lines that are known already need nothing of a journal
    from slurm_forge.report.status.report_facts import RunFacts
    from slurm_forge.report.status.status import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run in one line; ``age_s`` is the time since anything was written about it.

    ``status`` is as in ``status RUN``, or ``unreadable`` (``words`` says why).
    """

    run: str
    path: str
    status: str
    words: str
    job: str
    step: int | None
    total_steps: int | None
    age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSweep:
    """A sweep in one line: how many of its runs there are of each status, and their names."""

    sweep: str
    counts: dict[str, int]
    runs: tuple[str, ...]
    age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The runs of ``folder``, newest first; ``elsewhere`` are other folders that hold runs.

    The runs of ``sweeps`` are among the runs; the table has a line for the sweep instead.
    """

    folder: str
    runs: tuple[ListedRun, ...]
    elsewhere: tuple[str, ...]
    sweeps: tuple[ListedSweep, ...] = ()


def unreadable(name: str, path: str, why: str) -> ListedRun:
    """The line of a run whose files can't be read."""
    return ListedRun(
        run=name,
        path=path,
        status="unreadable",
        words=why,
        job="",
        step=None,
        total_steps=None,
        age_s=None,
    )


def listing(
    folder: str,
    lines: Iterable[ListedRun],
    *,
    elsewhere: Sequence[str] = (),
    sweeps: Mapping[str, Sequence[str]] | None = None,
) -> Listing:
    """The lines in order; those that nothing is known of come last.

    ``sweeps`` are the names of the runs of each sweep.
    """
    runs = sorted(lines, key=lambda one: (one.age_s is None, one.age_s or 0.0, one.run))
    listed_sweeps = []
    for name, members in (sweeps or {}).items():
        own = [run for run in runs if run.run in set(members)]
        counts = Counter(run.status for run in own)
        age = own[0].age_s if own else None
        listed_sweeps.append(
            ListedSweep(sweep=name, counts=dict(counts), runs=tuple(members), age_s=age)
        )
    return Listing(
        folder=folder,
        runs=tuple(runs),
        elsewhere=tuple(elsewhere),
        sweeps=tuple(listed_sweeps),
    )


def listing_text(listing: Listing) -> str:
    """A table: name, status, step, job (of a chain the newest), age; of a sweep its counts."""
    swept = {name for sweep in listing.sweeps for name in sweep.runs}
    rows: list[ListedRun | ListedSweep] = [*listing.sweeps]
    rows += [run for run in listing.runs if run.run not in swept]
    rows.sort(key=lambda one: (one.age_s is None, one.age_s or 0.0))
    widths = _widths([row for row in rows if isinstance(row, ListedRun)])
    lines = [
        _line(row, widths) if isinstance(row, ListedRun) else _sweep_line(row, widths)
        for row in rows
    ]
    if not lines:
        lines.append(f"no runs in {t.clean(listing.folder, 300)}")
    lines += [
        f"more runs in {t.clean(other, 300)}: slurm-forge status --runs {t.clean(other, 300)}"
        for other in listing.elsewhere
    ]
    return "\n".join(lines) + "\n"


def listed(facts: RunFacts, status: Status) -> ListedRun:
    """The line of a run."""
    newest = max((record.time for record in facts.records), default=None)
    return ListedRun(
        run=status.run,
        path=status.path,
        status=status.status,
        words=status.words,
        job=status.job,
        step=status.step,
        total_steps=status.total_steps,
        age_s=None if newest is None else max(0.0, facts.now - newest),
    )


def _cells(one: ListedRun) -> tuple[str, ...]:
    step = "" if one.step is None else f"step {t.number(one.step)}"
    if step and one.total_steps is not None:
        step += f" of {t.number(one.total_steps)}"
    job = f"job {t.clean(one.job, 40)}" if is_slurm_job(one.job) else ""
    return t.clean(one.run, 64), one.status, step, job


def _sweep_line(one: ListedSweep, widths: Sequence[int]) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in sorted(one.counts.items()))
    name = t.clean(one.sweep, 64).ljust(widths[0] if widths else 0)
    age = "" if one.age_s is None else f"{t.span(one.age_s)} ago"
    return "   ".join([name, f"sweep of {len(one.runs)}: {counts}", age]).rstrip()


def _widths(runs: Sequence[ListedRun]) -> tuple[int, ...]:
    columns = zip(*(_cells(one) for one in runs), strict=True)
    return tuple(max(len(cell) for cell in column) for column in columns)


def _line(one: ListedRun, widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(_cells(one), widths, strict=True)]
    if one.status == "unreadable":
        last = t.clean(one.words, 160)
    else:
        last = "" if one.age_s is None else f"{t.span(one.age_s)} ago"
    return "   ".join([*cells, last]).rstrip()
