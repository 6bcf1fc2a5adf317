"""Slow nodes, and runs that became slower: values from a journal, and lines about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import tzinfo

from slurm_forge.journal import events as ev
from slurm_forge.recovery.monitor.straggler_reports import (
    Straggler,
    StragglerCause,
    in_words,
)
from slurm_forge.report import text as t
from slurm_forge.report.story import story as s

#: Slow nodes and trends of a launch that are shown by default.
_SHOWN = 5


@dataclass(slots=True)
class PaceBuilder:
    """Hears the records of one launch."""

    slow: list[s.SlowStory] = field(default_factory=list)
    trends: list[s.TrendStory] = field(default_factory=list)

    def add(self, event: ev.StragglerSeen | ev.StragglerOver | ev.TrendSeen, time: float) -> None:
        """One more record."""
        match event:
            case ev.StragglerSeen():  # the same again, where more is known of it
                self.slow = [
                    o for o in self.slow if o.event.host != event.host or o.over is not None
                ]
                self.slow.append(_slow(event, time))
            case ev.StragglerOver():
                self._over(event, time)
            case ev.TrendSeen() if not event.over:
                self.trends.append(s.TrendStory(time=time, event=event))
            case ev.TrendSeen():
                for index, one in enumerate(self.trends):
                    if one.event.figure == event.figure and one.over is None:
                        self.trends[index] = replace(one, over=time)

    def _over(self, event: ev.StragglerOver, time: float) -> None:
        for index, one in enumerate(self.slow):
            if one.event.host == event.host and one.over is None:
                self.slow[index] = replace(one, over=time, steps=event.steps, cost_s=event.lost_s)

    def slow_until(self, step: int | None) -> tuple[s.SlowStory, ...]:
        """Who was slow; what it costs counts up to ``step`` where it has not passed."""
        return tuple(
            one if one.over is not None or step is None else _until(one, step) for one in self.slow
        )


def _slow(event: ev.StragglerSeen, time: float) -> s.SlowStory:
    known = event.why in [why.value for why in StragglerCause]
    straggler = Straggler(
        host=event.host,
        ranks=event.ranks,
        factor=event.factor,
        trial=event.trial,
        why=StragglerCause(event.why) if known else StragglerCause.WORK,
        since_step=event.since_step,
        lost_s=event.lost_s,
    )
    return s.SlowStory(time=time, event=event, words=in_words(straggler))


def _until(one: s.SlowStory, step: int) -> s.SlowStory:
    steps = max(0, step - one.event.since_step)
    return replace(one, steps=steps, cost_s=steps * one.event.lost_s)


def slow_line(one: s.SlowStory, zone: tzinfo | None) -> str:
    """The sentence, how sure that is, and what it cost."""
    sure = "guess" if one.event.why == StragglerCause.WORK.value else "likely"
    cost = ""
    if one.cost_s > 0 and one.steps:
        cost = f" · {t.plural(one.steps, 'step')}, cost all ranks {t.span(one.cost_s)}"
    over = "" if one.over is None else f" · recovered {t.clock(one.over, zone)}"
    return f"slow: {t.clean(one.words, 400)}   ({sure}){cost}{over}"


def trend_line(one: s.TrendStory, zone: tzinfo | None) -> str:
    """``probe all-reduce bandwidth got worse: 11.8 GB/s -> 4.1 GB/s since 13:20:00``."""
    over = "" if one.over is None else f", until {t.clock(one.over, zone)}"
    event = one.event
    return (
        f"{_name(event.figure)} got worse: {_value(event.figure, event.was)} -> "
        f"{_value(event.figure, event.now)} since {t.clock(event.since, zone)}{over}"
    )


def back_to_normal(event: ev.TrendSeen, zone: tzinfo | None) -> str:
    """``step compute time back to normal: 100 ms (was slow since 22:13:20)``."""
    value = _value(event.figure, event.now)
    since = t.clock(event.since, zone)
    return f"{_name(event.figure)} back to normal: {value} (was slow since {since})"


_NAMES = {
    "latency": "probe all-reduce latency",
    "bandwidth": "probe all-reduce bandwidth",
    "exchange": "step communication time",
    "own": "step compute time",
}


def _name(figure: str) -> str:
    return _NAMES.get(figure, t.clean(figure, 40))


def _value(figure: str, value: float) -> str:
    if figure == "bandwidth":
        return f"{value / 1e9:.3g} GB/s"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def slow_now(
    slow: tuple[s.SlowStory, ...], trends: tuple[s.TrendStory, ...], zone: tzinfo | None = None
) -> Iterator[str]:
    """What is slow at this moment, a line for each."""
    yield from (
        slow_line(one, zone).removeprefix("slow: ") for one in slow[-_SHOWN:] if one.over is None
    )
    yield from (trend_line(one, zone) for one in trends[-_SHOWN:] if one.over is None)
