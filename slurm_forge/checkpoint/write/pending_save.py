"""A save in progress: its state and its result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from slurm_forge.checkpoint.write.replicas import RankMismatch
from slurm_forge.errors import CheckpointError
from slurm_forge.store.identity import CheckpointName

#: Called with the result of a save before its waiters continue; on the save's thread.
After: TypeAlias = "Callable[[Saved | CheckpointError], None]"


@dataclass(frozen=True, slots=True)
class Saved:
    """A published checkpoint.  ``disagreeing`` names JSON that differs between ranks.

    Of that, rank 0's was saved; ``own`` names the objects of which each rank's was.  ``blocked`` is
    how long ``begin`` held up this rank, ``duration`` from then until it was on disk.
    ``findings`` name what is unhealthy in it, on any rank: it exists, but is not to be resumed
    from.  ``mismatch`` describes how ranks differ that should be equal.
    """

    name: CheckpointName
    path: Path
    size: int
    blocked: timedelta
    duration: timedelta
    disagreeing: tuple[str, ...]
    own: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    mismatch: RankMismatch | None = None


class PendingSave:
    """A save that has begun; it has the same result on all ranks."""

    def __init__(self, name: CheckpointName) -> None:
        self.name = name
        self._end: Future[Saved] = Future()

    def done(self) -> bool:
        """Whether it has ended on this rank: on others it may not have yet."""
        return self._end.done()

    def result(self) -> Saved:
        """Wait for the end; raises the errors of ``CheckpointWriter.begin``."""
        return self._end.result()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, whatever the result; False if it did not end within the time."""
        try:
            self._end.exception(seconds)
        except TimeoutError:
            return False
        return True

    def run_to_end(self, persist: Callable[[], Saved], after: After) -> None:
        """Carry it out on the calling thread; ``after`` gets the result first."""
        try:
            try:
                saved = persist()
            except CheckpointError as error:
                after(error)
                raise
            after(saved)
        except BaseException as error:
            self._end.set_exception(error)
        else:
            self._end.set_result(saved)
