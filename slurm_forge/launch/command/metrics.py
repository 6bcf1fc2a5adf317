"""Step, loss and gradient norm, as a program prints them: from lines to figures.  Pure but for
``MetricReader``, which threads write to.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from slurm_forge.journal.events import Event, Logged, Progress, Resumed
from slurm_forge.recovery.incident.launch_facts import NonFiniteOutput
from slurm_forge.spec.metric_patterns import MetricPatterns

#: Colours and cursor movements, and the backspaces of progress bars.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][0-9A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_MOST_DIGITS = 18
_MOST_TEXT = 300
_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class LineMetrics:
    """What one line says; None where it does not."""

    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    loss: float | None = None
    grad_norm: float | None = None

    @property
    def has_values(self) -> bool:
        """Whether it tells a loss or a gradient norm."""
        return self.loss is not None or self.grad_norm is not None

    @property
    def is_finite(self) -> bool:
        """Whether no value of it is NaN or infinite."""
        values = (self.loss, self.grad_norm)
        return all(each is None or math.isfinite(each) for each in values)


class LineParser:
    """Compiled patterns.

    Args:
        patterns: What to look for.
    """

    def __init__(self, patterns: MetricPatterns) -> None:
        self._step = _compiled(patterns.step)
        self._loss = _compiled(patterns.loss)
        self._grad_norm = _compiled(patterns.grad_norm)
        self._epoch = _compiled(patterns.epoch)
        self._first_epoch = patterns.first_epoch

    def parse(self, line: str) -> LineMetrics:
        """What the line says.

        Args:
            line: One line, or a part of a long one, with whatever colours are in it.

        Returns:
            The last match of each pattern: a progress bar may write many without a line's end.
        """
        text = _CONTROL.sub("", line)
        step_match = _last(self._step, text)
        step = None if step_match is None else _whole(_number(step_match))
        total = None
        if step is not None and step_match is not None and "total" in step_match.re.groupindex:
            total = _whole(step_match["total"])
        epoch_match = _last(self._epoch, text)
        epoch = None if epoch_match is None else _whole(_number(epoch_match))
        return LineMetrics(
            step=step,
            total=total,
            epoch=None if epoch is None else max(0, epoch - self._first_epoch),
            loss=_real(_last(self._loss, text)),
            grad_norm=_real(_last(self._grad_norm, text)),
        )


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(pattern)


def _last(pattern: re.Pattern[str] | None, text: str) -> re.Match[str] | None:
    match = None
    if pattern is not None:
        for match in pattern.finditer(text):  # noqa: B007  the last one is kept
            pass
    return match


def _number(match: re.Match[str]) -> str | None:
    named = set(match.re.groupindex.values())
    index = next(n for n in range(1, match.re.groups + 1) if n not in named)
    return match[index]


def _whole(text: str | None) -> int | None:
    # "1,200" is what some print.
    plain = (text or "").replace(",", "")
    if not plain.isascii() or not plain.isdecimal() or len(plain) > _MOST_DIGITS:
        return None
    return int(plain)


def _real(match: re.Match[str] | None) -> float | None:
    text = None if match is None else _number(match)
    if text is None or len(text) > 2 * _MOST_DIGITS:
        return None
    plain = text.strip("()[]{}<>;:,'\"%").rstrip(".")
    try:
        return float(plain.replace(",", ""))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class MetricHistory:
    """What a start of a program has printed so far.

    Attributes:
        step: The furthest step.
        loss: The last one that is finite, as is ``grad_norm``.
        grad_norm: The last one that is finite.
        healthy: The furthest step that values known to be finite were printed at.
        bad: Steps in a row with a value that is not finite.
        onset: The first of them.
        text: The line that told it first.
        first: The first step above 0.
        second: The next one.
    """

    step: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    healthy: int | None = None
    bad: int = 0
    onset: int | None = None
    text: str = ""
    first: int | None = None
    second: int | None = None
    #: The newest record of values: its step, whether it is bad, whether its loss is.
    at: int | None = None
    at_bad: bool = False
    loss_bad: bool = False
    has_values: bool = False
    epoch: int = 0
    total: int | None = None

    def after(self, found: LineMetrics, line: str = "") -> MetricHistory:
        """The history with one more line.

        Args:
            found: What the line says.
            line: The line itself.

        Returns:
            The new history.  Several ranks may print one step: it counts once, and it is bad if
            one of them is.
        """
        now = self if found.epoch is None else replace(self, epoch=found.epoch)
        if found.total not in (None, now.total) and not now.has_values:
            # A bar before training, of an evaluation or of a download.
            now = replace(now, total=found.total, step=None, first=None, second=None)
        step = now._step_of(found)
        if step is None and found.step is not None:
            return now  # another bar's
        if found.total is not None and now.total is None:
            now = replace(now, total=found.total)
        if step is not None:
            now = now._reached(step)
        return now._recorded(found, step, line) if found.has_values else now

    def _step_of(self, found: LineMetrics) -> int | None:
        if found.step is None:
            return None
        if found.total is not None and self.total not in (None, found.total):
            return None
        return found.step + self.epoch * (found.total or 0)

    def _reached(self, step: int) -> MetricHistory:
        first, second = self.first, self.second
        if first is None:
            first = step or None
        elif second is None and step > first:
            second = step
        furthest = step if self.step is None else max(step, self.step)
        return replace(self, step=furthest, first=first, second=second)

    @property
    def _interval(self) -> int:
        if self.first is None or self.second is None:
            return 1
        return self.second - self.first

    def _recorded(self, found: LineMetrics, step: int | None, line: str) -> MetricHistory:
        now = self
        if step is not None and self.at is not None and step < self.at:
            if self.at - step <= 2 * self._interval:
                return self  # of a rank that is behind
            step = None  # a count that begins anew, with an epoch
        if step is None or step != self.at:
            healthy = self.healthy
            if self.has_values and not self.at_bad and self.at is not None:
                healthy = max(self.at, -1 if healthy is None else healthy)
            kept = self.at_bad
            now = replace(
                self,
                at=self.step if step is None else step,
                at_bad=False,
                loss_bad=False,
                has_values=True,
                healthy=healthy,
                bad=self.bad if kept else 0,
                onset=self.onset if kept else None,
                text=self.text if kept else "",
            )
        now = replace(
            now,
            loss=_finite(found.loss, now.loss),
            grad_norm=_finite(found.grad_norm, now.grad_norm),
        )
        if found.is_finite:
            return now
        loss_bad = found.loss is not None and not math.isfinite(found.loss)
        counted = now.at_bad
        return replace(
            now,
            at_bad=True,
            loss_bad=now.loss_bad or loss_bad,
            bad=now.bad if counted else now.bad + 1,
            onset=now.at if now.bad == 0 else now.onset,
            text=now.text or _CONTROL.sub("", line).strip()[:_MOST_TEXT],
        )

    def resumed_at(self, number: int | None) -> int | None:
        """The step that this start goes on from, once two steps were printed.

        Args:
            number: That in the name of the checkpoint that the program was told of, which need
                not be a step.

        Returns:
            The number where it lies just before the first step, else one interval before that.
        """
        if self.first is None or self.second is None:
            return None
        earliest = max(0, self.first - (self.second - self.first))
        return number if number is not None and earliest <= number < self.first else earliest


def _finite(value: float | None, before: float | None) -> float | None:
    return before if value is None or not math.isfinite(value) else value


class MetricReader:
    """Reads the lines of a running program; several threads may call it.

    Args:
        patterns: What to look for.
    """

    def __init__(self, patterns: MetricPatterns) -> None:
        self._parser = LineParser(patterns)
        self._lock = threading.Lock()
        self._history = MetricHistory()

    def read(self, line: str) -> None:
        """Take one line in."""
        found = self._parser.parse(line)
        if found == LineMetrics():
            return
        with self._lock:
            self._history = self._history.after(found, line)

    @property
    def history(self) -> MetricHistory:
        """What was read so far."""
        with self._lock:
            return self._history


def non_finite_output(history: MetricHistory, most: int, *, ended: bool) -> NonFiniteOutput | None:
    """What is wrong with the printed values, where they add up to an incident.

    Args:
        history: What the program has printed.
        most: Steps in a row that make one.
        ended: The program is over: then a last loss that is not finite is enough.

    Returns:
        The trouble, or None.
    """
    last = ended and history.at_bad and history.loss_bad
    if history.bad < most and not last:
        return None
    times = "once" if history.bad == 1 else f"{history.bad} times in a row"
    return NonFiniteOutput(
        step=history.at, onset=history.onset, text=f"{history.text} (not finite {times})"
    )


class MetricJournal:
    """What of the printed figures is written down: every few seconds, and at the end.

    Args:
        began: When the program was started, by the clock of ``events``.
        number: That of the checkpoint that it was told to resume from.
        checkpoint: The name of that.
    """

    def __init__(self, began: float, number: int | None, checkpoint: str | None) -> None:
        self._next = began
        self._number = number
        self._checkpoint = checkpoint
        self._resumed = False
        self._written: MetricHistory | None = None

    def events(self, history: MetricHistory, now: float, *, ended: bool) -> Iterator[Event]:
        """What to write now.

        Args:
            history: What the program has printed.
            now: Seconds.
            ended: The program is over.
        """
        if history == self._written or history.step is None or (now < self._next and not ended):
            return
        begin = history.resumed_at(self._number)
        if begin is None and not self._resumed and ended and history.first is not None:
            begin = history.first - 1
        if begin is not None and not self._resumed:
            self._resumed = True
            yield Resumed(step=begin, checkpoint=self._checkpoint if begin else None, world_size=0)
        if not self._resumed:
            return
        self._next, self._written = now + _EVERY_S, history
        yield Progress(step=history.step)
        values = {"loss": history.loss, "grad_norm": history.grad_norm}
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            yield Logged(step=history.step, values=known)
