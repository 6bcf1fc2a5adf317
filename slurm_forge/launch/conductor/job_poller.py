"""Asking Slurm about our own job without ever making the conductor wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.clock import SlurmClock, slurm_clock
from slurm_forge.slurm.records import ConfigRecord, JobRecord

_LONGEST_COMMENT = 200
#: How long the controller's time is waited for before this node's clock is taken for it.
_TIME_WITHIN_S = 30.0


class ConfigQuery:
    """slurm.conf with the controller's time: one question for all who need the answer.

    ``ask`` waits for the answer, from any thread; a question that failed may be asked again.
    """

    def __init__(
        self,
        slurm: Slurm,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._slurm = slurm
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self.answer: ConfigRecord | None = None
        #: The controller's clock, once it is known.
        self.clock: SlurmClock | None = None

    def ask(self) -> None:
        """Ask Slurm, unless it has answered; raises what the client does."""
        with self._lock:
            if self.answer is not None and self.clock is not None:
                return
            asked_at, before = self._clock(), self._wall()
            answer = self._slurm.show_config()
            self.clock = slurm_clock(answer, asked_at=asked_at, before=before, after=self._wall())
            self.answer = answer


class JobPoller:
    """The latest record of one job; ``ask`` returns at once, ``latest`` is what came back.

    The first queries also ask for the controller's time, until it has been told.  For one thread.
    ``background`` runs a query beside it, on a thread unless told otherwise.  Queries are numbered
    from 1, so that an answer from before an event can be told from one after it.
    """

    def __init__(
        self,
        slurm: Slurm | None,
        job: str,
        *,
        background: Callable[[Callable[[], None]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._slurm = slurm
        self._background = background or _in_thread
        self._job = job
        self._clock = clock
        self.config = None if slurm is None else ConfigQuery(slurm, clock=clock, wall=wall)
        self._pending: Future[JobRecord | None] | None = None
        self._last_query = 0
        self._query_again = False
        self._closed = False
        #: The newest record, the number of the query that brought it, and every error's text.
        self.latest: JobRecord | None = None
        self.latest_query = 0
        self.errors: list[str] = []
        #: The controller's clock, once it is known.
        self.clock: SlurmClock | None = None
        #: When Slurm was asked first.
        self._asked_at: float | None = None

    @property
    def has_slurm(self) -> bool:
        """Whether there is a Slurm to ask."""
        return self._slurm is not None

    def ask(self) -> int:
        """Begin a query, after the one under way if there is one; its number."""
        if self._pending is not None:
            self._query_again = True
            return self._last_query + 1
        if self._slurm is None or self._closed:
            return self._last_query
        self._last_query += 1
        self._asked_at = self._clock() if self._asked_at is None else self._asked_at
        self._pending = Future()
        self._background(partial(self._query, self._slurm, self._pending))
        return self._last_query

    def since(self, query: int) -> JobRecord | None:
        """The newest record, if it answers this query or a later one; None else."""
        return self.latest if self.latest_query >= query else None

    def comment(self, text: str) -> None:
        """Write a line beside the job, for ``squeue`` and ``scontrol show job``: if it can be had.

        In the background; nobody waits for it, and nobody is told when it fails.
        """
        if self._slurm is None or self._closed:
            return
        line = "".join(each if each.isprintable() else " " for each in text)[:_LONGEST_COMMENT]
        self._background(partial(_comment, self._slurm, self._job, line))

    def _query(self, slurm: Slurm, answer: Future[JobRecord | None]) -> None:
        try:
            answer.set_result(slurm.show_job(self._job))
        except Exception as error:
            # What Slurm says is evidence; an answer that can't be had or read is none, no more.
            answer.set_exception(error)
            return
        if self.config is not None:
            with contextlib.suppress(Exception):
                self.config.ask()

    @property
    def next_query(self) -> int:
        """The number of the first query that is begun from now on."""
        return self._last_query + 1

    @property
    def awaits_time(self) -> bool:
        """Whether the controller may still tell its time: then nothing is judged by this node's."""
        if self.clock is not None or self._slurm is None:
            return False
        return self._asked_at is None or self._clock() < self._asked_at + _TIME_WITHIN_S

    @property
    def asking(self) -> bool:
        """Whether an answer is still awaited."""
        return self._pending is not None

    def collect(self) -> bool:
        """Take an answer in if there is one; True if ``latest`` is new."""
        if self.clock is None and self.config is not None:
            self.clock = self.config.clock
        if self._pending is None or not self._pending.done():
            return False
        asking, self._pending = self._pending, None
        number, again, self._query_again = self._last_query, self._query_again, False
        if again:
            self.ask()
        error = asking.exception()
        if error is not None:
            self.errors.append(str(error))
            return False
        record = asking.result()
        if record is None:
            return False
        self.latest, self.latest_query = record, number
        return True

    def close(self) -> None:
        """Give up on a query under way (it has its own timeout)."""
        self._closed = True
        self._query_again = False


def _in_thread(work: Callable[[], None]) -> None:
    # A daemon: a controller that does not answer must not keep this process from ending.
    threading.Thread(target=work, name="forge-scontrol", daemon=True).start()


def _comment(slurm: Slurm, job: str, text: str) -> None:
    with contextlib.suppress(Exception):  # a comment is for people; the journal has it, too
        slurm.update_job(job, JobUpdate(comment=text))
