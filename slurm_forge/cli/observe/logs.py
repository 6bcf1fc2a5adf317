"""``logs``: what the ranks of a run printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.options import RunOrJob, Runs

if TYPE_CHECKING:
    from slurm_forge.cli.observe.log_printing import Printer
    from slurm_forge.cli.observe.log_sources import RunOutput
    from slurm_forge.report.logs.errors import ErrorBlock
    from slurm_forge.report.logs.lines import Line, Source
    from slurm_forge.report.logs.merging import LineSelection
    from slurm_forge.run_directory import RunDirectory

_LINES = "200"
_LOOK_EVERY_S = 1.0
_LOOKS_PER_STATE = 5
#: What is searched for errors: the ends of files, and of so many.
_END = 1 << 19
_MOST_FILES = 32
_LAST = 5


def logs(
    run: RunOrJob,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only what this rank printed.")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Which attempt (default: the newest)."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep printing until the run ends or is held."),
    ] = False,
    errors: Annotated[
        bool, typer.Option("--errors", help="Only the errors, the first cause first.")
    ] = False,
    tail: Annotated[
        str,
        typer.Option("--tail", "-n", metavar="N|all", help="Number of last lines, or all."),
    ] = _LINES,
    moved_to: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Folder that the output was moved to."),
    ] = None,
    runs: Runs = None,
) -> None:
    """What the ranks printed, in one stream: by time, with the rank in front.

    Files are put together by the times that loggers write at the beginning of lines.  A line
    without one stays behind the line before it.

    \b
    Examples:
      slurm-forge logs tiny-gpt
      slurm-forge logs tiny-gpt --errors
      slurm-forge logs tiny-gpt --rank 3 --attempt 2 --tail all
      slurm-forge logs tiny-gpt --follow
    """
    from slurm_forge.cli.observe.log_printing import Printer
    from slurm_forge.cli.observe.log_sources import read_output
    from slurm_forge.cli.run_of_job import meant
    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.report.logs.merging import LineSelection

    most = _number(tail)
    if errors and follow:
        raise typer.BadParameter("--errors and --follow do not go together")
    directory = meant(run, runs)
    output = read_output(directory, moved_to)
    if not output.attempts:
        raise RunDirectoryError(
            f"{directory.name} has not been started yet: it has no output",
            next_step=f"Its state: slurm-forge status {run}",
        )
    number = attempt or output.attempts[-1].number
    sources = output.of_attempt(number, rank)
    selection = LineSelection(number, rank)
    printer = Printer(sources)
    if follow:
        _follow(directory, moved_to, output, _FollowedRank(attempt, rank), printer, most)
        return
    now = time.time()
    if errors:
        _errors(output, sources, selection, printer, now)
        return
    if most is None:
        shown = _all(sources, selection, printer, now)
    else:
        shown = _tail(sources, selection, printer, now, most)
    if shown:
        return
    if rank is not None and all(each.rank is None for each in sources):
        raise RunDirectoryError(
            f"no line of {sources[0].path} shows that rank {rank} printed it",
            next_step="All ranks write to this file.  Have srun put the rank in front of each "
            "line (srun_options: [--label] in the site file), or the program ([rank3]: …).",
        )
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    printer.note(f"attempt {number} printed nothing to {sources[0].path}{more}")


def _number(tail: str) -> int | None:
    """The value of ``--tail``; None is all."""
    if tail == "all":
        return None
    if not (tail.isascii() and tail.isdigit()) or len(tail) > 9:
        raise typer.BadParameter("a number of lines, or all", param_hint="--tail")
    return int(tail)


def _all(sources: Sequence[Source], selection: LineSelection, printer: Printer, now: float) -> int:
    from slurm_forge.cli.observe.log_files import stream
    from slurm_forge.report.logs.merging import merged

    readable = [each for each in sources if printer.can_read(each)]
    shown = printer.lines(merged((stream(each, now, printer.note) for each in readable), selection))
    printer.tell_undated("where the launch begins")
    return shown


def _tail(
    sources: Sequence[Source], selection: LineSelection, printer: Printer, now: float, most: int
) -> int:
    from slurm_forge.cli.observe.log_files import last_lines
    from slurm_forge.report.logs.merging import merged

    readable = [each for each in sources if printer.can_read(each)]
    # One more, to know whether there are more.
    ends = [last_lines(each, selection, most + 1, now, printer.note) for each in readable]
    printer.look_for_times(line for end in ends for line in end)
    lines = list(merged(ends, selection))
    if len(lines) > most:
        printer.note("earlier lines are not shown: --tail all")
    shown = printer.lines(lines[max(0, len(lines) - most) :])
    printer.tell_undated("where the file was last written")
    return shown


def _errors(
    output: RunOutput,
    sources: Sequence[Source],
    selection: LineSelection,
    printer: Printer,
    now: float,
) -> None:
    from slurm_forge.cli.observe.log_files import end_of, read_lines
    from slurm_forge.report.logs.errors import find_errors, first_first
    from slurm_forge.report.logs.failures import failures_of

    failures = failures_of(output.state, selection.attempt)
    failed = frozenset((each.launch, each.rank) for each in failures if each.rank is not None)
    ranks = {rank for _, rank in failed}
    for each in failures:
        printer.heading(each.text)
    # The ranks that failed first, and files of no single rank: their output says most.
    ordered = sorted(sources, key=lambda each: (each.rank not in ranks, each.rank or 0))
    blocks: list[ErrorBlock] = []
    last: list[Line] = []
    for source in ordered[:_MOST_FILES]:
        if not printer.can_read(source):
            continue
        texts, whole = end_of(source.path, _END, printer.note)
        lines = [*filter(selection.takes, read_lines(source, texts, now, whole=whole))]
        blocks += find_errors(lines)
        last = last or lines[-_LAST:]
    if len(ordered) > _MOST_FILES:
        printer.note(f"{len(ordered) - _MOST_FILES} more files were not searched: --rank N")
    for block in first_first(blocks, failed):
        printer.block(block)
    if not blocks:
        printer.note("the output contains no known error; the last lines:")
        printer.lines(last)


def _follow(
    run: RunDirectory,
    moved_to: Path | None,
    output: RunOutput,
    selection: _FollowedRank,
    printer: Printer,
    most: int | None,
) -> None:
    """The last lines, then what comes, until the run is at rest."""
    from slurm_forge.cli.observe.log_files import GrowingFile, is_compressed, last_lines, stream
    from slurm_forge.cli.observe.log_sources import read_output
    from slurm_forge.journal import RunStatus
    from slurm_forge.report.logs.merging import LineSelection

    newest = output.attempts[-1].number
    chosen = LineSelection(selection.attempt or newest, selection.rank)
    files: dict[str, GrowingFile] = {}
    lines: list[Line] = []
    for source in output.sources:
        if printer.can_read(source):
            if is_compressed(source.path):
                if all(each.number != chosen.attempt for each in source.attempts):
                    continue
                now = time.time()
                if most is None:
                    printer.lines(filter(chosen.takes, stream(source, now, printer.note)))
                else:
                    lines += last_lines(source, chosen, most, now, printer.note)
            elif most is None:
                files[source.path] = GrowingFile.from_beginning(source, time.time())
            else:
                files[source.path], last = GrowingFile.from_end(source, time.time())
                lines += last
    shown = sorted(filter(selection.takes, lines), key=lambda line: line.time)
    if selection.attempt is None:
        shown = [line for line in shown if line.attempt == newest]
    printer.lines(shown[-most:] if most else ())
    try:
        for look in count(1):
            status = output.state.status
            over = status.is_at_rest or status is RunStatus.FINISHED
            new = [line for file in files.values() for line in file.poll()]
            printer.lines(sorted(filter(selection.takes, new), key=lambda line: line.time))
            if over:
                return
            sys.stdout.flush()
            _rest(_LOOK_EVERY_S)
            if look % _LOOKS_PER_STATE and not run.is_done():
                continue
            output = read_output(run, moved_to)
            for source in output.sources:
                if source.path in files:
                    files[source.path].know(source, time.time())
                elif not is_compressed(source.path):  # what is compressed meanwhile has been read
                    files[source.path] = GrowingFile.from_beginning(source, time.time())
    except KeyboardInterrupt:
        return


@dataclass(frozen=True, slots=True)
class _FollowedRank:
    """What is followed: an attempt (None: whichever is the newest), a rank (None: all)."""

    attempt: int | None
    rank: int | None

    def takes(self, line: Line) -> bool:
        return self.attempt in (None, line.attempt) and self.rank in (None, line.rank)


def _rest(seconds: float) -> None:
    time.sleep(seconds)
