"""Loss spikes and unusual gradient norms, by ranks in a window: pure decisions.

**The loss.**  A step is *far* if its loss lies above a bound: the median of usual losses plus the
largest of six deviations, twice the distance from the median to the highest usual losses (both up
to twice as much while little is known), and a quarter of the median itself.  Three far steps within
four are an anomaly, or five within six if outliers are common; fewer are outliers, which are only
counted.  The quarter allows for a change of the learning rate or harder data; the highest usual
losses allow for heavy tails and a second kind of data.

**The norm.**  A bound on the gradient norm, so generous that no healthy update exceeds it: six
times the median, and more if norms are noisy or high ones have occurred.

Only accepted steps define what is usual, and an anomaly can't change it: a loss counts only when it
is ``_LAG`` steps old and nothing has followed from it, and one above the bound counts as one at the
bound.  Nor do a few far ones raise the highest.  Quantiles of a sorted window cost microseconds; a
mean or a variance would need a defence against each of these.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_forge.errors import ControlChannelError
from slurm_forge.vocabulary.cause import Cause

#: Windows of losses and norms; with fewer than the least, nothing is decided.
_LOSSES, _LEAST_LOSSES = 256, 32
_NORMS, _LEAST_NORMS = 256, 64
#: Age at which a loss becomes usual: a growing loss is compared with values from before it grew.
_LAG = 16
#: This many far steps among the last few are an anomaly.
_BAD, _OF = 3, 4
#: And this many if outliers are common: with one batch in fifty of another kind, three in four
#: happen by chance once in 30,000 steps.
_BAD_AMONG_STRAYS, _OF_AMONG_STRAYS = 5, 6
_COMMON, _WITHIN = 2, 512
_DEVIATIONS = 6.0
#: Few losses estimate the deviation badly, above all with slowly varying noise: the number of
#: deviations is doubled if there are only this many.
_FEW = 32
_ABOVE_HIGHEST = 2.0
_OF_LEVEL = 0.25
#: Share of the total fall of the loss: after a fall from 8 to 1e-6, a loss of 1e-5 is negligible.
_OF_FALL = 0.02
#: One of this many losses (norms) may exceed what is called the highest.
_STRAY = 32

#: Of the logarithm of the norm: lognormal noise exceeds this with a probability below 1 in 1e9.
_NORM_DEVIATIONS = 7.0
_LEAST_FACTOR = 6.0
_ABOVE_HIGHEST_NORM = 3.0
#: Norms are float32 on the device: beyond its maximum there is nothing to limit.
_LARGEST_LOG = 88.0
#: The bound is recomputed after this many norms.
_EVERY = 8
#: This many skipped updates, not in a row, among this many steps: the bound itself is wrong.
_TOO_MANY_LEFT_OUT = 4
_AMONG = 64

#: Steps after an anomaly that nobody acted on: from then on this level is usual.
_UNANSWERED = 64

_TEXT = 1000
_KEYS = ("cause", "hosts", "in_memory", "onset", "rank", "step", "text")
_MOST_HOSTS = 8


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Training has gone wrong: since ``onset``, noticed after ``step``; ``text`` has the figures.

    ``onset`` is the first step with an unusual loss; the update that caused it, if one did, belongs
    to an earlier step.
    """

    cause: Cause
    onset: int
    step: int
    text: str
    #: Found in memory (a weight, a moment): the samples of these steps are not to blame.
    in_memory: bool = False
    #: The only rank that is wrong, and its host, if known.
    rank: int | None = None
    hosts: tuple[str, ...] = ()


