"""What Slurm is asked about the job of a launch: at a notice, and at the launch's end."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.conductor.observations import Observations

#: While a stop is under way and Slurm has not said yet when the job ends.
_ASK_AGAIN_S = 5.0
#: Where nobody hears of a preemption: this seldom, for the sake of those who run thousands of jobs.
_ASK_SELDOM_S = 20.0
_TICK_S = 0.05
#: How long the last question to Slurm may hold up what comes after the launch.
LAST_QUERY_S = 3.0
#: The same where somebody wants the nodes: the intent to come back has to be on disk first, and
#: whoever carries it out waits for the answer.
LAST_QUERY_OF_STOP_S = 1.0
_LAST_QUERIES = 2


class JobQueries:
    """Asks, and notes in what was seen what the answers say.  Times are of the given clock.

    ``is_deaf``: nobody hears of a preemption now, so that Slurm has to be asked now and then; None
    where ranks do.
    """

    def __init__(
        self,
        job_poller: JobPoller,
        observations: Observations,
        clock: Callable[[], float],
        is_deaf: Callable[[], bool] | None = None,
    ) -> None:
        self._job_poller = job_poller
        self._observations = observations
        self._clock = clock
        self._is_deaf = is_deaf
        self._next_query = clock() + _ASK_SELDOM_S

    def stop_asked(self, now: float) -> None:
        """A stop is asked for: why, and until when, Slurm knows."""
        self._observations.stop_query = self._observations.evidence_query = self._job_poller.ask()
        self._next_query = now + _ASK_AGAIN_S

    def batch_signalled(self) -> None:
        """The batch step got a signal: what Slurm said before does not explain it."""
        self._observations.evidence_query = self._job_poller.ask()

    def poll(self, now: float) -> str:
        """Take an answer that has come, and ask again where one is missing.

        Returns:
            That Slurm preempts the job, where nobody has been signalled for it yet; else nothing.
        """
        observations, job_poller = self._observations, self._job_poller
        preempted = ""
        if job_poller.collect() and job_poller.latest is not None:
            record = job_poller.latest
            before = observations.first_record = observations.first_record or record
            # An answer to a question from before the notice says nothing about its cause.
            if (
                observations.stop_asked is not None
                and job_poller.latest_query >= observations.stop_query
            ):
                observations.notice_record = observations.notice_record or record
            news = record.preempt_time not in (None, before.preempt_time)
            if news and self._is_deaf is not None:
                observations.notice_record = observations.notice_record or record
                preempted = f"PreemptTime={record.preempt_time:%H:%M:%S}"
        if job_poller.asking or now < self._next_query:
            return preempted
        unknown = observations.stop_asked is not None and observations.notice_record is None
        deaf = observations.stop_asked is None and self._is_deaf is not None and self._is_deaf()
        if unknown or deaf:
            self._next_query = now + (_ASK_AGAIN_S if unknown else _ASK_SELDOM_S)
            job_poller.ask()
        return preempted

    def last(self, signals: Callable[[], bool], *, of_program: bool = False) -> None:
        """Slurm's last word on the job, if it comes soon: not for a launch that finished.

        ``signals`` says whether the batch step got any since it was called last.  ``of_program``:
        also where it is known why the launch was stopped: a program ends faster than ranks do.
        """
        observations, job_poller = self._observations, self._job_poller
        notice = observations.notice_record
        # The batch step hears of a preemption at the end of its grace time, of scancel at once.
        preempted = notice is not None and notice.preempt_time is not None
        is_explained = preempted and not observations.batch_signals and not of_program
        if observations.is_finished or observations.deadline_passed or is_explained:
            return  # nothing to learn, or no time left for it
        for _ in range(_LAST_QUERIES):
            ask_finally(job_poller, observations, self._clock, self.poll)
            if not signals():
                return  # else the answer may be from before the signal


def ask_finally(
    job_poller: JobPoller,
    observations: Observations,
    clock: Callable[[], float],
    poll: Callable[[float], object],
) -> None:
    """Ask Slurm once more and ``poll`` for its answer, as long as what comes next can wait."""
    observations.evidence_query = job_poller.ask()
    stop = observations.stop_asked is not None
    until = clock() + (LAST_QUERY_OF_STOP_S if stop else LAST_QUERY_S)
    while (
        job_poller.latest_query < observations.evidence_query
        and job_poller.asking
        and clock() < until
    ):
        poll(clock())
        time.sleep(_TICK_S)
    poll(clock())
