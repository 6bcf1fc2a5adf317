"""Whether a signal is only Slurm's warning of the time limit (``sbatch --signal``).  Pure.

Slurm sends that warning up to a minute earlier than requested (doc/man/man1/sbatch.1), so a stop at
the signal wastes a good part of a short limit.  The clock is more precise: ``EndTime`` of the job's
record.  With ``PreemptParameters=send_user_signal`` a preemption begins with the same signal; then
the record, queried after it, has a ``PreemptTime`` or an end that has moved.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import Enum

from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState

_WARNING_SIGNALS = frozenset({"SIGUSR1", "SIGUSR2"})
#: While Slurm sends the signal the job reads SIGNALING (tried on 22.05.8).
_RUNS = frozenset({JobState.RUNNING, JobState.SIGNALING})
#: How long before the lead Slurm's warning may arrive: a minute early, plus seconds between clocks.
#: An earlier signal was sent by hand, or was requested that early.
_EARLY = timedelta(seconds=90)
#: StartTime and TimeLimit have a resolution of one second.
_ROUNDED = timedelta(seconds=2)
_PATIENCE_SHARE = 0.25
_PATIENCE_MOST = timedelta(seconds=5)


class SignalMeaning(Enum):
    """What a signal means for the run."""

    #: Save and stop now.
    STOP = "stop"
    #: Slurm's record, queried after the signal, decides.
    ASK = "ask"
    #: Nothing yet: the time limit is near, and the clock stops the run in time.
    WARNING = "warning"


def judge_signal(
    name: str,
    *,
    before: JobRecord | None,
    after: JobRecord | None,
    waited: timedelta,
    now: datetime,
    lead: timedelta,
) -> SignalMeaning:
    """The meaning of the signal ``name``.

    ``before`` is the newest record from before it, ``after`` the answer to a query made after it,
    None while that is pending: for ``waited`` by now.  In doubt it means stop.
    """
    if name not in _WARNING_SIGNALS or not _may_be_warning(before, now, lead):
        return SignalMeaning.STOP
    if after is None:
        return SignalMeaning.ASK if waited < patience(lead) else SignalMeaning.STOP
    return SignalMeaning.WARNING if _may_be_warning(after, now, lead) else SignalMeaning.STOP


def patience(lead: timedelta) -> timedelta:
    """How long to wait for Slurm's answer: it may be a preemption, whose notice is short."""
    return min(_PATIENCE_MOST, _PATIENCE_SHARE * lead)


def _may_be_warning(record: JobRecord | None, now: datetime, lead: timedelta) -> bool:
    """Whether the job runs undisturbed and its limit is near, but further away than the lead."""
    if record is None or record.state not in _RUNS or record.preempt_time is not None:
        return False
    limit, end = record.limit_ends, record.end_time
    if limit is None or end is None:
        return False
    end_moved = end < limit - _ROUNDED
    return not end_moved and lead < end - now <= lead + _EARLY
