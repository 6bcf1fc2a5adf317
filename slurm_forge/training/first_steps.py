"""The first steps after a resume, watched: is the loss what it was before?

Twice.  The first micro-batch behind a checkpoint is computed from exactly what is in it; its loss
is remembered, and a resume on as many ranks computes it again.  That costs nothing: no batch is
stored and none is computed for it.  And the losses of the first steps should lie where the last
ones before the checkpoint lay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slurm_forge.training.continuity import STEPS_WATCHED, judge, same_loss
from slurm_forge.training.trail import LossTrail, values

__all__ = ["FirstSteps"]


class FirstSteps:
    """On rank 0 only.  ``note`` is called after every step, ``look`` when nobody is held up by it.

    ``witness`` is called with a step, the loss of the first micro-batch behind it and the number of
    samples in that, ``told`` with
    what is strange about the first steps after a resume, ``wrong`` where both are: that loss is
    another, and the steps behind it lie off too, so that what was loaded is not what was saved.
    """

    def __init__(
        self,
        trail: LossTrail,
        *,
        exactness: str,
        witness: Callable[[int, float, int], None],
        told: Callable[[str], None],
        wrong: Callable[[str], None],
    ) -> None:
        self._trail = trail
        self._exactness = exactness
        self._witness = witness
        self._told = told
        self._wrong = wrong
        self._saved_at: int | None = None
        #: First losses behind checkpoints, not read from the device yet.
        self._losses: dict[int, tuple[torch.Tensor, int]] = {}
        self._resumed_at: int | None = None
        self._expected: float | None = None
        self._another = ""
        self._noted_before = 0

    def resumed(self, step: int, *, expected: float | None) -> None:
        """Training goes on from ``step``; ``expected`` is the loss of the first micro-batch."""
        self._resumed_at, self._expected = step, expected
        # After a rollback the steps come again: nothing of the first time is true of them.
        self._losses.clear()
        self._saved_at, self._another = None, ""
        self._noted_before = self._trail.noted

    def saved(self, step: int) -> None:
        """A save of this step has been begun: the next micro-batch is its witness."""
        self._saved_at = step

    def note(self, step: int, first_loss: torch.Tensor | None, samples: int) -> None:
        """``step`` steps are done now; ``first_loss`` is that of the last one's first micro-batch.

        ``samples`` is how many were in it.  Nothing is waited for.
        """
        before = step - 1
        if first_loss is not None and before in (self._saved_at, self._resumed_at):
            self._losses[before] = (first_loss, samples)

    def look(self) -> None:
        """Read what has arrived: at most once per save, and once after a resume.  May wait."""
        for step, (loss, samples) in list(self._losses.items()):
            del self._losses[step]
            value = float(loss)
            if step == self._resumed_at and self._expected is not None:
                expected, self._expected = self._expected, None
                if not same_loss(expected, value, self._exactness):
                    self._another = (
                        f"the first micro-batch after step {step} has the loss {value:.7g}, and "
                        f"had {expected:.7g} when the checkpoint was written"
                    )
                    self._told(self._another)
            # A checkpoint that a stop has written gets its witness from the first resume.
            if step in (self._saved_at, self._resumed_at):
                self._witness(step, value, samples)
        seen = self._trail.noted - self._noted_before
        if self._resumed_at is not None and seen >= STEPS_WATCHED:
            losses = values(self._trail.snapshot())
            new = losses[-seen:] if seen <= len(losses) else []
            self._resumed_at = None
            if new:
                self._judge(losses[:-seen], new)

    def _judge(self, before: Sequence[float], after: Sequence[float]) -> None:
        verdict = judge(before, after)
        if verdict.fine:
            return
        self._told(f"after the resume: {verdict}")
        if self._another:
            self._wrong(f"{self._another}; {verdict}")
