"""Progress bars of long commands: on standard error, and only if that is a terminal.

A bar disappears at the end of the command, so that none of it is left among the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: The most updates in a second that a terminal on a slow connection gets.
_PER_SECOND = 4


class Bar:
    """A bar and lines above it; without a terminal only the lines."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress = progress
        self._task = task

    def reach(self, done: int, total: int) -> None:
        """``done`` of ``total`` is done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def line(self, text: str) -> None:
        """Print a line that stays, on standard error."""
        if self._progress is None:
            typer.echo(text, err=True)
            return
        from rich.text import Text

        # As Text: markup in foreign words stays what it is.
        self._progress.console.print(Text(text), soft_wrap=True, highlight=False)


@contextmanager
def bar(label: str, *, of_bytes: bool = False) -> Iterator[Bar]:
    """Show a bar for as long as the block takes.

    Args:
        label: What is being done, in a word or two.
        of_bytes: Whether ``reach`` counts bytes; otherwise it counts items.

    Yields:
        The bar.  While nothing was reached, it shows no more than the time that has passed.
    """
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    amount = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        refresh_per_second=_PER_SECOND,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        yield Bar(progress, progress.add_task(label, total=None))


def counted(shown: Bar, check: Callable[[], None], total: int) -> Callable[[], None]:
    """``check`` as before, which also counts how often it was called on a bar."""
    count = -1

    def checked() -> None:
        nonlocal count
        check()
        count += 1
        shown.reach(min(count, total), total)

    return checked
