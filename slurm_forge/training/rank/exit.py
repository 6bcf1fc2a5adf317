"""How a rank exits when nobody waits for it any more, and what it leaves in its output."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from dataclasses import dataclass
from signal import SIG_BLOCK, pthread_sigmask
from typing import NoReturn

from slurm_forge.control import HUB_GONE
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.last_words import LAUNCH_BEGINS
from slurm_forge.signals import SAVE_SIGNALS


def show_crashes(attempt: int = 0, launch: int = 0) -> None:
    """Make a segmentation fault or an abort print the stacks of all threads.

    Touches none of the signals that are notices.  An enabled handler keeps its output file.
    """
    if launch:
        sys.stderr.write(f"{LAUNCH_BEGINS}{attempt}.{launch}\n")
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # a notebook's standard error is not a file
            faulthandler.enable(all_threads=True)


@dataclass(frozen=True, slots=True)
class RankExit:
    """The launch is over: no destructor, no collective, no waiting for data-loader workers."""

    run: RunDirectory
    rank: int
    in_slurm: bool
    #: The first rank on a node other than the batch script's, in a job that survives node loss.
    second: bool = False

    def __call__(self, reason: str) -> NoReturn:
        """End this process; for ``Member``'s ``on_abort``."""
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone, too
            sys.stderr.write(f"slurm_forge: this rank exits: {reason}\n")
            sys.stderr.flush()
        if reason == HUB_GONE and (self.rank == 0 or self.second) and self.in_slurm:
            with contextlib.suppress(OSError):
                self._stand_in()
        os._exit(1)

    def _stand_in(self) -> NoReturn:
        """There was no message about the end, so the supervisor was killed: become its deputy.

        Signals blocked in this thread stay blocked across the exec: Slurm's SIGTERM is on its way.
        """
        pthread_sigmask(SIG_BLOCK, SAVE_SIGNALS)
        deputy = [sys.executable, *process_words("deputy", str(self.run.path))]
        if self.rank != 0:
            deputy.append("--second")
        os.execv(deputy[0], deputy)  # noqa: S606  our own interpreter, no shell
