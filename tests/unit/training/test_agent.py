"""A real agent and a made-up supervisor: whom it obeys, and how long a worker outlives that one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import (
    AgentWelcome,
    StartWorker,
    WorkerEnded,
    WorkerStarted,
    decode_agents,
)
from slurm_forge.control.messages.message import Message
from slurm_forge.knobs import Knobs
from slurm_forge.launch.supervisor import deputy as second_deputy
from slurm_forge.training.agent import main as agent_module

Heard = TypeVar("Heard", bound=Message)
NONCE = "n" * 32
WITHIN_S = 20.0
#: Imports nothing large; its workers wait for ever.
_AGENT = """
    import itertools, sys, time
    from slurm_forge.slurm import kernel
    kills = itertools.count()
    kernel.read_oom_kills = lambda: kernel.OomKills(group=next(kills), source="memory.events")
    from slurm_forge.training.agent import main as agent
    agent.preload = lambda variables, more: ""
    agent._ALONE_S = 0.3
    agent.Program.go = lambda self, parking: {go}
    sys.exit(agent.main(["run"]))
"""
ORDER = StartWorker(attempt=1, launch=1, channel="h:1", nonce="x", started=0.0, in_process=False)


class Supervisor:
    """The other end of the agents' channel."""

    def __init__(self, go: str = "time.sleep(300)", **variables: str) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(WITHIN_S)
        knobs = Knobs(agents=f"127.0.0.1:{self.server.getsockname()[1]}", agents_nonce=NONCE)
        step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
        self.agent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_AGENT).format(go=go)],
            env={**os.environ, **step, "SLURM_NTASKS": "2", **variables, **knobs.to_environ()},
        )
        self.channel, _ = self.server.accept()
        self.channel.settimeout(WITHIN_S)
        self.buffer = b""

    def say(self, *messages: Message) -> None:
        self.channel.sendall(b"".join(map(protocol.encode, messages)))

    def hears(self, kind: type[Heard]) -> Heard:
        """The next message of that kind."""
        while True:
            while b"\n" not in self.buffer:
                data = self.channel.recv(1 << 16)
                assert data, "the agent has gone"
                self.buffer += data
            line, _, self.buffer = self.buffer.partition(b"\n")
            message = decode_agents(line)
            if isinstance(message, kind):
                return message

    def begun(self) -> int:
        """The process id of the worker, once it is begun."""
        return self.hears(WorkerStarted).pid

    def close(self) -> None:
        self.channel.close()
        self.server.close()
        self.agent.kill()
        self.agent.wait()


@pytest.fixture
def supervisor() -> Iterator[Callable[..., Supervisor]]:
    with contextlib.ExitStack() as stack:

        def start(**variables: str) -> Supervisor:
            made = Supervisor(**variables)
            stack.callback(made.close)
            return made

        yield start


def test_it_forks_for_who_knows_the_nonce(supervisor: Callable[..., Supervisor]) -> None:
    ours = supervisor()
    ours.say(AgentWelcome(nonce=NONCE), ORDER)
    assert Path(f"/proc/{ours.begun()}").exists()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param((AgentWelcome(nonce="guessed"), ORDER), id="a wrong nonce"),
        pytest.param((ORDER,), id="no nonce"),
    ],
)
def test_it_begins_nothing_for_anybody_else(
    supervisor: Callable[..., Supervisor], said: tuple[Message, ...]
) -> None:
    stranger = supervisor()
    stranger.say(*said)
    with pytest.raises(AssertionError, match="gone"):
        stranger.begun()
    assert stranger.agent.wait(WITHIN_S) == 0


def test_memory_is_told_of_a_worker_that_waits_for_the_next_launch_too(
    supervisor: Callable[..., Supervisor],
) -> None:
    """Its data-loader worker was killed for memory, and it has unwound."""
    ours = supervisor(go="parking.wait()")
    ours.say(AgentWelcome(nonce=NONCE), ORDER)
    said = ours.hears(WorkerEnded)
    assert said.parked
    assert said.memory == "oom_kill from 0 to 1 in memory.events"


def test_a_line_without_an_end_is_not_kept(supervisor: Callable[..., Supervisor]) -> None:
    endless = supervisor()
    endless.say(AgentWelcome(nonce=NONCE))
    with contextlib.suppress(ConnectionError):
        for _ in range(8):
            endless.channel.sendall(b"x" * protocol.LINE_LIMIT)
    assert endless.agent.wait(WITHIN_S) == 0


def test_the_deputy_of_a_lost_node_is_left_alone_for_longer(
    supervisor: Callable[..., Supervisor],
) -> None:
    """Slurm takes minutes to give a node up, and only then can the deputy do anything."""
    assert timedelta(seconds=agent_module._ALONE_SECOND_S) > second_deputy.PATIENCE
    ranks = {
        "any": supervisor(SLURM_NODEID="1", SLURM_LOCALID="1"),
        "second": supervisor(SLURM_NODEID="1", SLURM_LOCALID="0"),
    }
    workers = {}
    for name, each in ranks.items():
        each.say(AgentWelcome(nonce=NONCE), ORDER)
        workers[name] = Path(f"/proc/{each.begun()}")
    for each in ranks.values():
        each.channel.close()
    until = time.monotonic() + WITHIN_S
    while workers["any"].exists():
        assert time.monotonic() < until, "nobody ended the worker"
        time.sleep(0.01)
    assert workers["second"].exists()
    assert ranks["any"].agent.wait(WITHIN_S) == 0
    time.sleep(1.2)  # the agent looks once a second
    assert workers["second"].exists()
