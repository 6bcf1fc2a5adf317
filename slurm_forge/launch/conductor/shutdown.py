"""How a launch comes to its end: last words, leaving, and what to do with what does not leave.

The clock of a job: when its time is up, and until when a stop can be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from slurm_forge.control import Hub
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.conductor.observations import (
    Launched,
    Observations,
)
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.slurm.states import JobState

#: After a first failure: how long the others may say their last words before all are ended.
_LAST_WORDS_S = 0.3
#: How long ranks that were told to leave may take before their launcher is killed.
_LEAVE_S = 5.0
#: A launcher that a kill does not end (its rank sits in the kernel) is waited for no longer.
_GIVE_UP_S = 30.0
#: srun waits for ever for tasks whose step daemon was killed: it never hears of their end (tried
#: on 22.05.8).  Ranks that have said goodbye are gone within seconds.
_GOODBYE_S = 20.0
#: Ranks join before they import anything large; a cold file system may take minutes all the same.
_JOIN_S = 900.0


class Shutdown:
    """Ends one launch, and says when it is over.  Times are of the conductor's clock, in seconds.

    ``launched`` is None where nobody but the ranks themselves ends them.  ``stays``: it is a
    program that has more to do than train, and is not ended because its ranks are through.
    """

    def __init__(
        self,
        hub: Hub,
        observations: Observations,
        launched: Launched | None,
        started: float,
        *,
        stays: bool = False,
    ) -> None:
        self._hub = hub
        self._observations = observations
        self._launched = launched
        self._started = started
        self._stays = stays
        self._all_said: float | None = None
        #: Until when ranks that have stopped may stay, and how many signals there were before.
        self._staying: dict[int, float] = {}
        self._signals = 0

    def begin(self, now: float) -> None:
        """Somebody failed, is gone, or must be ended: the others may still say why."""
        if self._observations.ending_since is None:
            self._observations.ending_since = now

    def stopped(self, rank: int, stays_s: float, now: float) -> None:
        """A rank has stopped; it stays so long at most for something else, or leaves."""
        self._staying.pop(rank, None)
        if stays_s > 0:
            if not self._staying:
                self._signals = self._count_signals()
            self._staying[rank] = now + stays_s

    def hurry(self, now: float) -> None:
        """End ranks that have all stopped and stay for something else: their words are said."""
        if self._all_have_stopped() and self._staying:
            self._staying.clear()
            self.begin(now)
            self._abort()

    def poll(self, now: float) -> None:
        """Go on with it, if it has begun, or has to."""
        observations = self._observations
        self._check_absent(now)
        overdue = now >= max(self._staying.values(), default=now)
        if overdue or self._count_signals() > self._signals:
            self.hurry(now)
        if self._all_have_left():
            self._all_said = now if self._all_said is None else self._all_said
            over = now - self._all_said >= _GOODBYE_S and not self._stays
            if over and self._launched is not None:
                self._launched.kill()
        if observations.ending_since is None:
            return
        if self._launched is None:
            # This process is a rank, too, and its group's watchdog may end it once a peer leaves:
            # first the end is judged and journaled, then whoever judged it has the ranks leave.
            return
        since = now - observations.ending_since
        if since >= _LAST_WORDS_S:
            self._abort()
        if since >= _LEAVE_S:
            self._launched.kill()

    def is_over(self, now: float) -> bool:
        """Whether no rank is left, or none is waited for any more."""
        observations = self._observations
        if observations.deadline_passed:
            return True
        ending = 0.0 if observations.ending_since is None else now - observations.ending_since
        if self._launched is not None:
            return self._launched.poll() is not None or ending > _GIVE_UP_S
        # Who has said goodbye leaves by itself; whoever has not may still be at it, or fail.
        return self._all_have_left() or ending > 2 * _LAST_WORDS_S

    def _abort(self) -> None:
        self._observations.aborted = True
        self._hub.abort("the launch is over")

    def _count_signals(self) -> int:
        return len(self._observations.batch_signals) + len(self._observations.rank_signals)

    def _all_have_left(self) -> bool:
        return self._all_have_stopped() and not self._staying

    def _all_have_stopped(self) -> bool:
        return len(self._observations.left_ranks) == self._hub.world_size

    def _check_absent(self, now: float) -> None:
        """Ranks that never came: a node that does not start its tasks, a step that waits."""
        if self._observations.ending_since is not None or now - self._started < _JOIN_S:
            return
        there = self._hub.members()
        if len(there) == self._hub.world_size:
            return
        absent = [rank for rank in range(self._hub.world_size) if rank not in there]
        if absent:
            self._observations.absent = tuple(absent)
            self.begin(now)


#: Ranks hear again how long they have when it has changed by more.
_TELL_AGAIN_S = 0.5
_REFRESH_EVERY_S = 60.0
#: One question in two minutes per job is nothing to a controller.
_REFRESH_FAR_S = 120.0
_ENDING = frozenset({JobState.COMPLETING, JobState.CANCELLED, JobState.PENDING})
#: How long beyond the end that is known Slurm's first answer is waited for.
_FIRST_ANSWER_S = 1.0
_NEAR_THE_END = timedelta(minutes=10)
#: Between two looks: then the job was suspended, and Slurm has moved its end.
_GAP_S = 3.5
#: How long Slurm's answer with that end is waited for, and where it may be all the time there is.
_NEW_END_WITHIN_S = 10.0
_MOMENT_S = 2.0


class Deadline:
    """Works it out from what Slurm says, and tells the ranks how long they have."""

    def __init__(
        self,
        hub: Hub,
        job_poller: JobPoller,
        timing: Timing,
        observations: Observations,
        started: float,
        now: Callable[[], datetime],
    ) -> None:
        self._hub = hub
        self._job_poller = job_poller
        self._timing = timing
        self._observations = observations
        self._now = now
        self._started = started
        self._announced_end: float | None = None
        self._next_refresh = started + _REFRESH_EVERY_S
        self._last_poll = started
        self._resumed: float | None = None
        self._resumed_query = 0
        #: When a stop that is under way is waited for no longer, on the conductor's clock.
        self.ends_at: float | None = None

    def slurm_time(self, now: float) -> datetime:
        """The time by the controller's clock, by which the job ends.

        This node's is taken for it unless the two are known to differ.  Where it is behind, and
        nobody knows: the job has run as long as this conductor has.
        """
        clock, record = self._job_poller.clock, self._job_poller.latest
        time = self._now() if clock is None or not clock.differs else clock.now(now)
        if record is None or record.start_time is None:
            return time
        return max(time, record.start_time + timedelta(seconds=now - self._started))

    def clock_ahead(self, now: float) -> timedelta:
        """By how much this node's clock is ahead of the controller's, as far as that is known."""
        clock = self._job_poller.clock
        if clock is not None and not clock.differs:
            return clock.ahead
        return self._now() - self.slurm_time(now)

    def _awaits_new_end(self, now: float, within: float) -> bool:
        """Whether the job was suspended, and Slurm may still tell when it ends since then."""
        if self._resumed is None or self._job_poller.latest_query >= self._resumed_query:
            return False
        return now < self._resumed + within

    def time_is_up(self, now: float) -> bool:
        """Whether the job's end, as Slurm tells it, is so near that a stop has to be asked for.

        To be asked several times a second.
        """
        # Looks that are slow themselves, on a storage that hangs, must not make us wait for ever.
        answered = self._job_poller.latest_query >= self._resumed_query
        first = self._resumed is None or now >= self._resumed + _NEW_END_WITHIN_S
        if now - self._last_poll > _GAP_S and answered and first:
            self._resumed, self._resumed_query = now, self._job_poller.ask()
        self._last_poll = now
        record = self._job_poller.latest
        if self._observations.stop_asked is not None:
            return False
        end = self._timing.planned_end if record is None else record.end_time
        remaining = None if end is None else end - self.slurm_time(now)
        near = record is None or (
            remaining is not None and remaining <= self._timing.lead + _NEAR_THE_END
        )
        if now >= self._next_refresh and not self._job_poller.asking:
            # The limit may have been changed; near the end we look once a minute.
            self._next_refresh = now + (_REFRESH_EVERY_S if near else _REFRESH_FAR_S)
            self._job_poller.ask()
        if self._job_poller.awaits_time or self._awaits_new_end(now, _NEW_END_WITHIN_S):
            return False  # by a clock that is an hour ahead, each job's time is up
        return remaining is not None and remaining <= self._timing.lead

    def poll(self, now: float) -> None:
        """At ``now`` on the conductor's clock: note in what was seen that it has passed."""
        observations = self._observations
        if observations.stop_asked is None or observations.deadline_passed:
            return
        record = self._job_poller.latest
        time_given = self._timing.stop_within
        end = self._timing.planned_end if record is None else record.end_time
        if end is not None:
            asked_ago = timedelta(seconds=now - observations.stop_asked)
            remaining = end - (self.slurm_time(now) - asked_ago)
            # A plan that is over was not what Slurm goes by.
            time_given = (
                min(time_given, remaining)
                if record is not None or remaining > timedelta(0)
                else time_given
            )
        after = observations.terminated_after
        if after is not None and self._job_poller.latest_query < observations.terminated_query:
            # Slurm ends the job KillWait after that, and has not told anything else.
            time_given = min(time_given, after + self._timing.kill_wait)
        if record is not None and record.state in _ENDING:
            # It has been told to end already: no grace, or the grace is over.
            time_given = min(time_given, self._timing.kill_wait)
        ends_at = (
            observations.stop_asked + (time_given - self._timing.margin(time_given)).total_seconds()
        )
        self.ends_at = ends_at
        if self._announced_end is None or abs(ends_at - self._announced_end) > _TELL_AGAIN_S:
            # What can't be saved by then is better not begun.
            self._announced_end = ends_at
            self._hub.time_left(max(0.0, ends_at - now))
        if now >= ends_at:
            if self._awaits_new_end(now, _MOMENT_S):
                return
            first = observations.notice_record is None and self._job_poller.asking
            if first and now < ends_at + _FIRST_ANSWER_S:
                return  # it is still to come, and may say that there is more time
            observations.deadline_passed = True
