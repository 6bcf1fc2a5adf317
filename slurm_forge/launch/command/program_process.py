"""A command that knows nothing of us: started in a process group of its own, told, and ended.

Passes a program's output on as it comes, keeps its end, and looks for words in it.

The processes below a command, and which of them are told that the time is up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import ConfigError, SlurmCommandError
from slurm_forge.launch.command.metrics import MetricHistory, MetricReader
from slurm_forge.launch.command.program_end import status_of
from slurm_forge.launch.render.signal_convention import (
    Forwarding,
    is_starter,
    starts_steps,
)
from slurm_forge.recovery.incident.launch_facts import WorkerEnd
from slurm_forge.slurm.client import Slurm
from slurm_forge.spec.launchers import NotifyTo, ProgramSpec
from slurm_forge.spec.metric_patterns import metric_patterns

#: Output of a program that has ended may still be on its way; what it left running may hold on
#: to it for ever.
_DRAIN_S = 1.0
#: How long srun's shepherd may take to have Slurm kill a step.
_SHEPHERD_S = 3.0


class ProgramProcess:
    """The running command.  Its output passes through and is searched for what is of interest.

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
        self.printed_done = False
        self._slurm = slurm
        self._job = job
        self._tail = OutputTail()
        patterns = metric_patterns(program.metric_pattern, program.step_pattern)
        self._metrics = None if patterns is None else MetricReader(patterns)
        self._done_pattern = (
            None if program.done_pattern is None else re.compile(program.done_pattern)
        )
        hearers = (self._parse_line,) if self._metrics or self._done_pattern else ()
        sys.stdout.flush()
        sys.stderr.flush()
        streams = [open_stream(target, self._tail, hearers) for target in (1, 2)]
        try:
            self._process = subprocess.Popen(
                self.command,
                env=dict(environment),
                cwd=folder,
                stdout=streams[0].child_end,
                stderr=streams[1].child_end,
                # A session of its own: what is for our process group (Ctrl-C, a signal of the
                # site's for the batch step) is ours to interpret first.
                start_new_session=True,
            )
        except OSError as error:
            for stream in streams:
                os.close(stream.child_end)
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
    def metrics(self) -> MetricHistory:
        """What it has printed of its steps and values."""
        return MetricHistory() if self._metrics is None else self._metrics.history

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

    def forward(self, how: Forwarding, *, steps_know: bool) -> str:
        """Signal whom it is for; in words, who that was.

        ``steps_know``: Slurm has sent the tasks of steps that signal already.
        """
        number = signal.Signals[how.signal]
        recipients: list[str] = []
        pids: tuple[int, ...] = (self.pid,)
        steps = how.to is NotifyTo.RANKS
        if how.to is NotifyTo.TREE:
            below_program = below(read_processes(), self.pid)
            pids, steps = below_program.pids, below_program.steps
        elif how.to is NotifyTo.RANKS:
            pids = ()
        if how.to is NotifyTo.GROUP:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
                recipients.append(f"process group {self.pid}")
        else:
            for pid in pids:
                if pid == self.pid and starts_steps(self.command):
                    continue  # srun would end the step
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                    recipients.append(f"process {pid}")
        if steps and self._slurm is not None:
            if steps_know and not how.again:
                recipients.append("tasks of steps (by Slurm itself)")
            else:
                recipients.append(self._signal_steps(how.signal))
        return f"{how.signal} to {', '.join(recipients) or 'no process'}"

    def has_steps(self) -> bool:
        """Whether srun runs in it: Slurm signals its tasks itself, whatever it is told by us."""
        pids = {self.pid, *read_marked(self._mark)}
        return any(starts_steps(each.words) for each in read_processes() if each.pid in pids)

    def _signal_steps(self, name: str) -> str:
        assert self._slurm is not None  # noqa: S101  asked by the caller
        try:
            self._slurm.cancel(self._job, signal=name.removeprefix("SIG"))
        except SlurmCommandError as error:
            return f"no tasks of steps ({error.message[:200]})"
        return "tasks of steps"

    def terminate(self) -> None:
        """The last warning: SIGTERM to everything in its process group, whatever it was told."""
        if starts_steps(self.command) and self._slurm is not None:
            self._signal_steps("SIGTERM")
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)

    def kill_everywhere(self) -> None:
        """End it now, and the tasks of its steps on other nodes, before they can save.

        srun's shepherd, a child of it, has Slurm kill the step once srun itself is gone
        (_shepherd_spawn in its srun_job.c).  scancel --signal=KILL would cancel the job.
        """
        own = {self.pid, *read_marked(self._mark)}
        sruns = {each.pid: each.parent for each in read_processes() if starts_steps(each.words)}
        for pid, parent in sruns.items():
            if pid in own and parent not in sruns:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + _SHEPHERD_S
        own &= sruns.keys()
        while time.monotonic() < until and own & {each.pid for each in read_processes()}:
            self._process.poll()
            time.sleep(0.05)
        self.kill()

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

    def _parse_line(self, line: str) -> None:
        if self._done_pattern is not None and self._done_pattern.search(line):
            self.printed_done = True
        if self._metrics is not None:
            self._metrics.read(line)


