"""Does the loss go on where it was?  Pure decisions about numbers that were logged.

Two questions.  The loss of the very same micro-batch, before and after: equal but for rounding.
And the losses of the first steps after a resume: as before but for the noise of other batches.
The second one must not cry wolf, so it asks for two things at once: that all but one of the first
five losses lie some deviations above the level before, and above everything that was seen lately
(of 32 losses, above all but one: there may have been a spike).  If nothing is wrong, the latter
alone happens after 16 losses to 1 resume in 1200 and after 32 to 1 in 2700, whatever the
distribution of the noise: 4 new ones would have to be among the 4 (5) largest of 21 (37).
Noise that swings slowly, over many steps, is not independent, and alarms more often.

The first steps after a resume, watched: is the loss what it was before?

Twice.  The first micro-batch behind a checkpoint is computed from exactly what is in it; its loss
is remembered, and a resume on as many ranks computes it again.  That costs nothing: no batch is
stored and none is computed for it, but behind the checkpoint of a stop
(``training/loop/reference_loss.py``).  And the losses of the first steps should lie where the last
ones before the checkpoint lay.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch

from slurm_forge.training.core.loss import (
    LossHistory,
    values,
)

#: Losses after a resume that a judgement needs, and looks at.
STEPS_WATCHED = 5
#: Losses before: fewer say nothing, older ones belong to another stage of training.
_FEWEST_BEFORE = 16
_MOST_BEFORE = 32
_LEVEL_OVER = 16
_DEVIATIONS = 3.0
#: Losses among the new ones that prove nothing by being low.
_MAY_BE_LOW = 1
#: A standard deviation in terms of the median absolute deviation of normal noise.
_MAD_TO_SIGMA = 1.4826
#: Noise that every loss is granted, relative to its level: a loss that is constant has none.
_LEAST_NOISE = 0.005

#: Distance from 1 to the next number (torch.finfo(...).eps).
_EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "tfloat32": 2.0**-10,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
#: A loss is a sum of up to some million rounded terms.  Errors of n of them grow like sqrt(n):
#: 1024 for 2^20.  Half types are summed in float32; what is rounded to them is each layer's
#: result, and the loss averages over samples: 4, for 16 layers.
_GROWTH = {"float64": 1024.0, "float32": 1024.0}
_GROWTH_OF_HALF = 4.0
#: Cross entropy near 0 is a difference of numbers around 10, computed in float32.
_NEAR_ZERO = 16 * 2.0**-23

#: The loss that a stop computes on its way out takes a part of a step as a rule.  It is given up
#: where it takes so many steps and a moment, and not begun where less than that and what the end of
#: a launch takes (ranks leave, the job is requeued) is left of the time, or it may take a minute.
_TIMES_A_STEP = 5.0
_MOMENT_S = 2.0
_LEFT_FOR_THE_END_S = 10.0
_LONGEST_S = 60.0


class ResumeVerdict(str, Enum):
    """What the first losses after a resume say."""

    CONTINUES = "continues"
    JUMPED = "jumped"
    NOT_FINITE = "not_finite"
    #: Too few losses before or after.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Continuity:
    """A verdict with its figures: the level before and after (medians), and the usual deviation.

    Figures are NaN where the verdict is UNKNOWN or NOT_FINITE and they can't be told.
    """

    verdict: ResumeVerdict
    before: float
    after: float
    deviation: float
    steps: int

    @property
    def fine(self) -> bool:
        """Whether there is nothing to worry about, as far as can be told."""
        return self.verdict in (ResumeVerdict.CONTINUES, ResumeVerdict.UNKNOWN)

    def __str__(self) -> str:
        if self.verdict is ResumeVerdict.UNKNOWN:
            return "too few losses to tell whether the loss continues where it was"
        if self.verdict is ResumeVerdict.NOT_FINITE:
            return f"the loss is not finite in the first {self.steps} steps after the resume"
        away = (self.after - self.before) / self.deviation
        text = f"loss {self.after:.4g} in the first {self.steps} steps, {self.before:.4g} before"
        return f"{text} ({away:+.1f} deviations)"


def judge(before: Sequence[float], after: Sequence[float]) -> Continuity:
    """Whether losses of consecutive steps go on after a resume; steps that were skipped left out.

    ``before`` ends with the step that was saved, ``after`` begins with the next one, both one value
    per step.  Call it once ``after`` has ``STEPS_WATCHED`` values: the first ones count.
    """
    old = [loss for loss in before if math.isfinite(loss)][-_MOST_BEFORE:]
    new = list(after[:STEPS_WATCHED])
    finite = [loss for loss in new if math.isfinite(loss)]
    if len(new) >= STEPS_WATCHED and len(finite) <= len(new) // 2:
        # A run that was like that before is somebody else's problem, and not of the resume.
        was_finite = len(old) > len(before[-_MOST_BEFORE:]) // 2
        verdict = ResumeVerdict.NOT_FINITE if was_finite else ResumeVerdict.UNKNOWN
        return Continuity(verdict, math.nan, math.nan, math.nan, len(new))
    if len(old) < _FEWEST_BEFORE or len(new) < STEPS_WATCHED:
        return Continuity(ResumeVerdict.UNKNOWN, math.nan, math.nan, math.nan, len(new))
    level = statistics.median(old[-_LEVEL_OVER:])
    deviation = _deviation(old, level)
    # A loss that is not finite counts as one above all others.
    ordered = sorted(loss if math.isfinite(loss) else math.inf for loss in new)
    ceiling = sorted(old)[-1 - len(old) // _MOST_BEFORE]
    jumped = ordered[_MAY_BE_LOW] > max(level + _DEVIATIONS * deviation, ceiling)
    verdict = ResumeVerdict.JUMPED if jumped else ResumeVerdict.CONTINUES
    return Continuity(verdict, level, ordered[len(ordered) // 2], deviation, len(new))


def same_loss(recorded: float, now: float, dtype_name: str) -> bool:
    """Whether two losses of the same micro-batch, weights and random state differ by rounding only.

    ``dtype_name`` is the least exact type that the forward pass computes in ("bfloat16" under
    autocast, "tfloat32" where float32 products may use TF32), not the loss's own; an unknown one is
    taken as bfloat16.  Another GPU, another number of ranks and other kernels are allowed for.
    """
    if not (math.isfinite(recorded) and math.isfinite(now)):
        return recorded == now or (math.isnan(recorded) and math.isnan(now))
    eps = _EPS.get(dtype_name, _EPS["bfloat16"])
    growth = _GROWTH.get(dtype_name, _GROWTH_OF_HALF)
    near_zero = 0.0 if dtype_name == "float64" else _NEAR_ZERO
    return abs(recorded - now) <= growth * eps * max(abs(recorded), abs(now)) + near_zero


def seconds_for_loss(step_s: float, left_s: float | None) -> float:
    """How long one more loss may take before a launch ends; 0 where there is no time for it.

    ``step_s`` is what a step took with the wait for its batch, ``left_s`` is how long there is,
    None where that is not known.
    """
    allowed = _MOMENT_S + _TIMES_A_STEP * step_s
    within = min(_LONGEST_S, 0.0 if left_s is None else left_s - _LEFT_FOR_THE_END_S)
    return allowed if allowed <= within else 0.0


def _deviation(losses: Sequence[float], level: float) -> float:
    spread = statistics.median(abs(loss - level) for loss in losses)
    # From step to step, which a slope does not widen but a slow wave hides: the larger one counts.
    steps = [abs(b - a) for a, b in pairwise(losses)]
    between = statistics.median(steps) / math.sqrt(2)
    floor = _LEAST_NOISE * abs(level)
    return max(_MAD_TO_SIGMA * spread, _MAD_TO_SIGMA * between, floor, 1e-300)


class FirstSteps:
    """On rank 0 only.  ``note`` is called behind a checkpoint, ``check`` when nobody waits for it.

    ``note_reference`` is called with a step, the loss of the first micro-batch behind it and the
    number of samples in that, ``report`` with what is strange about the first steps after a resume,
    ``wrong`` where both are: that loss is another, and the steps behind it lie off too, so that
    what was loaded is not what was saved.
    """

    def __init__(
        self,
        loss_history: LossHistory,
        *,
        exactness: str,
        note_reference: Callable[[int, float, int], None],
        report: Callable[[str], None],
        wrong: Callable[[str], None],
    ) -> None:
        self._loss_history = loss_history
        self._exactness = exactness
        self._note_reference = note_reference
        self._report = report
        self._wrong = wrong
        #: The steps whose next micro-batch is of interest.
        self.saved_at: int | None = None
        #: First losses behind checkpoints, not read from the device yet.
        self._losses: dict[int, tuple[torch.Tensor | float, int]] = {}
        self.resumed_at: int | None = None
        #: The loss of its first micro-batch, and of how many samples.
        self._expected: tuple[float, int] | None = None
        self._another = ""
        self._noted_before = 0

    def resumed(
        self, step: int, *, expected: tuple[float, int] | None, load_differs: bool = False
    ) -> None:
        """Training goes on from ``step``; ``expected`` is what ``note_reference`` was told then.

        It is compared where the first micro-batch has as many samples again.

        ``load_differs``: the digest of what was loaded is not that of what was saved.
        """
        self.resumed_at, self._expected = step, expected
        # After a rollback the steps come again: nothing of the first time is true of them.
        self._losses.clear()
        self.saved_at, self._another = None, ""
        if load_differs:
            self._another = (
                f"parameters or optimizer state loaded at step {step} are not bit for bit what was "
                "saved: a load_state_dict of the program, or the memory of a rank, has changed them"
            )
            self._report(self._another)
        self._noted_before = self._loss_history.noted

    def saved(self, step: int) -> None:
        """A save of this step has been begun: the next micro-batch is its reference."""
        self.saved_at = step

    def note(self, step: int, first_loss: torch.Tensor | float, samples: int) -> None:
        """The loss of the first micro-batch behind ``step``, of so many samples; no waiting.

        Of the steps ``saved_at`` and ``resumed_at``; of others it is of no use.
        """
        self._losses[step] = (first_loss, samples)

    def check(self) -> None:
        """Read what has arrived: at most once per save, and once after a resume.  May wait."""
        for step, (loss, samples) in list(self._losses.items()):
            del self._losses[step]
            value = float(loss)
            if step == self.resumed_at and self._expected is not None:
                (expected, of), self._expected = self._expected, None
                if of == samples and not same_loss(expected, value, self._exactness):
                    self._another = (
                        f"the first micro-batch after step {step} has the loss {value:.7g}, and "
                        f"had {expected:.7g} when the checkpoint was written"
                    )
                    self._report(self._another)
            # One that a stop had no time for comes from the first resume.
            if step in (self.saved_at, self.resumed_at):
                self._note_reference(step, value, samples)
        count = self._loss_history.noted - self._noted_before
        if self.resumed_at is not None and count >= STEPS_WATCHED:
            losses = values(self._loss_history.snapshot())
            new = losses[-count:] if count <= len(losses) else []
            self.resumed_at = None
            if new:
                self._judge(losses[:-count], new)

    def _judge(self, before: Sequence[float], after: Sequence[float]) -> None:
        verdict = judge(before, after)
        if verdict.fine:
            return
        self._report(f"after the resume: {verdict}")
        if self._another:
            self._wrong(f"{self._another}; {verdict}")
