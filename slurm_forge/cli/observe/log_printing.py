"""Prints lines of output: with the rank in front, in its colour if the terminal has colours."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from slurm_forge.report.logs.errors import ErrorBlock
from slurm_forge.report.logs.lines import Line, Source
from slurm_forge.report.text import clean, clock, number, printed

if TYPE_CHECKING:
    from rich.console import Console

#: Readable on light and on dark; ranks that are neighbours differ.
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


class Printer:
    """Prints to standard output; what is not output of the run goes to standard error."""

    def __init__(self, sources: Sequence[Source]) -> None:
        ranks = {each.rank for each in sources}
        self._prefixed = len(ranks) > 1
        self._width = max((len(str(rank)) for rank in ranks if rank is not None), default=1)
        self._several = len(sources) > 1
        self._dated: dict[str, bool] = {}
        self._launch: tuple[int, int | None] | None = None
        self._console = _console()

    def can_read(self, source: Source) -> bool:
        """Whether the file can be read; prints what is wrong with it otherwise."""
        from slurm_forge.cli.observe.log_files import open_log

        try:
            open_log(source.path).close()
        except OSError as error:
            self.note(f"{source.path} can't be read: {error.strerror or error}")
            return False
        return True

    def lines(self, lines: Iterable[Line]) -> int:
        """Print them, each launch below a heading; how many there were."""
        count = 0
        for line in lines:
            count += 1
            self.look_for_times((line,))
            self._begin(line)
            self._print(line)
        return count

    def look_for_times(self, lines: Iterable[Line]) -> None:
        """Remember which files have times in their lines, whether these are shown or not."""
        for line in lines:
            path = line.source.path
            self._dated[path] = self._dated.get(path, False) or line.dated

    def heading(self, text: str) -> None:
        """Print a line of our own between the output."""
        self._write("", text, "bold")

    def block(self, block: ErrorBlock) -> None:
        """One error: whose, when and where, and its lines."""
        first = block.lines[0]
        ranks = [number(rank) for rank in block.ranks if rank is not None]
        shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        who = f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}  " if ranks else ""
        dated = any(line.dated for line in block.lines) or self._dated.get(first.source.path)
        when = f"{clock(first.time)}  " if dated else ""
        what = f"{clean(block.label, 60)}  " if block.label else ""
        follows = "only lost another rank  " if block.follows else ""
        self.heading("")
        self.heading(f"{who}{when}{what}{follows}{clean(first.source.path, 300)}")
        for line in block.lines[-1:] if block.follows else block.lines:
            self._print(line)

    def tell_undated(self, where: str) -> None:
        """Name those of several files whose lines have no times: their lines are put ``where``."""
        silent = sorted(path for path, dated in self._dated.items() if not dated)
        if silent and self._several:
            more = f" and {len(silent) - 2} more" if len(silent) > 2 else ""
            self.note(f"no times in {', '.join(silent[:2])}{more}: their lines are put {where}")

    def note(self, text: str) -> None:
        """Something about the output, for a person."""
        typer.echo(clean(text), err=True)

    def _begin(self, line: Line) -> None:
        launch = (line.attempt, line.launch)
        if launch != self._launch:
            self._launch = launch
            attempt = next(a for a in line.source.attempts if a.number == line.attempt)
            of = "" if line.launch is None else f", launch {line.launch}"
            text = f"-- attempt {line.attempt}{of}, job {clean(attempt.job, 40)}"
            self._write("", text, "dim")

    def _print(self, line: Line) -> None:
        prefix = ""
        if self._prefixed:
            rank = "" if line.rank is None else str(line.rank)
            prefix = f"{rank:>{self._width}} | "
        colour = "" if line.rank is None else _COLOURS[line.rank % len(_COLOURS)]
        self._write(prefix, printed(line.text), colour)

    def _write(self, prefix: str, text: str, style: str) -> None:
        if self._console is None:
            sys.stdout.write(f"{prefix}{text}\n")
            return
        from rich.text import Text

        shown = Text.assemble((prefix, style), text) if prefix else Text(text, style=style)
        self._console.print(shown, soft_wrap=True, highlight=False)


def _console() -> Console | None:
    """Rich's, where there is a terminal; it respects NO_COLOR and TERM by itself."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return Console(file=sys.stdout)
