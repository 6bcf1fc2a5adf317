"""How long a requeued job is to wait, instead of Slurm's default of two minutes.

Slurm applies its delay when the job has ended on its nodes, and only if the begin time is past by
then (batch_requeue_fini in src/slurmctld/job_mgr.c).  So a begin time shortly after that end is
kept; one that is too early costs the whole delay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.journal.state import AttemptState
from slurm_forge.slurm.records import ConfigRecord

#: A shorter delay is not worth a request to the controller.
_WORTH_IT = timedelta(seconds=30)
#: From the end of our process until the job has ended on its nodes.  Within 3 s on a quiet machine;
#: on one with ten processes per core not always (tests/slurm/test_watch.py), and that costs 118 s.
_QUIET = timedelta(seconds=6)
_WITH_EPILOG = timedelta(seconds=12)
_TIMES = 3
_MOST = timedelta(seconds=60)
#: slurm.conf, KillWait: its default.
_KILL_WAIT = timedelta(seconds=30)
_SLACK = timedelta(seconds=10)
#: A node checks every second whether the job has ended on it, and after eleven checks only every
#: ten seconds (pause_for_job_completion in src/slurmd/slurmd/req.c).
_LOOKED_AT_OFTEN = timedelta(seconds=9)
_SELDOM = timedelta(seconds=10)
_REQUEUE = "scontrol requeue"


@dataclass(frozen=True, slots=True)
class BeginTimes:
    """How far ahead the begin time is set.

    ``if_killed`` while we or our ranks may live on until Slurm kills them, ``at_exit`` as the very
    last action.
    """

    if_killed: timedelta
    at_exit: timedelta

    def at_exit_after(self, since: timedelta) -> timedelta:
        """``at_exit`` if the request was made that long ago: a slow end is noticed late."""
        return self.at_exit if since < _LOOKED_AT_OFTEN else self.at_exit + _SELDOM


def shortened_begin_times(
    config: ConfigRecord | None, attempts: Sequence[AttemptState]
) -> BeginTimes | None:
    """The begin times to request; None if Slurm's own delay is kept, or unknown.

    If an earlier requeue of the run waited for the whole delay all the same, the nodes may take
    longer to be cleaned up: then three times as far ahead, and beyond a minute not at all.
    """
    if config is None or config.requeue_delay <= _WORTH_IT:
        return None
    delay, quick = config.requeue_delay, config.has_epilog is False
    ahead = (_QUIET if quick else _WITH_EPILOG) * _TIMES ** _fell_back(attempts, delay)
    if ahead > _MOST:
        return None
    kill_wait = _KILL_WAIT if config.kill_wait is None else config.kill_wait
    worst = kill_wait + ahead + _SLACK
    return BeginTimes(if_killed=worst, at_exit=ahead) if worst < delay else None


def _fell_back(attempts: Sequence[AttemptState], delay: timedelta) -> int:
    """How often the next attempt of the same job began only after Slurm's full delay."""
    count = 0
    for earlier, later in itertools.pairwise(attempts):
        requeues = [(time, each) for time, each in earlier.requeues if each.method == _REQUEUE]
        delay_s = earlier.decisions[-1][1].wait_s if earlier.decisions else 0.0
        if not requeues or delay_s > 0 or later.job != earlier.job:
            continue
        waited = later.started - requeues[-1][0]
        # A longer wait is due to the queue.
        seconds = delay.total_seconds()
        count += seconds - 1 <= waited <= seconds + 60
    return count
