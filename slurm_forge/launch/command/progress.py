"""How far a program is: by its files, its output, or the time it has run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from slurm_forge.journal import RunState
from slurm_forge.journal.events import Advanced
from slurm_forge.launch.command.checkpoint_files import (
    CheckpointWatch,
    ProgressFile,
    find_matches,
    incomplete,
    newest,
)
from slurm_forge.launch.command.metrics import MetricHistory
from slurm_forge.recovery.incident.launch_facts import ProgramCheckpoints
from slurm_forge.spec.launchers import ProgramSpec

_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """What is to be seen of a program's progress: its newest file, the last step it printed."""

    newest: ProgressFile | None = None
    printed: int | None = None
    ran: timedelta = timedelta(0)


def sample_progress(program: ProgramSpec, folder: Path) -> ProgressFile | None:
    """The newest file that tells progress; None where there is none, or nothing is to be seen."""
    pattern = program.progress_file or program.checkpoint_glob
    if pattern is None:
        return None
    return newest(find_matches(pattern, folder), but=incomplete(program.convention))


def advanced(
    program: ProgramSpec,
    before: ProgressSample,
    now: ProgressSample,
    furthest: int,
    *,
    is_reported: bool,
) -> Advanced | None:
    """Whether the program is further than ever, by the best evidence that there is.

    A file with a number in its name counts by that number, one without by its time: a program that
    writes the same numbers again makes no progress.  The number in the name of a progress file is
    a step only if the output prints none: it may be a time or an epoch.

    Args:
        program: What shows progress.
        before: What there was when this start began.
        now: What there is now.
        furthest: The highest step of any start.
        is_reported: Progress of this start was reported before, which is enough where only the
            running time shows progress.

    Returns:
        The event; None if there is no new progress.
    """
    if program.progress_file or program.checkpoint_glob:
        match = now.newest
        if match is None or (before.newest is not None and match.order <= before.newest.order):
            return None
        step = match.number
        if program.progress_file and program.reads_steps and now.printed is not None:
            step = now.printed
        if step is not None and step <= furthest:
            return None
        return Advanced(what=match.path.name[:200], step=step)
    if program.reads_steps:
        if now.printed is None or now.printed <= furthest:
            return None
        return Advanced(what=f"step {now.printed} of its output", step=now.printed)
    if is_reported or now.ran < program.progress_after:
        return None
    minutes = now.ran.total_seconds() / 60
    return Advanced(what=f"it ran for {minutes:.0f} min")


def furthest_of(state: RunState) -> int:
    """The highest step that any start of the program has come to by its own account; -1 if none."""
    steps = [
        launch.step
        for attempt in state.attempts
        for launch in attempt.launches
        if launch.advanced and launch.step is not None
    ]
    return max(steps, default=-1)


class ProgressWatch:
    """Looks every few seconds, on a thread: a file system may take its time to answer.

    ``metrics`` is what the program has printed; ``before`` the newest file that was there before it
    was started, which it may replace at once, as ``checkpoints`` were looked at before.
    """

    def __init__(
        self,
        program: ProgramSpec,
        folder: Path,
        state: RunState,
        metrics: Callable[[], MetricHistory],
        before: ProgressFile | None,
        checkpoints: CheckpointWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._folder = folder
        self._metrics = metrics
        self._checkpoints = checkpoints
        self._found = ProgramCheckpoints(refusal="the file system does not answer")
        self._clock = clock
        self._began = clock()
        self._furthest = furthest_of(state)
        self._is_reported = False
        self._lock = threading.Lock()
        self._news: list[Advanced] = []
        self._over = threading.Event()
        self._before = ProgressSample(newest=before)
        self._thread = threading.Thread(target=self._watch, name="forge-progress", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int | None:
        """How far it is now, where its output or its files tell."""
        printed = self.printed
        if printed is not None:
            return printed
        return None if self._furthest < 0 else self._furthest

    @property
    def printed(self) -> int | None:
        """The last step that its output told; None where no step is looked for in it."""
        return self._metrics().step

    @property
    def found(self) -> ProgramCheckpoints:
        """What the program could go back to, once the last look was taken."""
        return self._found

    def news(self) -> Iterable[Advanced]:
        """What has come since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def end(self, wait_s: float = 2.0) -> Iterable[Advanced]:
        """The program has ended: a last look, if it can be had in time."""
        self._over.set()
        self._thread.join(wait_s)
        return self.news()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._sample()
        self._sample()
        if self._checkpoints is not None:
            metrics = self._metrics()
            self._found = self._checkpoints.found(metrics.healthy, metrics.step)

    def _sample(self) -> None:
        metrics = self._metrics()
        if self._checkpoints is not None:
            self._checkpoints.sample(metrics.healthy, metrics.step)
        if metrics.bad:
            return  # what is trained and saved now may have to be thrown away
        now = ProgressSample(
            newest=self._newest(),
            printed=metrics.step,
            ran=timedelta(seconds=self._clock() - self._began),
        )
        advance = advanced(
            self._program, self._before, now, self._furthest, is_reported=self._is_reported
        )
        if advance is None:
            return
        self._is_reported = True
        self._before = now
        self._furthest = self._furthest if advance.step is None else advance.step
        with self._lock:
            self._news.append(advance)

    def _newest(self) -> ProgressFile | None:
        with contextlib.suppress(OSError):
            return sample_progress(self._program, self._folder)
        return None
