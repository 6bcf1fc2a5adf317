"""Does the loss go on where it was?  Pure decisions about numbers that were logged.

Two questions.  The loss of the very same micro-batch, before and after: equal but for rounding.
And the losses of the first steps after a resume: as before but for the noise of other batches.
The second one must not cry wolf, so it asks for two things at once: that all but one of the first
five losses lie some deviations above the level before, and above everything that was seen lately
(of 32 losses, above all but one: there may have been a spike).  If nothing is wrong, the latter
alone happens after 16 losses to 1 resume in 1200 and after 32 to 1 in 2700, whatever the
distribution of the noise: 4 new ones would have to be among the 4 (5) largest of 21 (37).
Noise that swings slowly, over many steps, is not independent, and alarms more often.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

__all__ = ["STEPS_WATCHED", "Continuity", "Verdict", "judge", "same_loss"]

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


class Verdict(str, Enum):
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

    verdict: Verdict
    before: float
    after: float
    deviation: float
    steps: int

    @property
    def fine(self) -> bool:
        """Whether there is nothing to worry about, as far as can be told."""
        return self.verdict in (Verdict.CONTINUES, Verdict.UNKNOWN)

    def __str__(self) -> str:
        if self.verdict is Verdict.UNKNOWN:
            return "too few losses to tell whether the loss goes on where it was"
        if self.verdict is Verdict.NOT_FINITE:
            return f"the loss is not finite in the first {self.steps} steps after the resume"
        away = (self.after - self.before) / self.deviation
        text = f"loss {self.after:.4g} in the first {self.steps} steps, {self.before:.4g} before"
        return f"{text} ({away:+.1f} deviations)"


def judge(before: Sequence[float], after: Sequence[float]) -> Continuity:
    """Whether losses of consecutive steps go on after a resume; steps that were skipped left out.

    ``before`` ends with the step that was saved, ``after`` begins with the next one, both one value
    per step.  Call it once ``after`` has ``STEPS_WATCHED`` values: the first ones count.
    """
    seen = [loss for loss in before if math.isfinite(loss)][-_MOST_BEFORE:]
    new = list(after[:STEPS_WATCHED])
    finite = [loss for loss in new if math.isfinite(loss)]
    if len(new) >= STEPS_WATCHED and len(finite) <= len(new) // 2:
        # A run that was like that before is somebody else's problem, and not of the resume.
        was_finite = len(seen) > len(before[-_MOST_BEFORE:]) // 2
        verdict = Verdict.NOT_FINITE if was_finite else Verdict.UNKNOWN
        return Continuity(verdict, math.nan, math.nan, math.nan, len(new))
    if len(seen) < _FEWEST_BEFORE or len(new) < STEPS_WATCHED:
        return Continuity(Verdict.UNKNOWN, math.nan, math.nan, math.nan, len(new))
    level = statistics.median(seen[-_LEVEL_OVER:])
    deviation = _deviation(seen, level)
    # A loss that is not finite counts as one above all others.
    ordered = sorted(loss if math.isfinite(loss) else math.inf for loss in new)
    ceiling = sorted(seen)[-1 - len(seen) // _MOST_BEFORE]
    jumped = ordered[_MAY_BE_LOW] > max(level + _DEVIATIONS * deviation, ceiling)
    verdict = Verdict.JUMPED if jumped else Verdict.CONTINUES
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


def _deviation(seen: Sequence[float], level: float) -> float:
    spread = statistics.median(abs(loss - level) for loss in seen)
    # From step to step, which a slope does not widen but a slow wave hides: the larger one counts.
    steps = [abs(b - a) for a, b in pairwise(seen)]
    between = statistics.median(steps) / math.sqrt(2)
    floor = _LEAST_NOISE * abs(level)
    return max(_MAD_TO_SIGMA * spread, _MAD_TO_SIGMA * between, floor, 1e-300)
