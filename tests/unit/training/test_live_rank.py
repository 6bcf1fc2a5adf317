"""The process that stands where a rank would, with real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from slurm_forge.control.messages.live import ListenerEvent
from slurm_forge.launch.diagnose.live_rounds import parse_event

LONG_S = 60


class Listener:
    """One of them, and what it says."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-u", "-m", "slurm_forge.process", "live_rank", *words]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURMD_NODENAME": "n1"},
        )
        self._said: SimpleQueue[ListenerEvent] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            told = parse_event(line)
            if told is not None:
                self._said.put(told)

    def next(self) -> ListenerEvent:
        return self._said.get(timeout=LONG_S)

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(w) for w in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def listening(*words: str) -> Iterator[Listener]:
    listener = Listener(*words)
    try:
        yield listener
    finally:
        listener.process.kill()
        listener.process.wait()


def test_it_tells_of_every_signal_and_lives() -> None:
    with listening("task") as rank:
        assert (rank.next().what, rank.process.poll()) == ("here", None)
        for number in (signal.SIGUSR2, signal.SIGTERM):
            rank.process.send_signal(number)
            told = rank.next()
            assert (told.what, told.way, told.host, told.signal) == (
                "saw",
                "task",
                "n1",
                number.name,
            )
        assert rank.process.poll() is None


def test_without_handlers_it_dies_of_it() -> None:
    with listening("plain", "--plain") as rank:
        assert rank.next().what == "here"
        rank.process.send_signal(signal.SIGUSR2)
        assert rank.process.wait(LONG_S) == -signal.SIGUSR2


def test_a_shielded_worker_outlives_a_signal_to_all_and_the_other_does_not() -> None:
    with listening("task", "--workers", "shielded", "bare") as rank:
        here = {rank.next().way for _ in range(3)}
        assert here == {"task", "shielded", "bare"}
        workers = rank.children()
        assert len(workers) == 2
        for pid in (rank.process.pid, *workers):
            os.kill(pid, signal.SIGTERM)
        told = {(each.what, each.way, each.signal) for each in (rank.next(), rank.next())}
        assert told == {("saw", "task", "SIGTERM"), ("died", "bare", "SIGTERM")}
        assert len(rank.children()) == 1


def test_it_goes_with_its_input_and_takes_its_workers_along() -> None:
    with listening("task", "--workers", "shielded", "bare") as rank:
        for _ in range(3):
            rank.next()
        workers = rank.children()
        assert rank.process.stdin is not None
        rank.process.stdin.close()
        assert rank.process.wait(LONG_S) == 0
        deadline = time.monotonic() + LONG_S
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline, "a worker was left behind"
            time.sleep(0.05)
