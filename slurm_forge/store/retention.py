"""Which checkpoints stay: a decision on what is there and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.trust import Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """One checkpoint on disk.  ``time`` in seconds since 1970, None where nothing says when."""

    name: CheckpointName
    trust: Trust = Trust.WRITTEN
    time: float | None = None
    metric: float | None = None
    #: Passes over the data that were over then, None where nothing says how many.
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """What a job asks to keep.  ``smaller_is_better`` is None where no metric is asked for."""

    last: int
    every_steps: int | None = None
    every_epochs: int | None = None
    every: timedelta | None = None
    smaller_is_better: bool | None = None


def wanted(present: Sequence[Present], rules: RetentionRules) -> frozenset[CheckpointName]:
    """The names to keep, in any case the newest good one.

    Suspect ones fill no place among the last; the newest of them stays, for a person to look at.
    """
    newest_first = sorted(present, key=lambda each: each.name, reverse=True)
    usable = [each for each in newest_first if each.trust is not Trust.SUSPECT]
    suspect = [each for each in newest_first if each.trust is Trust.SUSPECT]
    good = [each for each in usable if each.trust is Trust.GOOD]
    chosen = [*usable[: rules.last], *good[:1], *suspect[:1], *_best(usable, rules)]
    oldest_first = usable[::-1]
    if rules.every_steps is not None:
        steps = rules.every_steps
        chosen += _first_of_each(oldest_first, [each.name.step // steps for each in oldest_first])
    if rules.every_epochs is not None:
        counted = [each for each in oldest_first if each.epoch is not None]
        epochs = rules.every_epochs
        chosen += _first_of_each(counted, [(each.epoch or 0) // epochs for each in counted])
    if rules.every is not None:
        timed = [each for each in oldest_first if each.time is not None]
        width = rules.every.total_seconds()
        chosen += _first_of_each(timed, [int((each.time or 0.0) // width) for each in timed])
    return frozenset(each.name for each in chosen)


def _best(usable: Sequence[Present], rules: RetentionRules) -> list[Present]:
    measured = [each for each in usable if each.metric is not None]
    if rules.smaller_is_better is None or not measured:
        return []
    sign = 1.0 if rules.smaller_is_better else -1.0
    # Of equal ones the newest: it has been trained for longer.
    return [min(measured, key=lambda each: sign * (each.metric or 0.0))]


def _first_of_each(oldest_first: Sequence[Present], buckets: Sequence[int]) -> list[Present]:
    """The first of each bucket: it stays the first, whatever comes later."""
    first: dict[int, Present] = {}
    for each, bucket in zip(oldest_first, buckets, strict=True):
        first.setdefault(bucket, each)
    return list(first.values())
