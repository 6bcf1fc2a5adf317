"""A completed step that is yet to be judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_forge.training.core.host_generators import Generators
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.step.gradient_guard import GuardedUpdate, Reading
from slurm_forge.training.step.update_report import UpdateReport
from slurm_forge.vocabulary.plan import SampleWindow


# Not frozen: one is created in every step, and freezing would take three times as long.
@dataclass(slots=True, eq=False, kw_only=True)
class StepRecord:
    """A step that was applied or skipped, which the device knows.

    ``unprotected`` are buffers that the step changed and that can't be restored.
    """

    applied: Sequence[GuardedUpdate]
    step: int
    samples: SampleWindow
    #: None if the program computed the step itself.
    batch: Batch | None
    compute_loss: Callable[[Any], Any] | None
    generators: Generators | None
    #: This rank's own mean loss, requested after an incident only.
    own_loss: Callable[[], float | None]
    has_loss: bool
    #: Whether it is a batch of ``run.batches``, whose samples can be skipped.
    from_stream: bool
    unprotected: tuple[str, ...]
    #: The report of the program's own loop on the step.
    report: UpdateReport | None = None

    @classmethod
    def of_report(cls, step: int, samples: SampleWindow, report: UpdateReport) -> StepRecord:
        """A step that a loop computed and updated by itself."""
        return cls(
            applied=(),
            step=step,
            samples=samples,
            batch=None,
            compute_loss=None,
            generators=None,
            own_loss=report.own_loss,
            has_loss=report.loss is not None,
            from_stream=False,
            unprotected=(),
            report=report,
        )


def together(readings: Sequence[Reading]) -> Reading:
    """Combine steps of several optimizers: their norms are no common quantity, so only the loss is
    watched.

    It is that of the first: a step of two losses may lack the second one now and then.
    """
    applied = all(reading.applied for reading in readings)
    finite = all(reading.finite for reading in readings)
    return Reading(applied, finite, math.nan, readings[0].loss)


def with_loss(readings: Sequence[Reading], loss: float | None) -> list[Reading]:
    """Readings of updates without a loss in the guard, completed by the loop's report."""
    return [each if loss is None else each._replace(loss=loss) for each in readings]
