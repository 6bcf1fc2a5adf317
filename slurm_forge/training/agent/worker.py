"""The forked worker of an agent: its life and its end, as the agent reports them.

A worker runs slurm_forge's own rank, or a module by name.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_forge.control.messages.agent import StartWorker, WorkerEnded
from slurm_forge.descendants import reap
from slurm_forge.errors import ForgeError
from slurm_forge.process import process_words
from slurm_forge.signals import signal_name
from slurm_forge.slurm.kernel import OomKills, killed_since, read_oom_kills
from slurm_forge.training.rank.in_process_relaunch import (
    ParkedWorker,
    ParkingPlace,
)


@dataclass(slots=True)
class ForkedWorker:
    """The worker of a launch, dead or alive.  Times are on the agent's monotonic clock.

    ``kills`` are the kernel's counters before it began.
    """

    pid: int
    launch: int
    kills: OomKills
    parking: ParkedWorker
    #: Its launch is over, and it waits for the next one.
    parked: bool = False
    killed_by_agent: bool = False
    status: int | None = None
    memory: str = ""
    others: int = 0
    ending_since: float | None = None
    #: Whether the end of its launch was reported already, when it had unwound.
    end_reported: bool = False

    @property
    def has_unwound(self) -> bool:
        """Whether it now waits for another launch; True once per launch."""
        return self.parking.waits and not self.parked and self.ending_since is None

    def park(self) -> None:
        """Record that its launch is over and it lives on."""
        self.parked, self.end_reported = True, True
        # One of its data-loader workers may have been killed for memory: it only unwound.
        self.memory = killed_since(self.kills, read_oom_kills()) or ""

    def goes_on(self, order: StartWorker) -> bool:
        """Whether it accepts the order, which makes it the worker of another launch."""
        if not (order.in_process and self.parking.go_on(order)):
            return False
        self.launch = order.launch
        self.parked = self.killed_by_agent = self.end_reported = False
        self.kills = read_oom_kills()
        return True

    def kill(self, now: float) -> None:
        """End it on the agent's behalf; only before it is reaped, while the id is its own."""
        self.killed_by_agent = True
        self.ending_since = self.ending_since or now
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def collect(self, now: float) -> None:
        """Reap it if it has ended; its ``status`` is that of ``waitpid``."""
        try:
            self.status = reap(self.pid)
        except ChildProcessError:
            self.status = 0
        if self.status is not None:
            self.ending_since = self.ending_since or now
            self.memory = killed_since(self.kills, read_oom_kills()) or ""

    def ended(self, left: str) -> WorkerEnded:
        """The report to the supervisor on its end; ``left`` is what can't be ended."""
        status = self.status
        by_signal = status is not None and os.WIFSIGNALED(status)
        return WorkerEnded(
            launch=self.launch,
            pid=self.pid,
            signal=signal_name(os.WTERMSIG(status)) if status is not None and by_signal else "",
            code=os.WEXITSTATUS(status) if status is not None and not by_signal else 0,
            ours=self.killed_by_agent,
            memory=self.memory,
            others=self.others,
            left=left,
            parked=self.parked,
        )


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker runs: slurm_forge's rank, or a module with arguments (``python -m``)."""

    run: str
    module: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The same as a command line for a separate process."""
        if self.module:
            return (sys.executable, "-u", "-m", self.module, *self.arguments)
        return (sys.executable, "-u", *process_words("worker", self.run))

    def go(self, parking: ParkingPlace) -> None:
        """Run it in this process; slurm_forge's own never returns, and only it can be reused."""
        if self.module:
            sys.argv = [self.module, *self.arguments]
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        else:
            from slurm_forge.training.rank.main import main as be_a_rank

            be_a_rank([self.run], parking)


def program_of(arguments: Sequence[str]) -> Program:
    """``RUN [-- -m MODULE ARGUMENTS…]``; ``ForgeError`` for anything else."""
    run, *rest = arguments or [""]
    if run and not rest:
        return Program(run)
    if run and len(rest) >= 3 and rest[:2] == ["--", "-m"]:
        return Program(run, rest[2], tuple(rest[3:]))
    raise ForgeError(
        f"the agent was started with {list(arguments)}",
        next_step="python -m slurm_forge.process agent RUN [-- -m MODULE …]",
    )
