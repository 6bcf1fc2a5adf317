"""What a journal tells of slow nodes and of a run that became slower: values, and their lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import tzinfo

from slurm_forge.journal import events as ev
from slurm_forge.recovery.monitor.slow_links import Figure
from slurm_forge.recovery.monitor.straggler_reports import (
    Straggler,
    Why,
    in_words,
)
from slurm_forge.report import text as t

__all__ = ["PaceTelling", "SlowStory", "TrendStory", "slow_now", "told_slow", "told_trend"]

#: Slow nodes and trends of a launch that are told without being asked for.
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStory:
    """Ranks of a host that were slower than the others.

    ``factor`` is of their own part of a step, ``trial`` of the same work everywhere; ``why`` is
    node, starved or work.  Each step took ``lost_s`` longer for everybody, ``steps`` of them cost
    ``cost_s``.  ``over`` is when it had passed (None: not yet, or nobody saw it).
    """

    time: float
    step: int
    since_step: int
    host: str
    ranks: tuple[int, ...]
    factor: float
    trial: float
    why: str
    words: str
    lost_s: float
    steps: int = 0
    cost_s: float = 0.0
    over: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendStory:
    """A figure of all ranks that was worse than it used to be: seconds, or bytes per second."""

    time: float
    step: int
    figure: str
    was: float
    now: float
    since: float
    over: float | None = None


@dataclass(slots=True)
class PaceTelling:
    """Hears the records of one launch."""

    slow: list[SlowStory] = field(default_factory=list)
    trends: list[TrendStory] = field(default_factory=list)

    def hear(self, event: ev.StragglerSeen | ev.StragglerOver | ev.TrendSeen, time: float) -> None:
        """One more record."""
        match event:
            case ev.StragglerSeen():  # the same again, where more is known of it
                self.slow = [o for o in self.slow if o.host != event.host or o.over is not None]
                self.slow.append(_slow(event, time))
            case ev.StragglerOver():
                self._over(event, time)
            case ev.TrendSeen() if not event.over:
                self.trends.append(
                    TrendStory(
                        time=time,
                        step=event.step,
                        figure=event.figure,
                        was=event.was,
                        now=event.now,
                        since=event.since,
                    )
                )
            case ev.TrendSeen():
                for index, one in enumerate(self.trends):
                    if one.figure == event.figure and one.over is None:
                        self.trends[index] = replace(one, over=time)

    def _over(self, event: ev.StragglerOver, time: float) -> None:
        for index, one in enumerate(self.slow):
            if one.host == event.host and one.over is None:
                self.slow[index] = replace(one, over=time, steps=event.steps, cost_s=event.lost_s)

    def told_slow(self, step: int | None) -> tuple[SlowStory, ...]:
        """Who was slow; what it costs counts up to ``step`` where it has not passed."""
        return tuple(
            one if one.over is not None or step is None else _until(one, step) for one in self.slow
        )


def _slow(event: ev.StragglerSeen, time: float) -> SlowStory:
    known = event.why in [why.value for why in Why]
    found = Straggler(
        host=event.host,
        ranks=event.ranks,
        factor=event.factor,
        trial=event.trial,
        why=Why(event.why) if known else Why.WORK,
        since_step=event.since_step,
        lost_s=event.lost_s,
        queued=event.queued,
        throttled=event.throttled,
    )
    return SlowStory(
        time=time,
        step=event.step,
        since_step=event.since_step,
        host=event.host,
        ranks=event.ranks,
        factor=event.factor,
        trial=event.trial,
        why=event.why,
        words=in_words(found),
        lost_s=event.lost_s,
    )


def _until(one: SlowStory, step: int) -> SlowStory:
    steps = max(0, step - one.since_step)
    return replace(one, steps=steps, cost_s=steps * one.lost_s)


def told_slow(one: SlowStory, zone: tzinfo | None) -> str:
    """The sentence, how sure that is, and what it cost."""
    sure = "guess" if one.why == Why.WORK.value else "likely"
    cost = ""
    if one.cost_s > 0 and one.steps:
        cost = f" · {t.plural(one.steps, 'step')}, {t.span(one.cost_s)} lost by all ranks"
    over = "" if one.over is None else f" · over {t.clock(one.over, zone)}"
    return f"slow: {t.clean(one.words, 400)}   ({sure}){cost}{over}"


def told_trend(one: TrendStory, zone: tzinfo | None) -> str:
    """``all-reduce (large) became slower: 11.8 -> 4.1 GB/s since 13:20:00``."""
    over = "" if one.over is None else f", until {t.clock(one.over, zone)}"
    name = _NAMES.get(one.figure, t.clean(one.figure, 40))
    return (
        f"{name} became slower: {_value(one.figure, one.was)} -> {_value(one.figure, one.now)} "
        f"since {t.clock(one.since, zone)}{over}"
    )


_NAMES = {
    Figure.LATENCY.value: "the probe's all-reduce",
    Figure.BANDWIDTH.value: "the probe's large all-reduce",
    Figure.EXCHANGE.value: "what ranks exchange in a step",
    Figure.OWN.value: "every rank's own part of a step",
}


def _value(figure: str, value: float) -> str:
    if figure == Figure.BANDWIDTH.value:
        return f"{value / 1e9:.3g} GB/s"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def slow_now(
    slow: tuple[SlowStory, ...], trends: tuple[TrendStory, ...], zone: tzinfo | None = None
) -> Iterator[str]:
    """What is slow at this moment, a line for each."""
    yield from (
        told_slow(one, zone).removeprefix("slow: ") for one in slow[-_SHOWN:] if one.over is None
    )
    yield from (told_trend(one, zone) for one in trends[-_SHOWN:] if one.over is None)
