"""Real processes watched from outside: their stacks, whatever they are doing."""

from __future__ import annotations

import os
import signal
import string
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control import Hub
from slurm_forge.control.handshake import Credentials
from slurm_forge.control.hub_events import MessageReceived
from slurm_forge.control.messages.links import LinkReport, QueryLinks
from slurm_forge.control.stack_text import threads
from slurm_forge.knobs import Knobs
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.last_words import read_last_words
from slurm_forge.training.monitor.procfs import (
    ProcessFacts,
    exit_status,
    parse_stat,
    read_process,
)
from slurm_forge.training.monitor.stacks import StackDumper

PROGRAM = """
    import os, sys, threading, ctypes, time
    from slurm_forge.training.monitor.stacks import dump_on_signal
    beside = threading.Event()
    threading.Thread(target=beside.wait, daemon=True, name="forge-channel").start()
    dump = dump_on_signal()
    print(dump, threading.enumerate()[1].native_id, flush=True)

    def stuck():
        {body}

    stuck()
"""


class Worker:
    """A process of its own; the descriptor of its dumps is opened through ``/proc``."""

    def __init__(self, body: str) -> None:
        text = textwrap.dedent(PROGRAM).format(body=body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        self.dump = os.open(f"/proc/{self.process.pid}/fd/{int(words[0])}", os.O_RDWR)
        self.thread = int(words[1])

    def taker(self) -> StackDumper:
        return StackDumper(self.process.pid, self.dump, thread=lambda: self.thread, py_spy="-")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.dump)


@pytest.fixture
def worker() -> Iterator[Callable[[str], Worker]]:
    made: list[Worker] = []

    def make(body: str) -> Worker:
        made.append(Worker(body))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize(
    "body",
    ["time.sleep(600)", "beside.wait()", "ctypes.PyDLL(None).sleep(600)", "os.read(0, 1)"],
    ids=["sleep", "lock", "gil", "read"],
)
def test_the_stack_of_a_process_that_is_stuck(worker: Callable[[str], Worker], body: str) -> None:
    stuck = worker(body)
    taker = stuck.taker()

    def found() -> bool:
        return any(
            frame.function == "stuck" for frame in (threads(taker.take().stacks) or ((),))[-1]
        )

    stuck.until(found, "its main thread never showed")
    assert stuck.process.poll() is None, "looking at it ended it"
    assert read_process(stuck.process.pid).state == "S", "it did not go on waiting"


def test_of_a_stopped_process_there_are_the_kernels_words(worker: Callable[[str], Worker]) -> None:
    stuck = worker("time.sleep(600)")
    os.kill(stuck.process.pid, signal.SIGSTOP)
    stuck.until(lambda: read_process(stuck.process.pid).state == "T", "not stopped")
    begun = time.monotonic()
    taken = stuck.taker().take()
    assert (taken.how, taken.facts.state) == ("nothing", "T")
    assert f"thread {stuck.process.pid} T" in taken.whole
    assert time.monotonic() - begun < 60


def test_a_process_without_our_handler_is_not_signalled() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        taken = StackDumper(process.pid, os.memfd_create("x"), py_spy="-").take()
        assert taken.how == "nothing"
        assert process.poll() is None, "the signal ended it"
    finally:
        process.kill()
        process.wait()


def test_of_nobody_nothing_is_said() -> None:
    assert read_process(2**22 + 1) == ProcessFacts("", 0.0)
    assert StackDumper(2**22 + 1, None, py_spy="-").take().how == "nothing"


@given(st.text(string.printable, max_size=30), st.integers(0, 10**9), st.integers(0, 10**9))
def test_names_may_hold_anything(name: str, user: int, system: int) -> None:
    line = f"12 ({name}) S 1 12 12 0 -1 4194560 1 0 0 0 {user} {system} 0 0 20 0 1 0"
    assert parse_stat(line, 100) == ProcessFacts("S", (user + system) / 100)


