"""How ``doctor --live`` leaves: neither its job nor its folder stays, and nothing else goes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import SlurmCommandError
from slurm_forge.files import write_atomic
from slurm_forge.launch.live_job import OVER
from slurm_forge.person import person
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import PENDING_LIKE, TERMINAL

__all__ = ["Leaving", "remove_folders"]

_EVERY_S = 0.5
#: KillWait is 30 s by default, and what follows it takes a moment.
_GONE_S = 60.0
#: How long a job that was submitted by a command without an answer may take to be listed.
_LISTED_S = 10.0
#: Of many jobs of the user the newest are looked at.
_NEWEST = 50
_REMOVED_S = 10.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """Ends a job; ``say`` tells the user what is left to do by hand."""

    slurm: Slurm
    folder: Path
    say: Callable[[str], None]
    wall: Callable[[], float]
    sleep: Callable[[float], None]

    def cancel(self, job: str) -> None:
        """End it and see it gone: its processes write into a folder that is removed next."""
        # Before anything else, and whatever Slurm says of it: a job may be about to requeue itself.
        with contextlib.suppress(OSError):
            write_atomic(self.folder / OVER, b"", durable=False)
        until, wanted = self.wall() + _GONE_S, True
        while True:
            record: JobRecord | None = None
            with contextlib.suppress(SlurmCommandError):
                if wanted:
                    self.slurm.cancel(job)
                    wanted = False
                record = self.slurm.show_job(job)
                if record is None or record.state in TERMINAL:
                    return
            # What has come back into the queue is taken out of it again.
            wanted = wanted or (record is not None and record.state in PENDING_LIKE)
            if self.wall() > until:
                break
            self.sleep(_EVERY_S)
        self._tell(f"job {job} could not be seen to end: look at squeue --me, then scancel {job}")

    def cancel_unheard(self, script: Path) -> None:
        """End what came of a submission that was not answered, if anything did."""
        until = self.wall() + _LISTED_S
        asked = False
        while True:
            with contextlib.suppress(SlurmCommandError):
                for job in self._newest():
                    record = self.slurm.show_job(job)
                    if record is not None and record.command == str(script):
                        self.cancel(job)
                        return
                asked = True
            if self.wall() > until:
                break
            self.sleep(_EVERY_S)
        if not asked:
            self._tell(
                "whether a job was submitted is not known: look at squeue --me --name=forge-doctor"
            )

    def _newest(self) -> list[str]:
        listed = sorted(self.slurm.queue(person()), key=lambda each: -each.job_id)
        return [each.job_ref for each in listed[:_NEWEST]]

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.say(text)


def remove_folders(
    empty: Iterable[Path],
    *,
    whole: Path | None = None,
    wall: Callable[[], float] = lambda: 0.0,
    sleep: Callable[[float], None] = lambda _: None,
) -> bool:
    """Remove ``whole`` with what is in it, and each of ``empty`` if it is; whether it is gone.

    What still runs may write into it while it goes, so it is tried for a while.
    """
    gone = True
    if whole is not None:
        until = wall() + _REMOVED_S
        while True:
            shutil.rmtree(whole, ignore_errors=True)
            gone = not os.path.lexists(whole)
            if gone or wall() >= until:
                break
            sleep(_EVERY_S)
    for each in empty:
        with contextlib.suppress(OSError):  # somebody has put something there meanwhile
            each.rmdir()
    return gone
