"""Prints what happens while it happens: lines, and a progress bar on a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Protocol

import typer

from slurm_forge.cli.observe.run_reading import RunReader
from slurm_forge.journal import Record
from slurm_forge.journal import events as ev
from slurm_forge.report.status.event_lines import happening
from slurm_forge.report.text import number

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Without a terminal, how often a line reports the step.
_STEP_LINE_EVERY_S = 30.0
#: Epochs of a small dataset follow each other fast: one in so many seconds has a line.
_EPOCH_LINE_EVERY_S = 10.0


class Screen(Protocol):
    """Where a watcher writes."""

    def line(self, text: str) -> None:
        """Something happened."""

    def step(self, step: int, total: int | None = None) -> None:
        """Training is at this step, of ``total`` if known."""


class PlainScreen:
    """Lines only, for files, pipes and logs; the step is printed now and then."""

    def __init__(
        self,
        echo: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._echo = echo
        self._clock = clock
        self._next = clock() + _STEP_LINE_EVERY_S

    def line(self, text: str) -> None:
        """Print it."""
        self._echo(text)

    def step(self, step: int, total: int | None = None) -> None:
        """Print it if the last one is some time ago."""
        if self._clock() >= self._next:
            self._next = self._clock() + _STEP_LINE_EVERY_S
            of = "" if total is None else f" of {number(total)}"
            self._echo(f"step {number(step)}{of}")


class _BarScreen:
    """A bar at the bottom, lines above it."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def line(self, text: str) -> None:
        from rich.text import Text

        # As Text: markup in foreign words stays what it is.
        self._progress.console.print(Text(text), soft_wrap=True)

    def step(self, step: int, total: int | None = None) -> None:
        self._progress.update(self._task, completed=step, total=total, refresh=True)


@contextmanager
def screen_for(stream: IO[str]) -> Iterator[Screen]:
    """A bar on a terminal, plain lines anywhere else."""
    if not stream.isatty():
        yield PlainScreen(typer.echo)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The ranks write to the same terminal on their own: their output is not ours to redirect.
    with Progress(
        *columns, console=Console(file=stream), redirect_stdout=False, redirect_stderr=False
    ) as progress:
        yield _BarScreen(progress, progress.add_task("step", total=None))


class RunFollower:
    """Keeps reading and writes to a screen."""

    def __init__(self, gathering: RunReader, screen: Screen) -> None:
        self._gathering = gathering
        self._screen = screen
        self._next_epoch_line = -math.inf

    def poll(self) -> None:
        """Write what is new since the last poll."""
        for record in self._gathering.poll():
            line = happening(record)
            if line is not None and not self._is_too_soon(record):
                self._screen.line(line)
            step = _step_of(record)
            if step is not None:
                self._screen.step(step, self._gathering.total_steps)

    def _is_too_soon(self, record: Record) -> bool:
        """Whether it is the end of an epoch right after another one's."""
        if not isinstance(record.event, ev.EpochEnded):
            return False
        if record.time < self._next_epoch_line:
            return True
        self._next_epoch_line = record.time + _EPOCH_LINE_EVERY_S
        return False


def _step_of(record: Record) -> int | None:
    event = record.event
    if isinstance(event, (ev.Resumed, ev.Progress, ev.CheckpointCommitted, ev.Finished)):
        return event.step
    return None
