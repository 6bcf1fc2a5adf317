"""What Slurm is asked about the job of a launch: at a notice, and at the launch's end."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.conductor.observations import Seen

__all__ = ["Questions", "last_word"]

#: While a stop is under way and Slurm has not said yet when the job ends.
_ASK_AGAIN_S = 5.0
_TICK_S = 0.05
#: How long the last question to Slurm may hold up what comes after the launch.
LAST_QUERY_S = 3.0
#: The same where somebody wants the nodes: the intent to come back has to be on disk first, and
#: whoever carries it out waits for the answer.
LAST_QUERY_OF_STOP_S = 1.0
_LAST_QUERIES = 2


class Questions:
    """Asks, and notes in what was seen what the answers say.  Times are of the given clock."""

    def __init__(self, watch: JobWatch, seen: Seen, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._seen = seen
        self._clock = clock
        self._next_stop_query = 0.0

    def stop_asked(self, now: float) -> None:
        """A stop is asked for: why, and until when, Slurm knows."""
        self._seen.stop_query = self._seen.evidence_query = self._watch.ask()
        self._next_stop_query = now + _ASK_AGAIN_S

    def batch_signalled(self) -> None:
        """The batch step got a signal: what Slurm said before does not explain it."""
        self._seen.evidence_query = self._watch.ask()

    def look(self, now: float) -> None:
        """Take an answer that has come; ask again where one is still missing."""
        seen = self._seen
        if self._watch.collect():
            record = self._watch.latest
            seen.first_record = seen.first_record or record
            # An answer to a question from before the notice says nothing about its cause.
            after = seen.stop_asked is not None and self._watch.latest_query >= seen.stop_query
            if after and seen.notice_record is None:
                seen.notice_record = record
        unknown = seen.stop_asked is not None and seen.notice_record is None
        if unknown and not self._watch.asking and now >= self._next_stop_query:
            self._next_stop_query = now + _ASK_AGAIN_S
            self._watch.ask()

    def last(self, signals: Callable[[], bool]) -> None:
        """Slurm's last word on the job, if it comes soon: not for a launch that finished.

        ``signals`` says whether the batch step got any since it was called last.
        """
        seen, watch = self._seen, self._watch
        notice = seen.notice_record
        # The batch step hears of a preemption at the end of its grace time, of scancel at once.
        preempted = notice is not None and notice.preempt_time is not None
        known = preempted and not seen.batch_signals
        if seen.is_finished or seen.deadline_passed or known:
            return  # nothing to learn, or no time left for it
        for _ in range(_LAST_QUERIES):
            last_word(watch, seen, self._clock, self.look)
            if not signals():
                return  # else the answer may be from before the signal


def last_word(
    watch: JobWatch, seen: Seen, clock: Callable[[], float], look: Callable[[float], None]
) -> None:
    """Ask Slurm once more and ``look`` for its answer, as long as what comes next can wait."""
    seen.evidence_query = watch.ask()
    stop = seen.stop_asked is not None
    until = clock() + (LAST_QUERY_OF_STOP_S if stop else LAST_QUERY_S)
    while watch.latest_query < seen.evidence_query and watch.asking and clock() < until:
        look(clock())
        time.sleep(_TICK_S)
    look(clock())
