"""How long a run trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Steps:
    """Train for a number of optimizer steps.

    Attributes:
        count: Optimizer steps; skipped ones count.
    """

    count: int

    def steps(self, samples: int, global_batch: int) -> int:
        """The number of optimizer steps."""
        del samples, global_batch
        return self.count


@dataclass(frozen=True, slots=True)
class Epochs:
    """Train for a number of passes over the data.

    Attributes:
        count: Passes; the last one is rounded up to whole global batches.
    """

    count: int

    def steps(self, samples: int, global_batch: int) -> int:
        """The number of optimizer steps for ``samples`` per pass."""
        return -(-self.count * samples // global_batch)
