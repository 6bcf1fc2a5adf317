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
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slurm_forge.control.handshake import Credentials
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import (
    AgentShutdown,
    StartWorker,
    WorkerEnded,
    WorkerStarted,
    decode_agents,
)
from slurm_forge.control.messages.message import Message
from slurm_forge.control.session import LINE_LIMIT
from slurm_forge.knobs import Knobs
from slurm_forge.launch.supervisor import deputy as second_deputy
from slurm_forge.training.agent import main as agent_module
from tests.channel_ends import CREDENTIALS, welcomed

Heard = TypeVar("Heard", bound=Message)
WITHIN_S = 20.0
#: Imports nothing large; its workers wait for ever.
_AGENT = """
    import itertools, os, sys, time
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

    def __init__(
        self,
        go: str = "time.sleep(300)",
        credentials: Credentials = CREDENTIALS,
        errors: int | None = None,
        **variables: str,
    ) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(WITHIN_S)
        knobs = Knobs(
            agents=f"127.0.0.1:{self.server.getsockname()[1]}",
            agents_nonce=CREDENTIALS.nonce,
            secret=CREDENTIALS.secret,
        )
        step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
        self.agent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_AGENT).format(go=go)],
            env={**os.environ, **step, "SLURM_NTASKS": "2", **variables, **knobs.to_environ()},
            stderr=errors,
        )
        self.channel = welcomed(self.server, credentials)
        self.lines: list[bytes] = []

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.channel.send(protocol.encode(message))

    def hears(self, kind: type[Heard]) -> Heard:
        """The next message of that kind."""
        while True:
            while not self.lines:
                self.lines = self.channel.receive()
            message = decode_agents(self.channel.verify(self.lines.pop(0)))
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

        def start(**variables: Any) -> Supervisor:
            made = Supervisor(**variables)
            stack.callback(made.close)
            return made

        yield start


def test_it_forks_for_who_knows_the_secret(supervisor: Callable[..., Supervisor]) -> None:
    ours = supervisor()
    ours.say(ORDER)
    assert Path(f"/proc/{ours.begun()}").exists()


def test_it_begins_nothing_for_anybody_else() -> None:
    with pytest.raises(EOFError):  # it hangs up
        Supervisor(credentials=replace(CREDENTIALS, secret="guessed"))


@pytest.mark.parametrize(
    ("order", "name"),
    [
        (replace(ORDER, variables=("NCCL_DEBUG=INFO", "PYTHONPATH=/evil")), "PYTHONPATH"),
        (replace(ORDER, variables=("NCCL_NET_PLUGIN=/evil.so",)), "NCCL_NET_PLUGIN"),
        (replace(ORDER, without=("LD_LIBRARY_PATH",)), "LD_LIBRARY_PATH"),
        (replace(ORDER, variables=("nonsense",)), "nonsense"),
    ],
    ids=["PYTHONPATH", "a plugin", "one less", "nonsense"],
)
def test_an_order_that_would_have_something_executed_is_refused(
    supervisor: Callable[..., Supervisor], order: StartWorker, name: str
) -> None:
    ours = supervisor(errors=subprocess.PIPE)
    ours.say(order)
    ended = ours.hears(WorkerEnded)
    assert (ended.code, ended.signal) == (1, "")
    ours.say(AgentShutdown())
    _, said = ours.agent.communicate(timeout=WITHIN_S)
    assert f"sets {name}, which no supervisor sends" in said.decode()


def test_what_may_be_sent_reaches_the_worker(supervisor: Callable[..., Supervisor]) -> None:
    ours = supervisor(go="sys.exit(os.environ['NCCL_DEBUG'] != 'INFO')", NCCL_DEBUG="WARN")
    ours.say(replace(ORDER, variables=("NCCL_DEBUG=INFO",)))
    assert ours.hears(WorkerEnded).code == 0


def test_memory_is_told_of_a_worker_that_waits_for_the_next_launch_too(
    supervisor: Callable[..., Supervisor],
) -> None:
    """Its data-loader worker was killed for memory, and it has unwound."""
    ours = supervisor(go="parking.wait()")
    ours.say(ORDER)
    said = ours.hears(WorkerEnded)
    assert said.parked
    assert said.memory == "oom_kill from 0 to 1 in memory.events"


def test_a_line_without_an_end_is_not_kept(supervisor: Callable[..., Supervisor]) -> None:
    endless = supervisor()
    with contextlib.suppress(ConnectionError):
        for _ in range(8):
            endless.channel.socket.sendall(b"x" * LINE_LIMIT)
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
        each.say(ORDER)
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