class Spikes:
    """Decides what is usual for this run, and whether a step is.  Uses neither clock nor device.

    ``skips`` is how many updates in a row may be skipped before that is an incident by itself.
    """

    def __init__(self, *, skips: int = 3) -> None:
        self._losses = _Window(_LOSSES)
        self._norms = _Window(_NORMS)  # their logarithms
        self._waiting: deque[tuple[int, float]] = deque()
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=_OF_AMONG_STRAYS)
        self._far = math.inf
        self._limit: float | None = None
        self._left_out: deque[int] = deque()
        self._too_many = max(_TOO_MANY_LEFT_OUT, skips + 1)
        self._among = max(_AMONG, 2 * self._too_many)
        self._free_until = -1
        self._step = -1
        self._unanswered: int | None = None
        #: The highest level that was ever usual: after a deep fall, a small rise is no spike.
        self.highest_usual_loss = -math.inf
        #: How many single steps were far above the usual level without consequences.
        self.outliers = 0
        self._strays: deque[int] = deque(maxlen=_COMMON)  # recent outliers

    @property
    def limit(self) -> float | None:
        """The gradient norm above which no update is healthy; None while unknown."""
        return None if self._step < self._free_until else self._limit

    @property
    def bound(self) -> float:
        """Losses above it are far; infinity while unknown."""
        return self._far

    def note(self, step: int, *, loss: float, norm: float, applied: bool) -> Anomaly | None:
        """Record one more step, in order; ``loss`` is NaN if it is unknown.

        ``applied`` is whether the update was made: a skipped step does not affect what is usual.
        """
        self._step = step
        if not applied:
            # A non-finite update was skipped for that reason, whatever the limit is.
            if math.isfinite(norm) and not math.isinf(loss):
                self._note_left_out(step)
            return None
        if 0.0 < norm < math.inf:
            self._note_norm(math.log(norm))
        return None if math.isnan(loss) or loss == -math.inf else self._note_loss(step, loss)

    def restart(self, losses: Sequence[float], at: int) -> None:
        """Training continues after step ``at``, whose last losses were these, oldest first.

        Norms are learned anew.  If updates were skipped recently, there is no limit until that
        place has been passed: another bad update there is no single bad batch.
        """
        left_out = [step for step in self._left_out if self._recently(step)]
        if left_out:
            self._free_until = max(self._free_until, left_out[-1] + self._among)
        self._forget_norms()
        self._forget_losses()
        self._step = at
        outliers = self.outliers
        finite = [loss for loss in losses if math.isfinite(loss)]
        for age, loss in enumerate(finite):
            if self._note_loss(max(0, at - len(finite) + 1 + age), loss) is not None:
                self.tolerate()  # it was tolerated then, or the state would not have been kept
        self.outliers = outliers

    def tolerate(self) -> None:
        """Accept the anomaly: what is usual is learned anew from here."""
        self._forget_losses()

    def _recently(self, step: int) -> bool:
        return self._step - step < self._among

    def _forget_losses(self) -> None:
        self._losses.clear()
        self._waiting.clear()
        self._recent.clear()
        self._strays.clear()
        self._far = math.inf
        self._unanswered = None

    def _forget_norms(self) -> None:
        self._norms.clear()
        self._left_out.clear()
        self._limit = None

    def _note_left_out(self, step: int) -> None:
        left_out = self._left_out
        left_out.append(step)
        while not self._recently(left_out[0]):
            left_out.popleft()
        if len(left_out) >= self._too_many:
            self._forget_norms()

    def _note_norm(self, log: float) -> None:
        norms = self._norms
        norms.add(log)
        if norms.added % _EVERY == 0 and len(norms) >= _LEAST_NORMS:
            middle, deviation, highest = norms.summary()
            above = max(_NORM_DEVIATIONS * deviation, math.log(_LEAST_FACTOR))
            bound = max(middle + above, highest + math.log(_ABOVE_HIGHEST_NORM))
            self._limit = math.exp(bound) if bound < _LARGEST_LOG else None

    def _note_loss(self, step: int, loss: float) -> Anomaly | None:
        if self._unanswered is not None:
            self._unanswered += 1
            if self._unanswered < _UNANSWERED:
                return None
            self.tolerate()
        far = loss > self._far
        recent = self._recent
        if len(recent) == _OF_AMONG_STRAYS and recent[0][2]:
            self.outliers += 1  # nothing followed from it
            self._strays.append(recent[0][0])
        recent.append((step, loss, far))
        if far:
            bad = self._bad()
            if bad:
                return self._anomaly(step, bad)
        if loss < math.inf:
            self._waiting.append((step, min(loss, self._far)))
        if len(self._waiting) > _LAG:
            self._losses.add(self._waiting.popleft()[1])
            self._far = self._bound()
        return None

    def _bound(self) -> float:
        count = len(self._losses)
        if count < _LEAST_LOSSES:
            return math.inf
        level, deviation, highest = self._losses.summary()
        self.highest_usual_loss = max(self.highest_usual_loss, level)
        doubt = 1.0 + _FEW / count
        above = max(
            _DEVIATIONS * doubt * deviation,
            _ABOVE_HIGHEST * doubt * (highest - level),
            _OF_LEVEL * abs(level),
            _OF_FALL * (self.highest_usual_loss - level),
        )
        # A loss that is always 0 has no scale.
        return level + above if above > 0.0 else math.inf

    def _bad(self) -> list[tuple[int, float]]:
        """The far steps, if there are too many among the last ones to be outliers."""
        strays = self._strays
        common = len(strays) == _COMMON and self._step - strays[0] < _WITHIN
        least, of = (_BAD_AMONG_STRAYS, _OF_AMONG_STRAYS) if common else (_BAD, _OF)
        bad = [(at, loss) for at, loss, far in list(self._recent)[-of:] if far]
        return bad if len(bad) >= least else []

    def _anomaly(self, step: int, bad: list[tuple[int, float]]) -> Anomaly:
        level, deviation, highest = self._losses.summary()
        self._unanswered = 0
        onset = bad[0][0]
        # A growing loss was unusual before it was far.
        for at, loss in reversed(self._waiting):
            if at < onset:
                if loss <= max(highest, level + deviation * _DEVIATIONS / 2):
                    break
                onset = at
        losses = ", ".join(f"{loss:.4g}" for _, loss in bad)
        text = (
            f"the loss is {losses} in {len(bad)} of the last {step - bad[0][0] + 1} steps; "
            f"its median over {len(self._losses)} steps was {level:.4g} "
            f"(deviation {deviation:.2g}, highest {highest:.4g}), the bound {self._far:.4g}"
        )
        return Anomaly(Cause.LOSS_SPIKE, onset, step, text)