WITNESSED = """
    import os, sys, time
    from datetime import timedelta
    from slurm_forge.control.handshake import Credentials
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.training.monitor.client import prepare_monitor
    from slurm_forge.vocabulary.position import Position
    monitor_client = prepare_monitor()
    monitor_client.start(RunDirectory.at(sys.argv[1]), rank=0, world_size=1, host="here",
                    channel=sys.argv[2], credentials=Credentials("n", "s"), attempt=1, launch=1,
                    alone_after=timedelta(minutes=5) if sys.argv[3:] else None)
    monitor_client.progress.enter("train")
    monitor_client.progress.advance(Position(41))
    print(monitor_client._process.pid, flush=True)
    time.sleep(600)
"""


def test_a_witness_speaks_of_its_worker_and_dies_with_it(tmp_path: Path) -> None:
    hub = Hub(world_size=1, credentials=Credentials("n", "s"))
    hub.start()
    words = [sys.executable, "-c", textwrap.dedent(WITNESSED), str(tmp_path), hub.addresses]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        witness = int(process.stdout.readline())
        deadline = time.monotonic() + 30

        def step() -> int | None:
            pulses = [each.pulse for each in hub.monitors().values()]
            return next((pulse.step for pulse in pulses if pulse is not None), None)

        while step() != 41:
            assert time.monotonic() < deadline, "no word of it"
            time.sleep(0.02)
        assert hub.members() == {}, "a witness is no member"
        os.kill(process.pid, signal.SIGSTOP)  # nor is the worker asked for anything
        hub.ask_monitors(QueryLinks(id=5))
        while True:
            said = hub.events.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(said, MessageReceived) and getattr(said.message, "id", None) == 5:
                break
        assert isinstance(said.message, LinkReport)
        assert said.message.how in ("witness", "refused")
        assert len(said.message.peers) == 1, "its own connection to the hub"
        assert [rank for rank, _ in hub.connections()] == [0]
        os.kill(witness, signal.SIGTERM)  # as to a whole group: it is not the witness that is meant
        process.kill()
        process.wait()
        while read_process(witness).state not in ("", "Z"):
            assert time.monotonic() < deadline, "it outlived its worker"
            time.sleep(0.02)
        while hub.monitors()[0].connected:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        hub.close()


@pytest.mark.parametrize(
    ("ends", "lifeline", "told"),
    [
        (signal.SIGKILL, "1", "killed by SIGKILL"),
        (signal.SIGSEGV, "1", "killed by SIGSEGV"),
        # Slurm knows better, and kills whole jobs.
        (signal.SIGKILL, "0", None),
    ],
)
def test_of_the_rank_that_conducts_a_run_here_the_witness_tells_the_end(
    tmp_path: Path, ends: signal.Signals, lifeline: str, told: str | None
) -> None:
    run = RunDirectory.at(tmp_path / "tiny")
    run.create(b"name: tiny\n")
    hub = Hub(world_size=1, credentials=Credentials("n", "s"))
    hub.start()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WITNESSED), str(run.path), hub.addresses, "alone"],
        stdout=subprocess.PIPE,
        env={**os.environ, **Knobs(lifeline=lifeline == "1").to_environ()},
    )
    try:
        assert process.stdout is not None
        witness = int(process.stdout.readline())
        deadline = time.monotonic() + 60
        while not hub.monitors():
            assert time.monotonic() < deadline, "no word of it"
            time.sleep(0.02)
        process.send_signal(ends)
        # It is collected once the witness has gone, as a busy parent does.
        while read_process(witness).state not in ("", "Z"):
            assert time.monotonic() < deadline, "it outlived its worker"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        hub.close()
    words = read_last_words(run, 1, 1)
    assert [(each.text, each.step, each.cause) for each in words] == (
        [] if told is None else [(told, 41, "crash")]
    )


def test_how_a_process_ended_is_known_until_it_is_collected() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    deadline = time.monotonic() + 60
    while read_process(process.pid).state != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert exit_status(process.pid) == 3
    process.wait()
    assert exit_status(process.pid) is None
    assert exit_status(os.getpid()) is None
