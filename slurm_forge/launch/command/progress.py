"""How far a program is that tells nobody: by its files, its output, or the time it has run.

The newest of the files that a program writes: its checkpoints, its progress.
"""

from __future__ import annotations

import contextlib
import glob
import heapq
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePath

from slurm_forge.journal import RunState
from slurm_forge.journal.events import Advanced
from slurm_forge.spec.launchers import Convention, ProgramSpec

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
    """Whether the program is further than ever, by the best of what it can be told by.  Pure.

    ``before`` is what was there when this start began, ``furthest`` the highest step of any start.
    A file with a number in its name counts by that number, one without by its time: a program that
    writes the same numbers again gets nowhere.  ``is_reported``: of this start it was said
    already, which is enough where only time tells.
    """
    if program.progress_file or program.checkpoint_glob:
        match = now.newest
        if match is None or (before.newest is not None and match.order <= before.newest.order):
            return None
        if match.number is not None and match.number <= furthest:
            return None
        return Advanced(what=match.path.name[:200], step=match.number)
    if program.step_pattern:
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

    ``before`` is what was there before the program was started: it may be quick.
    """

    def __init__(
        self,
        program: ProgramSpec,
        folder: Path,
        state: RunState,
        printed: Callable[[], int | None],
        before: ProgressFile | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._folder = folder
        self._printed = printed
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
        printed = self._printed()
        if printed is not None:
            return printed
        return None if self._furthest < 0 else self._furthest

    @property
    def printed(self) -> int | None:
        """The last step that its output told; None where no step is looked for in it."""
        return self._printed()

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

    def _sample(self) -> None:
        now = ProgressSample(
            newest=self._newest(),
            printed=self._printed(),
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


_NUMBER = re.compile(r"[0-9]{1,18}")
#: Of what kind a file is, which may hold a number too: ``.h5``, ``.pt2``.
_KIND = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,11}\Z")
_MOST = 100_000
#: transformers writes it into a checkpoint that was begun at a SIGTERM and is not whole yet
#: (src/transformers/trainer_jit_checkpoint.py).
_HF_INCOMPLETE = "checkpoint-is-incomplete.txt"


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """A file or folder: ``number`` is the last one in its name, such as the 400 of checkpoint-400.

    That of an ending (``.h5``) counts only where there is no other.  ``changed`` in nanoseconds
    since the epoch.
    """

    path: Path
    number: int | None
    changed: int

    @property
    def order(self) -> tuple[int, int, str]:
        """By number; what has none comes before, by time."""
        return (-1 if self.number is None else self.number, self.changed, str(self.path))


def find_matches(pattern: str, folder: Path) -> tuple[ProgressFile, ...]:
    """What a glob finds, from ``folder`` on.  Nothing in it is a shell's; ``**`` goes deeper."""
    matches: list[ProgressFile] = []
    glob_pattern = str(Path(pattern).expanduser())
    # pathlib's own takes no absolute pattern.
    names = glob.iglob(glob_pattern, root_dir=folder, recursive=True)  # noqa: PTH207
    # Of too many the furthest: each costs a question to the file system.
    for name in heapq.nlargest(_MOST, names, key=_furthest):
        path = folder / name
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            continue  # gone since
        matches.append(ProgressFile(path.absolute(), _number(name), changed))
    return tuple(matches)


def _furthest(name: str) -> int:
    number = _number(name)
    return -1 if number is None else number


def _number(name: str) -> int | None:
    base = PurePath(name).name
    numbers = _NUMBER.findall(_KIND.sub("", base)) or _NUMBER.findall(base)
    return int(numbers[-1]) if numbers else None


def newest(
    matches: Iterable[ProgressFile], *, but: Callable[[Path], bool] = lambda _: False
) -> ProgressFile | None:
    """The one with the highest number in its name, else the one changed last."""
    for match in sorted(matches, key=lambda each: each.order, reverse=True):
        if not but(match.path):
            return match
    return None


def incomplete(convention: Convention) -> Callable[[Path], bool]:
    """Whether a checkpoint says of itself that it is not whole."""
    if convention is Convention.HF:
        return lambda path: (path / _HF_INCOMPLETE).exists()
    return lambda path: False
