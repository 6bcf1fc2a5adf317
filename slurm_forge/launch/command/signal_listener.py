"""Steps that listen for signals, heard through a pipe: the sentinel's beside the program's own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from slurm_forge.launch.command import signal_listener_main as sentinel

_TAIL_LINES = 20
_LEAVES_S = 1.0
#: What of the batch step's environment would ask for more than one small task.
_ASKS = re.compile(
    r"(?:SLURM|SRUN)_(?:N?TASKS.*|NPROCS|NTASKS_PER_.*|TASKS_PER_NODE|NNODES|JOB_NUM_NODES"
    r"|MEM_PER_.*|CPUS_PER_.*|GPUS.*|TRES_PER_TASK|GRES.*|DISTRIBUTION|CPU_BIND.*|MEM_BIND.*"
    r"|THREADS_PER_CORE|HINT|CORE_SPEC|EXCLUSIVE|EXACT|WHOLE|OVERLAP|LABELIO|UNBUFFEREDIO"
    r"|INPUTMODE|STDINMODE|STDOUTMODE|STDERRMODE|KILL_BAD_EXIT|WAIT|MULTI_PROG|CONTAINER.*|NETWORK)"
)


def small_step(
    payload: Sequence[str], *, nodes: int, on: str | None, name: str, options: Sequence[str] = ()
) -> tuple[str, ...]:
    """The srun of one task on each of ``nodes``, which shares everything with the job's steps.

    ``--overlap`` is there since 20.11.
    """
    where = () if on is None else (f"--nodelist={on}",)
    size = (f"--nodes={nodes}", f"--ntasks={nodes}", "--cpus-per-task=1", "--mem=0")
    name = f"--job-name={name}"
    return ("srun", "--overlap", *size, *where, name, "--unbuffered", *options, *payload)


def sentinel_command(python: str, node: str | None) -> tuple[str, ...]:
    """The argument list of the sentinel's step; where srun refuses it, Slurm is asked instead."""
    # By its file, alone: nothing else is imported, from wherever the job was started.
    payload = (python, "-I", "-S", sentinel.__file__)
    return small_step(payload, nodes=1, on=node, name="forge-sentinel")


def sentinel_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Without what the job says of its own tasks."""
    return {name: value for name, value in variables.items() if not _ASKS.fullmatch(name)}


class ListenerStep:
    """A step that listens: ``hear`` gets each line of its output, ``end`` its end, from a thread.

    It leaves when its input is closed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        hear: Callable[[str], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._error_lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._error_lines.append(f"{command[0]} can't be started: {error.strerror or error}")
            return
        for stream, on_line, on_end in (
            (self._process.stdout, hear, end),
            (self._process.stderr, self._error_lines.append, lambda: None),
        ):
            assert stream is not None  # noqa: S101  asked for above
            threading.Thread(
                target=_read, args=(stream, on_line, on_end), name="forge-listener", daemon=True
            ).start()

    @property
    def runs(self) -> bool:
        """Whether its srun is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def failed(self) -> str:
        """Why it is not there, where its step has ended; empty while it may still come."""
        if self.runs:
            return ""
        return " ".join(" ".join(self._error_lines).split()) or "its step has ended"

    def words(self) -> str:
        """What Slurm has printed of its step: it speaks of the job's end, too."""
        return "".join(self._error_lines)

    def close(self) -> None:
        """End it."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(_LEAVES_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class SentinelStep(ListenerStep):
    """``tell`` gets the name of every signal, from a thread; ``alive`` once it listens."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self._on_signal = tell
        self._listens = threading.Event()
        super().__init__(command, environment, self._on_line)

    def listens(self, wait_s: float = 0.0) -> bool:
        """Whether it is there, once ``wait_s`` are over at the latest."""
        self._listens.wait(wait_s)
        return self.alive

    @property
    def alive(self) -> bool:
        """Whether a signal would be told of now."""
        return self._listens.is_set() and self.runs

    def _on_line(self, line: str) -> None:
        word = line.strip()
        if word == sentinel.HERE:
            self._listens.set()
        elif word in signal.Signals.__members__:
            self._on_signal(word)


def _read(stream: IO[str], hear: Callable[[str], None], end: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            hear(line)
    end()
