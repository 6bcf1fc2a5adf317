"""How node time was spent, in rank-seconds, and how long the run waited for nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_forge.report.story import story as s
from slurm_forge.report.story.time_use import TimeUse

#: Without nodes: nobody pays for it but with patience.
_WITHOUT_NODES = frozenset({TimeUse.QUEUE, TimeUse.STOPPED})
#: What the bars are called, and what each means, in the order of the page.
_LOSSES = (
    (TimeUse.STARTUP, "first start", "every run pays for this once"),
    (
        TimeUse.RESTART,
        "restarts and rollbacks",
        "every later start, and every return to a checkpoint",
    ),
    (TimeUse.REPEATED, "repeated steps", "trained, lost, and trained again"),
    (TimeUse.UNSAVED, "steps not saved", "after the last checkpoint: to be trained again"),
    (TimeUse.SAVING, "waiting for saves", "training stood still for its own checkpoints"),
    (TimeUse.IDLE, "idle nodes", "allocated, but neither training nor starting"),
    (TimeUse.PROGRAM, "a command", "reports no steps: how much of it was training is unknown"),
    (TimeUse.SHUTDOWN, "shutdown", "after the last step of a finished run"),
)
#: A node that is slower than the others: a part of the training time.
SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallBar:
    """One thing that node time went into.

    ``use`` is the value of a ``TimeUse`` or ``slow``.  ``share`` is of all node time.
    ``seconds`` is how long it took by the clock.
    """

    use: str
    label: str
    meaning: str
    rank_seconds: float
    seconds: float
    share: float

    @property
    def negligible(self) -> bool:
        """Whether its figures would be displayed as zeros."""
        return self.rank_seconds < 0.05 and self.share < 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """All node time, the losses subtracted from it one by one, and the rest: training.

    ``program_s`` is how long commands ran that report no steps, ``unsaved_s`` what a stopped run
    trained after its last checkpoint.
    """

    rank_seconds: float
    losses: tuple[WaterfallBar, ...]
    training: WaterfallBar | None
    queued_s: float
    stopped_s: float
    program_s: float = 0.0
    unsaved_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long nodes were allocated, by the clock."""
        bars = (*self.losses, *([] if self.training is None else [self.training]))
        return sum(bar.seconds for bar in bars)


def waterfall(story: s.RunStory) -> Waterfall:
    """Split the node time of a run; every moment counts once."""
    seconds: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[str, float] = defaultdict(float)
    for span in story.spans:
        seconds[span.use.value] += span.seconds
        if span.use not in _WITHOUT_NODES:
            spent[span.use.value] += span.rank_seconds
    slow_s, slow = _slow(story)
    kept = TimeUse.TRAINING.value
    slow_s, slow = min(slow_s, seconds[kept]), min(slow, spent[kept])
    seconds[SLOW], spent[SLOW] = slow_s, slow
    seconds[kept] -= slow_s
    spent[kept] -= slow
    total = sum(spent.values())
    losses = []
    named = [(use.value, label, meaning) for use, label, meaning in _LOSSES]
    named.insert(5, (SLOW, "slow nodes", "all ranks waited for the slowest of them"))
    for use, label, meaning in named:
        share = spent[use] / total if total else 0.0
        if spent[use] > 0:
            losses.append(_bar(use, label, meaning, spent[use], seconds[use], share))
    share = spent[kept] / total if total else 0.0
    meaning = "steps that are part of the result"
    bar = _bar(kept, "training that was kept", meaning, spent[kept], seconds[kept], share)
    return Waterfall(
        rank_seconds=total,
        losses=tuple(losses),
        training=bar if total else None,
        queued_s=seconds[TimeUse.QUEUE.value],
        stopped_s=seconds[TimeUse.STOPPED.value],
        program_s=seconds[TimeUse.PROGRAM.value],
        unsaved_s=seconds[TimeUse.UNSAVED.value],
    )


def _bar(
    use: str, label: str, meaning: str, spent: float, seconds: float, share: float
) -> WaterfallBar:
    return WaterfallBar(
        use=use,
        label=label,
        meaning=meaning,
        rank_seconds=spent,
        seconds=seconds,
        share=share,
    )


def _slow(story: s.RunStory) -> tuple[float, float]:
    """Seconds that slow nodes cost, and the same over the ranks that waited for them."""
    costs = list(_costs(story))
    return sum(cost for cost, _ in costs), sum(cost * ranks for cost, ranks in costs)


def _costs(story: s.RunStory) -> Iterator[tuple[float, int]]:
    for attempt in story.attempts:
        for launch in attempt.launches:
            yield from ((slow.cost_s, launch.world_size) for slow in launch.slow)
