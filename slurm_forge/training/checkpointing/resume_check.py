"""Whether the loss continues as before.  Pure decisions about logged numbers.

Two questions.  The loss of the very same micro-batch, before and after: equal up to rounding.
And the losses of the first steps after a resume: as before up to the noise of other batches.  The
second one must not give false alarms, so two conditions must hold: all but one of the first five
losses lie some deviations above the earlier level, and above everything that occurred recently (of
32 losses, above all but one: there may have been a spike).  If nothing is wrong, the latter alone
happens after 16 losses to 1 resume in 1200 and after 32 to 1 in 2700, whatever the distribution of
the noise: 4 new ones would have to be among the 4 (5) largest of 21 (37).  Noise that varies
slowly, over many steps, is not independent, and gives more alarms.

The first steps after a resume are watched: is the loss what it was before?

This is checked twice.  The first micro-batch after a checkpoint is computed from exactly its
content; its loss is remembered, and a resume on the same number of ranks computes it again.  That
costs nothing: no batch is stored and none is computed for it, except after the checkpoint of a stop
(``training/loop/reference_loss.py``).  And the losses of the first steps should be at the level of
the last ones before the checkpoint.
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

#: Losses after a resume that a judgement needs and uses.
STEPS_WATCHED = 5
#: Losses before it: fewer are inconclusive, older ones belong to another stage of training.
_FEWEST_BEFORE = 16
_MOST_BEFORE = 32
_LEVEL_OVER = 16
_DEVIATIONS = 3.0
#: How many new losses may be low without proving anything.
_MAY_BE_LOW = 1
#: A standard deviation as a multiple of normal noise's median absolute deviation.
_MAD_TO_SIGMA = 1.4826
#: Minimum noise of a loss, relative to its level: a constant loss has none.
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

#: The loss that a stop computes on its way out usually takes a fraction of a step.  It is abandoned
#: after this many steps and a moment, and not begun if less time is left than that plus what the
#: end of a launch takes (ranks leave, the job is requeued), or if it may take a minute.
_TIMES_A_STEP = 5.0
_MOMENT_S = 2.0
_LEFT_FOR_THE_END_S = 10.0
_LONGEST_S = 60.0


class ResumeVerdict(str, Enum):
    """The verdict on the first losses after a resume."""

    CONTINUES = "continues"
    JUMPED = "jumped"
    NOT_FINITE = "not_finite"
    #: Too few losses before or after.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Continuity:
    """A verdict with its figures: the level before and after (medians), and the usual deviation.

    Figures are NaN if they are unknown and the verdict is UNKNOWN or NOT_FINITE.
    """

    verdict: ResumeVerdict
    before: float
    after: float
    deviation: float
    steps: int

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong, as far as is known."""
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
    """Whether losses of consecutive steps continue after a resume, without skipped steps.

    ``before`` ends with the saved step, ``after`` begins with the next one, both one value per
    step.  Call it once ``after`` has ``STEPS_WATCHED`` values: the first ones count.
    """
    old = [loss for loss in before if math.isfinite(loss)][-_MOST_BEFORE:]
    new = list(after[:STEPS_WATCHED])
    finite = [loss for loss in new if math.isfinite(loss)]
    if len(new) >= STEPS_WATCHED and len(finite) <= len(new) // 2:
        # A run that was like that before has another problem, which the resume did not cause.
        was_finite = len(old) > len(before[-_MOST_BEFORE:]) // 2
        verdict = ResumeVerdict.NOT_FINITE if was_finite else ResumeVerdict.UNKNOWN
        return Continuity(verdict, math.nan, math.nan, math.nan, len(new))
    if len(old) < _FEWEST_BEFORE or len(new) < STEPS_WATCHED:
        return Continuity(ResumeVerdict.UNKNOWN, math.nan, math.nan, math.nan, len(new))
    level = statistics.median(old[-_LEVEL_OVER:])
    deviation = _deviation(old, level)
    # A non-finite loss counts as one above all others.
    ordered = sorted(loss if math.isfinite(loss) else math.inf for loss in new)
    ceiling = sorted(old)[-1 - len(old) // _MOST_BEFORE]
    jumped = ordered[_MAY_BE_LOW] > max(level + _DEVIATIONS * deviation, ceiling)
    verdict = ResumeVerdict.JUMPED if jumped else ResumeVerdict.CONTINUES
    return Continuity(verdict, level, ordered[len(ordered) // 2], deviation, len(new))


def same_loss(recorded: float, now: float, dtype_name: str) -> bool:
    """Whether two losses of one micro-batch, weights and random state are equal up to rounding.

    ``dtype_name`` is the least exact type in the forward pass ("bfloat16" under autocast,
    "tfloat32" if float32 products may use TF32), not the loss's own; an unknown one counts as
    bfloat16.  Another GPU, another number of ranks and other kernels are allowed for.
    """
    if not (math.isfinite(recorded) and math.isfinite(now)):
        return recorded == now or (math.isnan(recorded) and math.isnan(now))
    eps = _EPS.get(dtype_name, _EPS["bfloat16"])
    growth = _GROWTH.get(dtype_name, _GROWTH_OF_HALF)
    near_zero = 0.0 if dtype_name == "float64" else _NEAR_ZERO
    return abs(recorded - now) <= growth * eps * max(abs(recorded), abs(now)) + near_zero


def seconds_for_loss(step_s: float, left_s: float | None) -> float:
    """How long one more loss may take before a launch ends; 0 if there is no time for it.

    ``step_s`` is the duration of a step including the wait for its batch, ``left_s`` the remaining
    time, None if unknown.
    """
    allowed = _MOMENT_S + _TIMES_A_STEP * step_s
    within = min(_LONGEST_S, 0.0 if left_s is None else left_s - _LEFT_FOR_THE_END_S)
    return allowed if allowed <= within else 0.0


def _deviation(losses: Sequence[float], level: float) -> float:
    spread = statistics.median(abs(loss - level) for loss in losses)
    # From step to step, which a slope does not widen but a slow wave hides: use the larger one.
    steps = [abs(b - a) for a, b in pairwise(losses)]
    between = statistics.median(steps) / math.sqrt(2)
    floor = _LEAST_NOISE * abs(level)
    return max(_MAD_TO_SIGMA * spread, _MAD_TO_SIGMA * between, floor, 1e-300)


class FirstSteps:
    """On rank 0 only.  ``note`` is called after a checkpoint, ``check`` when nobody waits for it.

    ``note_reference`` is called with a step, the loss of the first micro-batch after it and the
    number of samples in that, ``report`` with anomalies of the first steps after a resume,
    ``wrong`` if there are two: that loss differs, and the following steps are off, too, so that
    the loaded state is not the saved one.
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
        #: First losses after checkpoints, not read from the device yet.
        self._losses: dict[int, tuple[torch.Tensor | float, int]] = {}
        self.resumed_at: int | None = None
        #: The loss of its first micro-batch, and the number of samples.
        self._expected: tuple[float, int] | None = None
        self._another = ""
        self._noted_before = 0

    def resumed(
        self, step: int, *, expected: tuple[float, int] | None, load_differs: bool = False
    ) -> None:
        """Training continues from ``step``; ``expected`` is what ``note_reference`` got then.

        It is compared if the first micro-batch has the same number of samples.

        ``load_differs``: the digest of the loaded state is not that of the saved one.
        """
        self.resumed_at, self._expected = step, expected
        # After a rollback steps are repeated: what was recorded the first time is obsolete.
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
        """A save of this step has begun: the next micro-batch is its reference."""
        self.saved_at = step

    def note(self, step: int, first_loss: torch.Tensor | float, samples: int) -> None:
        """Record the loss of the first micro-batch after ``step``, without waiting.

        Only for the steps ``saved_at`` and ``resumed_at``; others are ignored.
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
