"""What the time of a run is spent on, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class TimeUse(str, Enum):
    """What a run does at a moment; the nodes are held in all but ``QUEUE`` and ``STOPPED``."""

    #: In the queue, or waiting to be started elsewhere.
    QUEUE = "queue"
    #: Held, stopped or cancelled: the run was waiting for a person.
    STOPPED = "stopped"
    #: The very first start, which no run is spared.
    STARTUP = "startup"
    #: Every later start, and every return to a checkpoint.
    RESTART = "restart"
    #: Steps that were kept.
    TRAINING = "training"
    #: Steps that were kept wait for a save.
    SAVING = "saving"
    #: Steps, and their saves, that had to be done again later.
    REPEATED = "repeated"
    #: Steps after the last checkpoint of a run that has stopped: they will be done again.
    UNSAVED = "unsaved"
    #: A command runs whose steps nobody can read: what of it is training is not known.
    PROGRAM = "program"
    #: Nodes held, and neither trained nor started.
    IDLE = "idle"
    #: What a finished run takes after its last step.
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """From ``start`` to ``end`` an attempt did one thing.

    Times in the queue belong to the attempt that they end with (the last one where the run still
    waits).  ``launch`` is None where no launch is meant; ``ranks`` is how many held their nodes.
    """

    use: TimeUse
    start: float
    end: float
    attempt: int
    launch: int | None = None
    ranks: int = 0

    @property
    def seconds(self) -> float:
        """How long it was; 0 where the journal's times make no sense."""
        length = self.end - self.start
        return length if math.isfinite(length) and length > 0 else 0.0

    @property
    def rank_seconds(self) -> float:
        """The same over all ranks."""
        return self.seconds * self.ranks
