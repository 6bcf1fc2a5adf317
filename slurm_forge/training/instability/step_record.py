"""A step that was taken, on its way to being judged."""

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


# Not frozen: made in every step, and that would take three times as long.
@dataclass(slots=True, eq=False, kw_only=True)
class StepRecord:
    """A step that has been taken, or left out: the device knows.

    ``unprotected`` are buffers that the step changed and that nothing can put back.
    """

    applied: Sequence[GuardedUpdate]
    step: int
    samples: SampleWindow
    #: None where the program has computed the step itself.
    batch: Batch | None
    compute_loss: Callable[[Any], Any] | None
    generators: Generators | None
    #: This rank's own mean loss, asked for after an incident only.
    own_loss: Callable[[], float | None]
    has_loss: bool
    #: Whether it is a batch of ``run.batches``, whose samples can be left out.
    from_stream: bool
    unprotected: tuple[str, ...]
    #: What the program's own loop says of the step.
    report: UpdateReport | None = None

    @classmethod
    def of_report(cls, step: int, samples: SampleWindow, report: UpdateReport) -> StepRecord:
        """A step that a loop has computed and updated by itself."""
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
    """Of several optimizers, whose norms are no one quantity, only the loss can be watched.

    That of the first: a step of two losses may lack the second one now and then.
    """
    applied = all(reading.applied for reading in readings)
    finite = all(reading.finite for reading in readings)
    return Reading(applied, finite, math.nan, readings[0].loss)


def with_loss(readings: Sequence[Reading], loss: float | None) -> list[Reading]:
    """Readings of updates whose loss the guard was not told, where the loop has reported it."""
    return [each if loss is None else each._replace(loss=loss) for each in readings]
