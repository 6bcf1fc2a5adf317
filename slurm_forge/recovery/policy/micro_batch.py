"""What running out of memory teaches about micro-batches: pure decisions.

A run that had to reduce its micro-batch passes this on to the next run with the same model on the
same hardware, which then begins with what fits.  After a while the next larger one is tried again:
drivers, libraries and the model's environment change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action

#: A larger micro-batch is tried again after this time, doubled after each failure.
_TRY_AFTER = timedelta(days=7)
_MOST_DOUBLINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """``micro_batch`` fits as far as is known; ``proven`` once healthy steps were made with it.

    ``since`` (aware) is when a larger one last ran out of memory or was tried, ``tries`` how
    often trying it again has failed.
    """

    micro_batch: int
    proven: bool
    since: datetime
    tries: int = 0


def may_shrink(policy: Recovery, *, batch_coupled: bool) -> bool:
    """Whether the job lets recovery change the micro-batch: only then is one suggested."""
    rungs = policy.ladder(Cause.CUDA_OOM)
    return not batch_coupled and any(rung.do is Action.SHRINK_MICRO_BATCH for rung in rungs)


def waits(learned: Learned) -> timedelta:
    """How long after ``since`` a larger micro-batch is tried."""
    return _TRY_AFTER * (1 << min(learned.tries, _MOST_DOUBLINGS))


def propose(configured: int, learned: Learned | None, now: datetime) -> int:
    """The micro-batch for the beginning of a run with ``configured`` in its job file."""
    if learned is None or learned.micro_batch >= configured:
        return configured
    if now - learned.since < waits(learned):
        return learned.micro_batch
    return min(configured, 2 * learned.micro_batch)


def try_begins(learned: Learned, now: datetime) -> Learned:
    """A run begins with more than is known to fit: others don't try at the same time."""
    return replace(learned, since=now)


def ran_out(learned: Learned | None, micro_batch: int, smaller: int, now: datetime) -> Learned:
    """Memory ran out with ``micro_batch``; ``smaller`` comes next."""
    if learned is not None and learned.micro_batch < micro_batch:
        return replace(learned, since=now, tries=learned.tries + 1)
    tries = 0 if learned is None else learned.tries
    return Learned(micro_batch=smaller, proven=False, since=now, tries=tries)


def worked(
    learned: Learned | None, micro_batch: int, configured: int, now: datetime
) -> Learned | None:
    """Healthy steps were made with ``micro_batch``; None: nothing needs to be remembered."""
    if micro_batch >= configured:
        return None
    if learned is None or micro_batch > learned.micro_batch:
        return Learned(micro_batch=micro_batch, proven=True, since=now)
    if micro_batch == learned.micro_batch:
        return replace(learned, proven=True)
    if learned.proven:
        return learned  # smaller for another reason: what fitted before still does
    return replace(learned, micro_batch=micro_batch, proven=True)
