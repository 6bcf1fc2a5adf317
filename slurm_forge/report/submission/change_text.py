"""What a change of a run's job means, in words: for a dry run, and once it is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_forge.recovery.job_changes import GLOBAL_BATCH
from slurm_forge.report.text import clean, number
from slurm_forge.vocabulary.job_change import ChangeEffect, JobChange

_HEADINGS = {
    ChangeEffect.SCIENCE: "may affect your results:",
    ChangeEffect.RESOURCES: "resources:",
    ChangeEffect.OPERATION: "how the run is kept alive:",
}


def change_lines(changes: Sequence[JobChange]) -> tuple[str, ...]:
    """The changes by what they may affect, science first, one line each."""
    lines = []
    for kind, heading in _HEADINGS.items():
        own = [each for each in changes if each.affects is kind]
        if own:
            lines += [heading, *(f"  {clean(each, 300)}" for each in own)]
    return tuple(lines)


def consequences(
    changes: Sequence[JobChange], *, ranks: tuple[int, int], step: int | None, finished: bool
) -> tuple[str, ...]:
    """What follows from the changes.

    ``ranks`` is their number before and after; ``step`` is that of the newest checkpoint, if there
    is one.
    """
    return tuple(_consequences(changes, ranks, step, finished=finished))


def _consequences(
    changes: Sequence[JobChange], ranks: tuple[int, int], step: int | None, *, finished: bool
) -> Iterator[str]:
    keys = {each.key for each in changes}
    if step is None:
        yield "the run has no checkpoint yet: it has these values from its first step on"
        return
    at = f"step {number(step)}"
    if finished:
        further = any(key.startswith("args.") for key in keys)
        ends = "" if further else ", and ends there: none of this makes it train further"
        yield f"the finished run continues from {at}{ends}"
    if any(key.startswith("args.") for key in keys):
        yield (
            f"from {at} on, your function gets these arguments; optimizer options and schedules "
            "that they change replace the saved ones"
        )
    if GLOBAL_BATCH in keys:
        yield (
            "the order of the samples stays: the next batch begins at the sample after the last "
            "one consumed, and epochs end with their last sample"
        )
    if "seed" in keys:
        yield (
            f"from {at} on the samples come in another order: in the current epoch some come twice "
            "and some not at all; random numbers differ, too"
        )
    if "entry" in keys:
        yield "the other function must register what the checkpoint holds, under the same names"
    before, after = ranks
    if before != after:
        yield (
            f"ranks {number(before)} → {number(after)}: the global batch and the order of the "
            "samples stay; random states (dropout, …) are derived anew, so that the result is not "
            "bit-identical to that of the old number"
        )