class _Window:
    """The last values, and a sorted copy."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self.added = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        self.added += 1
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._sorted) > self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    def clear(self) -> None:
        self._values.clear()
        self._sorted.clear()
        self.added = 0

    def summary(self) -> tuple[float, float, float]:
        """Median, deviation (of the wider side, for skewed noise), and the highest usual value."""
        ordered = self._sorted
        count = len(ordered)
        middle = ordered[count // 2]
        side = count * 4 // 25  # 16 %: one deviation of normal noise
        deviation = max(middle - ordered[side], ordered[-1 - side] - middle)
        return middle, deviation, ordered[-1 - count // _STRAY]


def announce(anomaly: Anomaly) -> str:
    """An anomaly as the reason of a request; a text beyond 1000 characters is cut at the end."""
    return json.dumps(
        {
            "cause": anomaly.cause.value,
            "onset": anomaly.onset,
            "step": anomaly.step,
            "text": anomaly.text[:_TEXT],
            "in_memory": anomaly.in_memory,
            "rank": anomaly.rank,
            "hosts": list(anomaly.hosts[:_MOST_HOSTS]),
        },
        ensure_ascii=False,  # or a text could exceed what the channel carries
    )


def announced(text: str) -> Anomaly:
    """The anomaly in the reason of a request; ``ControlChannelError`` if there is none."""
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or sorted(body) != sorted(_KEYS):
            raise ValueError("fields")
        onset, step, words = body["onset"], body["step"], body["text"]
        if type(onset) is not int or type(step) is not int or not 0 <= onset <= step < 2**63:
            raise ValueError("steps")
        if not isinstance(words, str) or type(body["in_memory"]) is not bool:
            raise ValueError("text")
        cause, rank, hosts = Cause(body["cause"]), body["rank"], body["hosts"]
        if cause not in (Cause.NON_FINITE, Cause.LOSS_SPIKE, Cause.RANK_MISMATCH):
            raise ValueError("cause")
        if rank is not None and (type(rank) is not int or rank < 0):
            raise ValueError("rank")
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError("hosts")
        return Anomaly(cause, onset, step, words, body["in_memory"], rank, tuple(hosts))
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlChannelError(
            f"the announcement of an instability can't be read: {error!r}",
            next_step="Are all ranks running the same version of slurm_forge?",
        ) from error
