"""What runs inside a fake job: told of signals, it says when it exits and with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.fake_slurm.clock import Timer, VirtualClock

if TYPE_CHECKING:
    from slurm_forge.slurm.client import Slurm


#: Who gets a signal: the batch shell, or the tasks of all steps.
BATCH = "batch"
STEPS = "steps"


class StartOver(BaseException):
    """The processes of this start were killed while they waited: unwinds what they were doing.

    No ``Exception``: nothing in a process can handle that it is gone.
    """


class Program(Protocol):
    """The processes of one start of a job."""

    def started(self) -> None:
        """They run from here on."""
        ...

    def signalled(self, signal: str, to: str) -> None:
        """``SIGTERM`` and the like for ``BATCH`` or ``STEPS``.  SIGKILL is never told."""
        ...


Programs = Callable[["Start"], Program]


class Start:
    """One start of a job, as its own processes see it."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        job: str,
        restarts: int,
        nodes: tuple[str, ...],
        script: Path,
        ended: Callable[[Start, int, int, bool], None],
        client: Callable[[Start], Slurm],
    ) -> None:
        self._clock = clock
        self._ended = ended
        self._timers: list[Timer] = []
        self.job = job
        self.restarts = restarts
        self.nodes = nodes
        self.script = script
        #: Whether its processes are there; those of a node that Slurm lost may live on.
        self.alive = True
        #: Slurm's commands as they are run from inside: time that passes in them may be the last.
        self.slurm = client(self)

    @property
    def clock(self) -> VirtualClock:
        """The clock of the cluster."""
        return self._clock

    def exit(self, status: int = 0, *, signal: int = 0, out_of_memory: bool = False) -> None:
        """The batch script is over; nothing if the processes are gone already."""
        if self.alive:
            self.vanish()
            self._ended(self, status, signal, out_of_memory)

    def after(self, delay: timedelta, callback: Callable[[], None]) -> Timer:
        """Do something later, if the processes are there then."""

        def run() -> None:
            if self.alive:
                # Killed in the middle of it: there is nobody left to be told.
                self.shielded(callback)

        timer = self._clock.after(delay, run)
        self._timers.append(timer)
        return timer

    def sleep(self, seconds: float) -> None:
        """Let time pass for everybody; ``StartOver`` if these processes did not live to see it."""
        self.check()
        self._clock.advance(timedelta(seconds=seconds))
        self.check()

    def check(self) -> None:
        """``StartOver`` if the processes are gone."""
        if not self.alive:
            raise StartOver

    def shielded(self, callback: Callable[[], None]) -> None:
        """Run something of these processes, which may be killed in the middle of it."""
        try:
            callback()
        except StartOver:
            if self.alive:
                raise

    def vanish(self) -> None:
        """The processes are gone, without a word to Slurm."""
        self.alive = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The plain program: works ``seconds`` and exits with ``status``; a start with ``Runs(…)``.

    ``batch_term`` and ``steps_term`` are the statuses it exits with when the batch shell, or the
    tasks, get SIGTERM; None: it takes no notice of that.  It ``takes`` so many seconds to leave.
    """

    seconds: float = 600.0
    status: int = 0
    batch_term: int | None = 143
    steps_term: int | None = None
    takes: float = 0.0

    def __call__(self, start: Start) -> Program:
        """The processes of one start."""
        return _Running(self, start)


class _Running:
    def __init__(self, what: Runs, start: Start) -> None:
        self._what = what
        self._start = start

    def started(self) -> None:
        seconds = timedelta(seconds=self._what.seconds)
        self._start.after(seconds, lambda: self._start.exit(self._what.status))

    def signalled(self, signal: str, to: str) -> None:
        if signal != "SIGTERM":
            return
        status = self._what.batch_term if to == BATCH else self._what.steps_term
        if status is not None:
            by_signal = 15 if status == 143 else 0
            takes = timedelta(seconds=self._what.takes)
            leave = partial(self._start.exit, 0 if by_signal else status, signal=by_signal)
            self._start.after(takes, leave)
