"""Real signals in a child process: handlers and the wakeup descriptor belong to a process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WITHIN_S = 10.0

PRELUDE = """
    import ctypes, os, signal, sys, threading, time
    from slurm_forge.signals import SignalWatcher

    def say(text):
        os.write(1, (text + "\\n").encode())

    watcher = SignalWatcher(lambda seen: say(f"{seen.name} {time.monotonic()}"))
"""


class Child:
    """A program with a watcher; ``line`` is the next thing it says."""

    def __init__(self, body: str) -> None:
        code = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            bufsize=0,
            start_new_session=True,
        )
        self._rest = b""

    def line(self) -> str:
        deadline = time.monotonic() + WITHIN_S
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, left))
            data = os.read(self.process.stdout.fileno(), 4096) if readable else b""
            assert data, f"said {self._rest!r} and no more: {self.errors()}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """With whatever it has started, which holds our ends of the pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def errors(self) -> str:
        self.kill()
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def send(self, number: int) -> float:
        now = time.monotonic()
        self.process.send_signal(number)
        return now


@pytest.fixture
def start() -> Iterator[type[Child]]:
    children: list[Child] = []

    class Tracked(Child):
        def __init__(self, body: str) -> None:
            super().__init__(body)
            children.append(self)

    yield Tracked
    for child in children:
        child.kill()
        child.process.communicate()


WAITING = {
    "a blocking lock": "lock = threading.Lock(); lock.acquire(); say('ready'); lock.acquire()",
    # A mutex that is locked already: unlike sleep(), no signal makes it return.
    "a call into C": """
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        say('ready')
        libc.pthread_mutex_lock(mutex)
    """,
    "a loop in Python": "say('ready')\nwhile True: pass",
    "waiting for a child": "import subprocess; say('ready'); subprocess.run(['sleep', '60'])",
}


@pytest.mark.parametrize("where", WAITING)
def test_a_signal_is_seen_at_once_whatever_the_main_thread_does(
    start: type[Child], where: str
) -> None:
    child = start(textwrap.dedent(WAITING[where]))
    assert child.line() == "ready"
    delays = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) * 2:
        sent = child.send(number)
        name, _, at = child.line().partition(" ")
        assert name == number.name
        delays.append(float(at) - sent)
    # This machine is shared: the middle of the delays is ours, the longest may be a neighbour's.
    assert sorted(delays)[len(delays) // 2] < 0.1, delays
    assert child.process.poll() is None


def test_signals_of_others_do_not_make_the_watcher_deaf(start: type[Child]) -> None:
    """A real-time signal has no name in Python's list; it comes by the same descriptor."""
    child = start(
        """
        for number in (signal.SIGRTMIN + 5, signal.SIGHUP):
            signal.signal(number, lambda number, frame: say(f"own {number}"))
        say("ready")
        while True: time.sleep(0.05)  # a signal right before it waits for its end
        """
    )
    assert child.line() == "ready"
    for number in (signal.SIGRTMIN + 5, signal.SIGHUP):
        child.send(number)
        assert child.line() == f"own {number}"
    child.send(signal.SIGTERM)
    assert child.line().startswith("SIGTERM ")


def test_a_callback_that_fails_is_told_and_the_next_signal_is_still_seen(
    start: type[Child],
) -> None:
    child = start(
        """
        def fail_once(seen, calls=[]):
            calls.append(seen)
            if len(calls) == 1:
                say("failing")
                raise RuntimeError("broken callback")
            say(f"second {seen.name}")
        watcher._on_signal = fail_once
        say("ready")
        while True: time.sleep(60)
        """
    )
    assert child.line() == "ready"
    child.send(signal.SIGTERM)
    assert child.line() == "failing"
    child.send(signal.SIGUSR1)
    assert child.line() == "second SIGUSR1"
    assert "broken callback" in child.errors()


def test_a_forked_child_has_default_effects_and_its_signals_are_its_own(
    start: type[Child],
) -> None:
    child = start(
        """
        ready, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            defaults = [signal.getsignal(n) is signal.SIG_DFL for n in
                        (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
            wakeup = signal.set_wakeup_fd(-1)
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            say(f"{defaults} {wakeup} {sorted(blocked)}")
            os.write(done, b"x")
            while True: time.sleep(60)
        os.read(ready, 1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        say(f"ended by {os.WTERMSIG(status)}")
        os.kill(os.getpid(), signal.SIGUSR1)
        while True: time.sleep(60)
        """
    )
    assert child.line() == "[True, True, True] -1 []"
    # Had the child's signal come by the parent's descriptor, it would be said before this line.
    assert child.line() == f"ended by {signal.SIGTERM.value}"
    assert child.line().startswith("SIGUSR1 ")


def test_a_child_keeps_handlers_that_somebody_else_has_set(start: type[Child]) -> None:
    child = start(
        """
        signal.signal(signal.SIGUSR2, lambda number, frame: say("theirs"))
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            os._exit(0)
        os.waitpid(pid, 0)
        say("over")
        """
    )
    assert child.line() == "theirs"
    assert child.line() == "over"


def test_programs_that_are_started_die_of_a_term_as_any_program_does(start: type[Child]) -> None:
    child = start(
        """
        import subprocess
        started = subprocess.Popen(["sleep", "60"])
        started.terminate()
        say(f"ended with {started.wait()}")
        """
    )
    assert child.line() == f"ended with -{signal.SIGTERM.value}"


def test_after_closing_a_signal_has_its_default_effect_again(start: type[Child]) -> None:
    child = start(
        """
        watcher.close()
        watcher.close()
        say(f"closed {watcher._thread.is_alive()}")
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    assert child.line() == "closed False"
    assert child.process.wait(WITHIN_S) == -signal.SIGTERM


def test_a_storm_of_signals_neither_blocks_nor_kills(start: type[Child]) -> None:
    child = start(
        """
        say("ready")
        for _ in range(20_000):
            os.kill(os.getpid(), signal.SIGUSR1)
        say("survived")
        os.kill(os.getpid(), signal.SIGTERM)
        while True: time.sleep(60)
        """
    )
    assert child.line() == "ready"
    said = ""
    while not said.startswith("SIGTERM"):
        said = child.line()
    assert child.process.poll() is None
