"""The listeners of ``doctor --live``: one step for each way a rank may sit below Slurm."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from slurm_forge.control.live_words import Told, hear
from slurm_forge.launch.live_rounds import Ended
from slurm_forge.process import process_words
from slurm_forge.recovery.live_seen import Way

__all__ = ["LiveStep", "payload_of", "srun_words"]

_TAIL_LINES = 8


def payload_of(way: Way, python: str) -> tuple[str, ...]:
    """The command of one task that listens in this way."""
    listener = process_words("live_rank", way.value)
    rank = (python, "-u", *listener)
    match way:
        case Way.TASK:
            return (*rank, "--workers", Way.WORKER.value, Way.WORKER_PLAIN.value)
        case Way.TASK_PLAIN:
            return (*rank, "--plain")
        case Way.SHELL:
            # With something behind it the shell stays, as where a script starts the training.
            return ("bash", "-c", f"{shlex.join(rank)}; exit $?")
        case Way.TORCHRUN:
            options = ("--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
            return (python, "-m", "torch.distributed.run", *options, *listener)
        case _:
            raise ValueError(f"{way.value} is no step of its own")


def srun_words(
    payload: Sequence[str], *, nodes: int, on: str | None, options: Sequence[str] = ()
) -> tuple[str, ...]:
    """A small step that shares everything with the others (``--overlap``: 20.11 and later)."""
    where = () if on is None else (f"--nodelist={on}",)
    small = ("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", "--unbuffered")
    size = (f"--nodes={nodes}", f"--ntasks={nodes}")
    return ("srun", "--overlap", *size, *small, *where, "--job-name=forge-live", *options, *payload)


class LiveStep:
    """One step whose listeners are heard through a pipe; ``tell`` gets what happens, from a thread.

    ``present`` is who has said that it is there.
    """

    def __init__(
        self,
        way: Way,
        command: Sequence[str],
        environment: Mapping[str, str],
        tell: Callable[[Told | Ended], None],
    ) -> None:
        self.way = way
        self.present: set[tuple[Way, str]] = set()
        self._tell = tell
        self._said: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._thread = threading.Thread(target=self._read, name="forge-live", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its srun still runs."""
        return self._process.poll() is None

    @property
    def words(self) -> str:
        """The end of what it has printed beside the listeners' lines."""
        return " ".join(" ".join(self._said).split())

    def close(self, patience_s: float = 1.0) -> None:
        """End it: its listeners go with their input."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None  # noqa: S101  asked for above
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                told = hear(line)
                if told is None:
                    self._said.append(line)
                    continue
                if told.what == "here":
                    self.present.add((Way(told.way), told.host))
                self._tell(told)
        self._tell(Ended(self.way, time.time()))
