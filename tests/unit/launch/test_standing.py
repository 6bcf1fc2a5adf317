"""What can be forked, from what a launch may start, and how a launch on agents comes to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control import Hub
from slurm_forge.control import listener as listener_module
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.agent_hub import AgentsHub
from slurm_forge.control.handshake import Role, dial, welcome
from slurm_forge.control.hub_events import MessageReceived
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import (
    AgentHello,
    AgentNotice,
    KillWorker,
    StartWorker,
    WorkerEnded,
    WorkerStarted,
    decode_agents,
)
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import Notice
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.errors import ControlChannelError
from slurm_forge.knobs import Knobs
from slurm_forge.launch.supervisor.agent_launch import AgentsLaunch
from slurm_forge.launch.supervisor.job_step import (
    JobStep,
    StepOptions,
    with_agent,
)
from slurm_forge.launch.supervisor.srun import StepProcess
from slurm_forge.recovery.incident.launch_facts import LaunchFacts
from slurm_forge.recovery.policy.start_mode import start_after
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.recovery import Recovery
from slurm_forge.training.agent.gpu_memory import parse_pids
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision, Start
from slurm_forge.vocabulary.plan import RecoveryPlan

NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
WITHIN_S = 20.0


# -- decisions -------------------------------------------------------------------------------------


def test_our_worker_and_submitits_are_forked_and_nothing_else_is() -> None:
    ours = ["/v/bin/python3.11", "-u", "-m", "slurm_forge.process", "worker", "/runs/x"]
    assert with_agent(ours, "/runs/x") == (*ours[:4], "agent", "/runs/x")
    assert with_agent(ours, "/runs/other") is None
    # As scripts of earlier versions have it, which may start an image of the same version.
    ours = ["python3", "-u", "-m", "slurm_forge.training.worker", "/runs/x"]
    assert with_agent(ours, "/runs/x") == (*ours[:3], "slurm_forge.training.agent", "/runs/x")
    submitit = ["--output", "/l/%j_%t.out", "python", "-u", "-m", "submitit.core._submit", "/l"]
    assert with_agent(submitit, "/runs/x") == (
        *submitit[:4], "-m", "slurm_forge.process", "agent", "/runs/x", "--", *submitit[4:]
    )  # fmt: skip
    for payload in (
        ["./train.sh"],
        ["bash", "-m", "submitit.core._submit", "/l"],
        ["python", "train.py", "--lr", "1"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["apptainer", "exec", "image.sif", "bash", "-m"],
        [],
    ):
        assert with_agent(payload, "/runs/x") is None, payload


def decision(rung: int | None, cause: Cause = Cause.CRASH) -> Decision:
    return Decision(
        incident_id="1.1",
        cause=cause,
        action=Action.RELAUNCH,
        reason="",
        plan=RecoveryPlan(),
        rung=rung,
    )


def policy(start: str) -> Recovery:
    ladder = [{"do": "relaunch", "times": 1, "start": start}]
    return job_from_mapping({"name": "x", "entry": "a:f", "recovery": {"crash": ladder}}).recovery


@pytest.mark.parametrize("start", list(Start))
def test_the_rung_says_from_what_and_a_doubtful_node_is_always_cold(start: Start) -> None:
    given_policy = policy(start.value)
    facts = LaunchFacts(now=NOW)
    assert start_after(given_policy, decision(0), facts) is start
    assert start_after(given_policy, decision(None), facts) is Start.WARM
    for doubtful in (
        LaunchFacts(now=NOW, killed_for_memory="oom_kill from 0 to 1"),
        LaunchFacts(now=NOW, launcher_text="srun: error: Node failure on n2\n"),
        LaunchFacts(now=NOW, absent=(1,)),
    ):
        assert start_after(given_policy, decision(0), doubtful) is Start.COLD


@given(st.lists(st.integers(1, 2**22)), st.text(max_size=20))
def test_what_nvidia_smi_prints(pids: list[int], noise: str) -> None:
    text = "\n".join(map(str, pids))
    assert parse_pids(text) == frozenset(pids)
    assert parse_pids(noise + "\nNo running processes found\n" + text) >= frozenset(pids)


# -- the agents' channel and a launch on it --------------------------------------------------------


@dataclass
class Step:
    """An srun that runs until it is killed."""

    status: int | None = None
    text: str = ""
    killed: int = 0

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.killed += 1
        self.status = 137

    def launcher_signal(self) -> str:
        return ""

    def tail(self) -> str:
        return self.text

    def forget_tail(self) -> None:
        self.text = ""


@dataclass
class Scripted:
    """An agent that says what it is told to."""

    hub: AgentsHub
    rank: int
    secret: str = ""
    heard: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        hosts, port = parse_addresses(self.hub.addresses)
        hello = AgentHello(
            rank=self.rank, world=self.hub.world_size, host=f"n{self.rank}", pid=self.rank + 100
        )
        credentials = self.hub.credentials
        self.channel = dial(
            hosts,
            port,
            replace(credentials, secret=self.secret or credentials.secret),
            Role.AGENT,
            protocol.encode(hello),
            who="an agent",
            within_s=WITHIN_S,
        )
        self.socket = self.channel.socket
        self.socket.settimeout(0.01)

    def say(self, message: Message) -> None:
        self.channel.send(protocol.encode(message))

    def ended(self, launch: int = 1, signal: str = "", code: int = 0, **more: object) -> None:
        body: dict[str, object] = {
            "ours": False, "memory": "", "others": 0, "left": "", "parked": False, **more
        }  # fmt: skip
        self.say(WorkerEnded(launch=launch, pid=1, signal=signal, code=code, **body))  # type: ignore[arg-type]

    def hears(self, kind: type[Message]) -> bool:
        with contextlib.suppress(TimeoutError):
            self.heard += [decode_agents(self.channel.verify(x)) for x in self.channel.receive()]
        return any(isinstance(message, kind) for message in self.heard)


@dataclass
class World:
    agents: AgentsHub
    channel: Hub
    step: Step
    ranks: list[Scripted]
    launch: AgentsLaunch
    notices: list[tuple[int, str]]
    now: list[float]


@pytest.fixture
def world() -> Iterator[World]:
    notices: list[tuple[int, str]] = []
    now = [1000.0]
    agents = AgentsHub(
        world_size=2,
        on_notice=lambda *said: notices.append(said),
        clock=lambda: now[0],
    )
    channel = Hub(world_size=2)
    agents.begin(
        StartWorker(attempt=1, launch=1, channel="h:1", nonce="x", started=0.0, in_process=False)
    )
    ranks = [Scripted(agents, rank) for rank in range(2)]
    step = Step()
    launch = AgentsLaunch(step, agents, channel, 1, clock=lambda: now[0])  # type: ignore[arg-type]
    made = World(agents, channel, step, ranks, launch, notices, now)
    for rank in ranks:
        until(lambda rank=rank: rank.hears(StartWorker), "the order")
        rank.say(WorkerStarted(launch=1, pid=7, how="fork"))
    until(lambda: all(v.begun == 1 for v in agents.agents().values()), "both to begin")
    try:
        yield made
    finally:
        agents.close()
        channel.close()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.002)


def heard_ends(world: World, count: int) -> None:
    until(lambda: len(world.agents.ends(1)) == count, f"{count} ends")


def test_a_launch_is_over_when_every_agent_has_said_so(world: World) -> None:
    world.ranks[0].ended()
    heard_ends(world, 1)
    assert world.launch.poll() is None
    world.ranks[1].ended()
    heard_ends(world, 2)
    assert world.launch.poll() == 0
    assert world.launch.has_ended


def test_the_first_bad_end_is_the_status_and_ends_the_others(world: World) -> None:
    world.ranks[1].ended(signal="SIGSEGV")
    heard_ends(world, 1)
    assert world.launch.poll() is None
    assert not world.ranks[0].hears(KillWorker)
    world.now[0] += 2.1
    assert world.launch.poll() is None
    until(lambda: world.ranks[0].hears(KillWorker), "the order to end")
    world.ranks[0].ended(signal="SIGKILL", ours=True)
    heard_ends(world, 2)
    assert world.launch.poll() == 139
    assert [(end.rank, end.signal, end.ours) for end in world.launch.ends()] == [
        (1, "SIGSEGV", False),
        (0, "SIGKILL", True),
    ]


def test_an_agent_that_does_not_confirm_loses_its_step(world: World) -> None:
    world.ranks[0].ended()
    world.launch.kill()
    world.now[0] += 3.9
    assert world.launch.poll() is None
    assert not world.step.killed
    world.now[0] += 0.2
    world.launch.poll()
    assert world.step.killed
    assert world.launch.poll() == 137
    assert not world.launch.has_ended


def test_what_could_not_be_ended_ends_the_step(world: World) -> None:
    world.ranks[0].ended()
    world.ranks[1].ended(signal="SIGKILL", ours=True, left="python (77, state D)")
    heard_ends(world, 2)
    assert world.launch.poll() is None
    assert world.step.killed
    assert not world.launch.has_ended


def test_killed_ranks_whose_agents_go_too_are_sruns_to_explain(world: World) -> None:
    """Somebody cancelled the step: workers may be seen to go a moment before their agents."""
    for rank in world.ranks:
        rank.ended(signal="SIGKILL")
    heard_ends(world, 2)
    assert world.launch.poll() is None, "the agents' own end may be on its way"
    for rank in world.ranks:
        rank.socket.close()
    until(lambda: not any(v.connected for v in world.agents.agents().values()), "agents to go")
    world.now[0] += 0.4
    assert world.launch.poll() is None
    world.step.status, world.step.text = 143, "srun: Job step aborted: …"
    assert world.launch.poll() == 143
    assert not world.launch.has_ended


def test_signals_of_agents_are_told_and_strangers_are_not_heard(world: World) -> None:
    world.ranks[1].say(AgentNotice(what="SIGTERM"))
    until(lambda: world.notices == [(1, "SIGTERM")], "the notice")
    with pytest.raises(ControlChannelError, match="does not know the secret"):
        Scripted(world.agents, 0, secret="guessed")
    with pytest.raises(ControlChannelError, match="has connected before"):
        Scripted(world.agents, 0)
    assert world.notices == [(1, "SIGTERM")]
    assert world.agents.agents()[0].connected


def test_who_has_not_begun_when_the_launch_is_over_need_not(world: World) -> None:
    agents = world.agents
    agents.begin(
        StartWorker(attempt=1, launch=2, channel="h:1", nonce="x", started=0.0, in_process=False)
    )
    channel = Hub(world_size=2)
    second = AgentsLaunch(world.step, agents, channel, 2, clock=lambda: world.now[0])  # type: ignore[arg-type]
    assert second.poll() is None
    assert not world.ranks[0].hears(KillWorker)
    channel.abort("preempted before anything was imported")
    second.poll()
    until(lambda: all(rank.hears(KillWorker) for rank in world.ranks), "the order to end")
    channel.close()


def test_who_can_not_begin_any_more_is_not_waited_for(world: World) -> None:
    """The others would meet it in vain for a quarter of an hour."""
    agents = world.agents
    channel = Hub(world_size=2)
    agents.begin(
        StartWorker(attempt=1, launch=2, channel="h:1", nonce="x", started=0.0, in_process=True)
    )
    second = AgentsLaunch(world.step, agents, channel, 2, clock=lambda: world.now[0])  # type: ignore[arg-type]
    world.ranks[1].say(WorkerStarted(launch=2, pid=7, how="fork"))
    until(lambda: agents.agents()[1].begun == 2, "one to begin")
    world.ranks[0].socket.close()
    until(lambda: not agents.agents()[0].connected, "the other to go")
    assert second.poll() is None
    world.now[0] += 9.0
    assert second.poll() is None
    assert not world.step.killed, "srun may have something to say first"
    world.now[0] += 2.0
    second.poll()
    assert world.step.killed
    channel.close()


def test_a_signal_between_two_launches_is_for_the_next_on_these_agents(world: World) -> None:
    standing = JobStep("/runs/x")
    standing._agents, standing._step, standing._hub = world.agents, world.step, world.channel  # type: ignore[assignment]
    world.channel.abort("the launch is over")
    standing._on_notice(1, "SIGTERM")
    hub = Hub(world_size=2)
    options = StepOptions(payload=("python",), options=(), tasks=None)
    standing.begin(options, Start.WARM, hub=hub, knobs=Knobs(launch=2), variables={}, again=False)
    assert hub.events.get_nowait() == MessageReceived((1,), Notice(what="SIGTERM"))
    hub.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_agents_that_nobody_listens_to_any_more_are_known_to_be_gone() -> None:
    def fails(rank: int, what: str) -> None:
        raise RuntimeError(f"{what} of rank {rank}")

    agents = AgentsHub(world_size=1, on_notice=fails)
    rank = Scripted(agents, 0)
    rank.say(AgentNotice(what="SIGTERM"))
    until(lambda: not agents.agents()[0].connected, "the end of the connection")
    rank.socket.settimeout(WITHIN_S)
    assert rank.socket.recv(100) == b""
    agents.close()


def test_an_agent_whose_welcome_can_not_be_sent_has_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It tries again, and would be refused as one that has connected before."""
    left = [OSError("gone")]

    def fails(connection: AuthenticatedConnection) -> None:
        assert agents.agents() == {}
        if left:
            raise left.pop()
        welcome(connection)

    monkeypatch.setattr(listener_module, "welcome", fails)
    agents = AgentsHub(world_size=1, on_notice=lambda rank, what: None)
    rank = Scripted(agents, 0)
    assert left == []
    assert agents.agents()[0].connected
    rank.channel.close()
    agents.close()


def test_who_killed_srun_is_known() -> None:
    killed, ours = (StepProcess(["sleep", "600"], os.environ) for _ in range(2))
    assert (killed.launcher_signal(), ours.launcher_signal()) == ("", "")
    os.kill(killed._process.pid, signal.SIGKILL)  # as anybody might
    ours.kill()
    for step in (killed, ours):
        assert step.wait(30) == -signal.SIGKILL
    assert (killed.launcher_signal(), ours.launcher_signal()) == ("SIGKILL", "")
    plain = StepProcess(["false"], os.environ)
    assert plain.wait(30) == 1
    assert plain.launcher_signal() == ""