_KEPT = 1 << 16
_READ = 1 << 16
#: A line that is longer (a progress bar without end) is looked at in parts.
_LONGEST_LINE = 4096
_BLOCKED_S = 1.0
#: A busy machine lets the threads that read wait this long.
_AT_ONCE_S = 0.2
_NOBODY = frozenset({errno.EPIPE, errno.EBADF})
_LINE_ENDS = re.compile(rb"[\r\n]+")


@dataclass(frozen=True, slots=True)
class _Printed:
    target: int
    time: float
    data: bytes


class OutputTail:
    """The last of what a program printed, errors and all, in the order that it came.

    Its two streams are read by two threads.  What came at the very end on both has no order that
    could be known, and the errors are put last: a program ends behind its own last words.
    """

    def __init__(self, most: int = _KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._parts: deque[_Printed] = deque()
        self._size = 0
        self._lock = threading.Lock()

    def add(self, data: bytes, target: int = 1) -> None:
        """Keep it, and let go of what is too old; ``target`` is 2 for the errors."""
        with self._lock:
            self._parts.append(_Printed(target, self._clock(), data))
            self._size += len(data)
            while self._size - len(self._parts[0].data) >= self._most:
                self._size -= len(self._parts.popleft().data)

    def text(self) -> str:
        """What is kept."""
        with self._lock:
            parts = list(self._parts)
        since = parts[-1].time - _AT_ONCE_S if parts else 0.0
        parts.sort(key=lambda part: part.target if part.time > since else 0)
        joined = b"".join(part.data for part in parts)
        return joined[-self._most :].decode(errors="replace")


class LineSplitter:
    """Cuts bytes into lines for whoever looks for something in them."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._parse_line = hear
        self._partial_line = b""

    def add(self, data: bytes) -> None:
        """A carriage return ends a line, too: progress bars know no other."""
        *complete, rest = _LINE_ENDS.split(self._partial_line + data)
        while len(rest) > _LONGEST_LINE:
            complete.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._partial_line = rest
        for line in complete:
            for at in range(0, len(line), _LONGEST_LINE):
                self._parse_line(line[at : at + _LONGEST_LINE].decode(errors="replace"))

    def end(self) -> None:
        """What was left without a line's end."""
        if self._partial_line:
            self._parse_line(self._partial_line.decode(errors="replace"))
            self._partial_line = b""


@dataclass(frozen=True, slots=True)
class OutputStream:
    """What the program writes to, and the thread that reads it once it was started."""

    child_end: int
    reader: threading.Thread

    def begin(self) -> None:
        """The program has its end now."""
        os.close(self.child_end)
        self.reader.start()


def open_stream(
    target: int, tail: OutputTail, hearers: Sequence[Callable[[str], None]] = ()
) -> OutputStream:
    """A stream whose output goes on to the descriptor ``target``.

    Where that is a terminal the program gets one, too: colours and progress bars stay.
    """
    reading_end, writing_end = (
        _terminal_like(target) if os.isatty(target) else os.pipe2(os.O_CLOEXEC)
    )
    lines = [LineSplitter(hear) for hear in hearers]

    def pump() -> None:
        is_broken = False
        while data := _read(reading_end):
            tail.add(data, target)
            for each in lines:
                each.add(data)
            if not is_broken:
                is_broken = not _write(target, data)
        for each in lines:
            each.end()
        os.close(reading_end)

    return OutputStream(
        writing_end, threading.Thread(target=pump, name="forge-output", daemon=True)
    )


def _terminal_like(target: int) -> tuple[int, int]:
    master, slave = os.openpty()
    for descriptor in (master, slave):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(target, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(slave)
        modes[1] &= ~termios.OPOST  # the terminal behind it turns line ends, once is enough
        termios.tcsetattr(slave, termios.TCSANOW, modes)
    return master, slave


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _READ)
    except OSError as error:
        if error.errno == errno.EIO:  # a terminal whose last user has gone
            return b""
        raise


def _write(target: int, data: bytes) -> bool:
    """False once nobody reads it any more; the program is not to die of that.

    What a full disk does not take is lost; what comes once there is room again is not.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            select.select([], [target], [], _BLOCKED_S)
        except OSError as error:
            return error.errno not in _NOBODY
    return True


_PROC = Path("/proc")
_LONGEST_COMMAND = 8192


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process: its number, its parent's, and the words it was started with."""

    pid: int
    parent: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProcessesBelow:
    """Who is to be told: processes here, and whether srun has started tasks somewhere."""

    pids: tuple[int, ...]
    steps: bool = False


def read_processes(proc: Path = _PROC) -> tuple[ProcessEntry, ...]:
    """Every process of this user; what ends while it is looked at is left out."""
    processes = []
    me = os.getuid()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != me:
                continue
            # The name in brackets may hold anything, brackets too: what counts is behind the last.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (entry / "cmdline").read_bytes()[:_LONGEST_COMMAND].split(b"\0")[:-1]
        except (OSError, ValueError):
            continue
        if state != "Z":
            arguments = tuple(word.decode(errors="replace") for word in words)
            processes.append(ProcessEntry(int(entry.name), int(parent), arguments))
    return tuple(processes)


def read_marked(mark: str, proc: Path = _PROC) -> tuple[int, ...]:
    """Processes of this user that were started with ``mark``, NAME=value, in their environment.

    Neither this one nor those that have started it.
    """
    pids = []
    mark_bytes = os.fsencode(mark)
    processes = read_processes(proc)
    spared = _line_of(os.getpid(), processes)
    for process in processes:
        try:
            environment = (proc / str(process.pid) / "environ").read_bytes()
        except OSError:
            continue
        if mark_bytes in environment.split(b"\0") and process.pid not in spared:
            pids.append(process.pid)
    return tuple(pids)


def _line_of(pid: int, processes: Iterable[ProcessEntry]) -> frozenset[int]:
    """A process and its ancestors."""
    parents = {process.pid: process.parent for process in processes}
    line = {pid}
    while (pid := parents.get(pid, 0)) and pid not in line:
        line.add(pid)
    return frozenset(line)


def below(processes: Iterable[ProcessEntry], root: int) -> ProcessesBelow:
    """What the launchers and shells from ``root`` on have started: the first that is none of them.

    Not what that starts in turn (workers of a data loader die of a signal that was meant for it).
    A launcher that has started nothing yet is told itself.
    """
    children: defaultdict[int, list[ProcessEntry]] = defaultdict(list)
    table = {}
    for process in processes:
        children[process.parent].append(process)
        table[process.pid] = process
    pids: list[int] = []
    steps = False
    visited: set[int] = set()
    todo = [table[root]] if root in table else []
    while todo:
        process = todo.pop()
        if process.pid in visited:
            continue
        visited.add(process.pid)
        own = children[process.pid]
        if starts_steps(process.words):
            steps = True
        elif is_starter(process.words) and any(_counts(child.words) for child in own):
            todo += own
        elif _counts(process.words):
            pids.append(process.pid)
    return ProcessesBelow(tuple(sorted(pids)), steps)


def _counts(words: Sequence[str]) -> bool:
    """Not a shell's ``sleep`` in a loop, nor what only passes text on."""
    return bool(words) and words[0].rpartition("/")[2] not in _BESIDE


_BESIDE = frozenset({"sleep", "tee", "cat", "tail", "awk", "sed", "grep", "ts"})
