"""The last act of an attempt of whose way back nobody could be told.  Pure."""

from __future__ import annotations

from datetime import timedelta

from slurm_forge.launch.ladder import Taken
from slurm_forge.vocabulary.cause import Cause

__all__ = ["stays_on"]

#: What was taken for a preemption may be none: then nodes stand idle for so long.
_LONGEST = timedelta(minutes=5)


def stays_on(taken: Taken, cause: Cause) -> timedelta:
    """How long the batch step waits to be ended by Slurm before it leaves by itself.

    Slurm itself requeues what it preempts with PreemptMode=REQUEUE; up to 23.11 not where the job
    ends by itself in its grace time (tried on 22.05.8).  So where compute nodes have no scontrol,
    or it gets no answer, to be there still is what brings the run back.
    """
    return _LONGEST if taken is Taken.OPEN and cause is Cause.PREEMPTED else timedelta(0)
