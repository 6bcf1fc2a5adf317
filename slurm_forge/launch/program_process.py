"""A command that knows nothing of us: started in a process group of its own, told, and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from slurm_forge.errors import ConfigError, SlurmCommandError
from slurm_forge.launch.convention import Forwarding, starts_steps
from slurm_forge.launch.process_tree import below, read_marked, read_processes
from slurm_forge.launch.program_end import status_of
from slurm_forge.launch.teeing import Tail, open_stream
from slurm_forge.recovery.launch_facts import WorkerEnd
from slurm_forge.slurm.client import Slurm
from slurm_forge.spec.program import NotifyTo, ProgramSpec

__all__ = ["ProgramProcess"]

#: Output of a program that has ended may still be on its way; what it left running may hold on
#: to it for ever.
_DRAIN_S = 1.0


class ProgramProcess:
    """The running command.  Its output passes through; ``heard`` are what it printed of interest.

    ``mark`` is in its environment and in nobody else's: torchrun's workers are in sessions of
    their own, and outlive it where it is killed.  ``ConfigError`` where it can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        program: ProgramSpec,
        *,
        mark: str,
        slurm: Slurm | None = None,
        job: str = "",
        folder: str | None = None,
    ) -> None:
        self.command = tuple(command)
        self._mark = mark
        self.printed_step: int | None = None
        self.printed_done = False
        self._slurm = slurm
        self._job = job
        self._tail = Tail()
        self._step = None if program.step_pattern is None else re.compile(program.step_pattern)
        self._done = None if program.done_pattern is None else re.compile(program.done_pattern)
        hearers = (self._hear,) if self._step or self._done else ()
        sys.stdout.flush()
        sys.stderr.flush()
        streams = [open_stream(target, self._tail, hearers) for target in (1, 2)]
        try:
            self._process = subprocess.Popen(
                self.command,
                env=dict(environment),
                cwd=folder,
                stdout=streams[0].given,
                stderr=streams[1].given,
                # A session of its own: what is for our process group (Ctrl-C, a signal of the
                # site's for the batch step) is ours to interpret first.
                start_new_session=True,
            )
        except OSError as error:
            for stream in streams:
                os.close(stream.given)
            raise ConfigError(
                f"{self.command[0]} can't be started: {error.strerror or error}",
                next_step="Write what comes after -- as you would type it; a script of your own "
                "needs its path (./train.sh), and shell syntax a shell: -- bash -c '…'",
            ) from None
        self.began = time.monotonic()
        for stream in streams:
            stream.begin()
        self._readers = [stream.reader for stream in streams]

    @property
    def pid(self) -> int:
        """Of the command itself, and of its process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status as shells tell it, or None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        until = time.monotonic() + _DRAIN_S
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        return status_of(status)

    def tell(self, how: Forwarding, *, steps_know: bool) -> str:
        """Signal whom it is for; in words, who that was.

        ``steps_know``: Slurm has sent the tasks of steps that signal already.
        """
        number = signal.Signals[how.signal]
        told: list[str] = []
        pids: tuple[int, ...] = (self.pid,)
        steps = how.to is NotifyTo.RANKS
        if how.to is NotifyTo.TREE:
            found = below(read_processes(), self.pid)
            pids, steps = found.pids, found.steps
        elif how.to is NotifyTo.RANKS:
            pids = ()
        if how.to is NotifyTo.GROUP:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
                told.append(f"process group {self.pid}")
        else:
            for pid in pids:
                if pid == self.pid and starts_steps(self.command):
                    continue  # srun would end the step
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                    told.append(f"process {pid}")
        if steps and self._slurm is not None:
            if steps_know and not how.again:
                told.append("tasks of steps (by Slurm itself)")
            else:
                told.append(self._tell_steps(how.signal))
        return f"{how.signal} to {', '.join(told) or 'nobody: there is no process for it'}"

    def has_steps(self) -> bool:
        """Whether srun runs in it: Slurm signals its tasks itself, whatever it is told by us."""
        mine = {self.pid, *read_marked(self._mark)}
        return any(starts_steps(each.words) for each in read_processes() if each.pid in mine)

    def _tell_steps(self, name: str) -> str:
        assert self._slurm is not None  # noqa: S101  asked by the caller
        try:
            self._slurm.cancel(self._job, signal=name.removeprefix("SIG"))
        except SlurmCommandError as error:
            return f"no tasks of steps ({error.message[:200]})"
        return "tasks of steps"

    def terminate(self) -> None:
        """The last warning: SIGTERM to everything in its process group, whatever it was told."""
        if starts_steps(self.command) and self._slurm is not None:
            self._tell_steps("SIGTERM")
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with everything that it has started on this machine."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in read_marked(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def clear(self, timeout_s: float) -> None:
        """Whatever is left of it is ended, before it may be started again."""
        until = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None and not read_marked(self._mark):
                return
            self.kill()
            if time.monotonic() >= until:
                return  # it sits in the kernel
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int | None:
        """Exit status once it has ended, None if it has not within the time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout_s)
        return self.poll()

    def tail(self) -> str:
        """The last of its output."""
        return self._tail.text()

    def launcher_signal(self) -> str:
        """Nothing: the program is what ends, not what started it."""
        return ""

    def ends(self) -> tuple[WorkerEnd, ...]:
        """Nothing: what ranks there may be are somebody else's."""
        return ()

    def _hear(self, line: str) -> None:
        if self._done is not None and self._done.search(line):
            self.printed_done = True
        if self._step is not None:
            # A progress bar may write many of them without a line's end: the last one counts.
            for found in self._step.finditer(line):
                if found[1] and found[1].isdecimal() and len(found[1]) < 19:
                    self.printed_step = int(found[1])
