"""What rank 0 knows of a run's checkpoints now, and a line in the journal for each change."""

from __future__ import annotations

import contextlib
import threading

from slurm_forge.journal import JournalWriter, Known, KnownCheckpoint
from slurm_forge.journal import known as k
from slurm_forge.journal.events import CheckpointJudged, Event
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.trust import Trust

__all__ = ["Book"]


class Book:
    """Whoever reads and then writes holds ``lock``; an unwritable journal stops nothing."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal
        self.lock = threading.RLock()
        self.known: Known = ()
        #: What may become good, and the step since which training has been healthy.
        self.pending: dict[CheckpointName, int] = {}

    def find(self, name: CheckpointName) -> KnownCheckpoint | None:
        """What is known of a checkpoint, if anything."""
        return next((each for each in self.known if each.name == name), None)

    def expect(self, name: CheckpointName, since: int) -> None:
        """It may become good; training has been healthy since ``since``."""
        known = self.find(name)
        if known is not None and known.trust in (Trust.WRITTEN, Trust.VERIFIED):
            self.pending[name] = since

    def judge(self, name: CheckpointName, trust: Trust, why: str, step: int | None = None) -> None:
        """Trust it more, or less; ``step`` is how far training was, where that is the reason."""
        before = self.find(name)
        self.known = k.judged(self.known, name, trust, why, by_person=False)
        after = self.find(name)
        if after is not None and (before is None or after.trust is not before.trust):
            self.write(CheckpointJudged(name=str(name), trust=trust, reason=why, step=step))

    def write(self, event: Event) -> None:
        """A line in the journal."""
        # What happened is the same on all ranks: rank 0 alone must not fail over a line about it.
        with contextlib.suppress(OSError):
            self._journal.write(event)
