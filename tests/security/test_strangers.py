"""Another user's processes on the network: what they pass for, read, and keep from working.

Each attack is made by a process of another uid that knows what every user of the node can know:
addresses, ports, and everything that torch's store shows to whoever asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from slurm_forge.control import Hub, Member
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.agent_hub import AgentsHub
from slurm_forge.control.handshake import Role, dial
from slurm_forge.control.hub_events import RankJoined
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import AgentHello, StartWorker
from slurm_forge.control.messages.preflight import CheckVerdict
from slurm_forge.errors import ControlChannelError, UnsupportedError
from slurm_forge.knobs import Knobs
from slurm_forge.launch.supervisor.main import supervise
from slurm_forge.open_files import open_files_allowed, ranks_possible
from slurm_forge.run_directory.claims import list_claims
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.training.preflight.node_checks import _open_files
from tests.channel_ends import CREDENTIALS, hub_of
from tests.distributed.launches import launched, new_run
from tests.security.bounded import as_nobody, beside_nobody, bounded

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as two users")

WITHIN_S = 20.0
Attack = Callable[[socket.socket], None]


@contextlib.contextmanager
def fake_hub(attack: Attack) -> Iterator[int]:
    """Another user listens on the loopback and does the same to everybody; its port."""

    def serve(pipe: Connection) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname()[1])
            while True:
                connection, _ = server.accept()
                connection.settimeout(WITHIN_S)
                with connection, contextlib.suppress(OSError):
                    attack(connection)

    with beside_nobody(serve) as pipe:
        yield int(pipe.recv())


def join(hub: Hub, rank: int, *, within_s: float = WITHIN_S) -> Member:
    hosts, port = parse_addresses(hub.addresses)
    return Member(
        rank=rank,
        world_size=hub.world_size,
        credentials=hub.credentials,
        hosts=hosts,
        port=port,
        host="here",
        pid=os.getpid(),
        on_abort=lambda reason: None,
        connect_within_s=within_s,
    )


# -- a hub that is none --------------------------------------------------------------------------


def echo(connection: socket.socket) -> None:
    """Say back what sounds like proof, and have the victim run our code."""
    first = connection.recv(4096)
    words = first.split()
    with contextlib.suppress(ValueError):
        words.append(json.loads(first)["nonce"].encode())
    for word in words:
        welcome = {"m": "welcome_agent", "nonce": word.decode()}
        connection.sendall(json.dumps(welcome).encode() + b"\n")
    connection.sendall(ORDER)
    connection.recv(4096)


def reflect(connection: socket.socket) -> None:
    while data := connection.recv(4096):
        connection.sendall(data)


ORDER = protocol.encode(
    StartWorker(
        attempt=1, launch=1, channel="h:1", nonce="x", started=0.0, in_process=False,
        variables=("PYTHONPATH=/tmp/evil", "NCCL_NET_PLUGIN=/tmp/evil.so"),
    )
)  # fmt: skip

_AGENT = """
    import os, sys
    from pathlib import Path
    from slurm_forge.training.agent import main as agent
    agent.preload = lambda variables, more: ""
    agent._ALONE_S = 0.3
    agent.Program.go = lambda self, parking: Path({marker!r}).write_text("executed")
    sys.exit(agent.main(["run"]))
"""


def agent_at(port: int, marker: Path) -> subprocess.Popen[str]:
    """The agent of a rank, told that its supervisor listens there; its worker leaves a file."""
    knobs = Knobs(
        agents=f"127.0.0.1:{port}", agents_nonce=CREDENTIALS.nonce, secret=CREDENTIALS.secret
    )
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_AGENT).format(marker=str(marker))],
        env={**os.environ, **step, **knobs.to_environ()},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_agent_runs_nothing_for_a_hub_that_another_user_has_put_in_its_way(tmp_path: Path):
    marker = tmp_path / "executed"
    with fake_hub(echo) as port:
        agent = agent_at(port, marker)
        _, said = agent.communicate(timeout=60)
    assert agent.returncode == 1
    assert not marker.exists()
    assert f"127.0.0.1:{port}" in said
    assert CREDENTIALS.secret not in said


def test_an_agent_takes_no_order_that_somebody_on_its_way_has_put_in(tmp_path: Path):
    """The proofs pass through unchanged: it is the real hub that the agent talks to."""
    marker = tmp_path / "executed"
    agents = AgentsHub(world_size=1, credentials=CREDENTIALS, on_notice=lambda rank, what: None)
    hub = parse_addresses(agents.addresses)[1]

    def insert(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", hub), WITHIN_S) as onward:
            for source, sink in ((connection, onward), (onward, connection)) * 2:
                sink.sendall(source.recv(4096))
            connection.sendall(b"0" * 32 + ORDER)
            while data := connection.recv(4096):
                onward.sendall(data)

    with fake_hub(insert) as port:
        agent = agent_at(port, marker)
        agent.communicate(timeout=60)
    assert agents.agents()[0].pid == agent.pid, "it was not even welcomed"
    agents.close()
    assert not marker.exists()


def recorded(hub: AgentsHub) -> list[bytes]:
    """What a hub has said to an agent that it welcomed, and to which it gave an order."""
    said: list[bytes] = []
    real = hub.addresses.rpartition(":")[2]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def forward() -> None:
            connection, _ = server.accept()
            with connection, socket.create_connection(("127.0.0.1", int(real))) as onward:
                for _ in range(2):
                    onward.sendall(connection.recv(4096))
                    said.append(onward.recv(4096))
                    connection.sendall(said[-1])

        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        hello = protocol.encode(AgentHello(rank=0, world=1, host="h", pid=1))
        port = server.getsockname()[1]
        dial(
            ("127.0.0.1",), port, hub.credentials, Role.AGENT, hello, who="it", within_s=WITHIN_S
        ).close()
        thread.join(WITHIN_S)
    return said


def test_what_a_hub_has_said_once_passes_for_no_other_hub():
    """Replayed, and reflected: the other end's fresh number is not in it."""
    agents = AgentsHub(world_size=1, credentials=CREDENTIALS, on_notice=lambda rank, what: None)
    said = recorded(agents)
    agents.close()
    assert len(said) == 2

    def replay(connection: socket.socket) -> None:
        for data in said:
            connection.recv(4096)
            connection.sendall(data)

    for attack, why in ((replay, "does not know the secret"), (reflect, "another launch")):
        with fake_hub(attack) as port, pytest.raises(ControlChannelError, match=why):
            dial(("127.0.0.1",), port, CREDENTIALS, Role.AGENT, b"x", who="it", within_s=WITHIN_S)


# -- a rank that is none -------------------------------------------------------------------------


def impostors(nonce: str) -> dict[str, Attack]:
    """Ways to pass for rank 0, by who has read the launch's nonce in torch's store."""
    hello = b'{"m":"hello","rank":0,"world":2,"host":"h","pid":1}'
    challenge = f"forge 1 0.1.0 rank {nonce} {'0' * 32}\n".encode()

    def old(connection: socket.socket) -> None:
        body = {"m": "hello", "nonce": nonce, "rank": 0, "world": 2, "host": "h", "pid": 1}
        connection.sendall(json.dumps(body).encode() + b"\n")

    def guess(connection: socket.socket) -> None:
        connection.sendall(challenge)
        connection.recv(4096)
        connection.sendall(b"0" * 32 + hello + b"\n")

    def bare(connection: socket.socket) -> None:
        connection.sendall(challenge + hello + b"\n")

    def proof(connection: socket.socket) -> None:
        """The hub's own proof as the code of our line."""
        connection.sendall(challenge)
        code = connection.recv(4096).split()[-1]
        connection.sendall(code[:32] + hello + b"\n" + code + hello + b"\n")

    def reflected(connection: socket.socket) -> None:
        connection.sendall(challenge)
        connection.sendall(connection.recv(4096))

    return {"old": old, "guess": guess, "bare": bare, "proof": proof, "reflected": reflected}


def test_nobody_passes_for_a_rank():
    with hub_of(2) as hub:
        _, port = parse_addresses(hub.addresses)

        def attack() -> dict[str, str]:
            heard = {}
            for name, impostor in impostors(hub.credentials.nonce).items():
                with socket.create_connection(("127.0.0.1", port), WITHIN_S) as connection:
                    impostor(connection)
                    rest = b""
                    with contextlib.suppress(ConnectionError):
                        while data := connection.recv(4096):
                            rest += data
                heard[name] = rest.decode()
            return heard

        heard = as_nobody(attack)
        assert heard.keys() == impostors("").keys()
        assert not [text for text in heard.values() if "welcome" in text]
        assert (hub.members(), hub.monitors(), hub.events.empty()) == ({}, {}, True)
        join(hub, 0).close()


# -- the secret ----------------------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Where every user can look: pytest's own folders are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="forge-strangers-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def readable(folder: Path) -> Iterator[bytes]:
    """What another user can read: command lines, environments, files below the folder."""
    for process in Path("/proc").iterdir():
        for name in ("cmdline", "environ") if process.name.isdecimal() else ():
            with contextlib.suppress(OSError):
                yield (process / name).read_bytes()
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def test_the_secret_of_a_running_launch_is_nowhere_that_another_user_can_look(open_folder: Path):
    met = open_folder / "met"

    def program(run) -> None:
        assert "SLURM_FORGE_SECRET" not in os.environ, "what the program starts would have it"
        met.touch()
        while not (open_folder / "seen").exists():
            time.sleep(0.01)

    run = new_run(open_folder)
    with launched(run, 2, program, exits=True) as launch:
        until = time.monotonic() + 60
        while not met.exists():
            assert time.monotonic() < until, "the ranks never met"
            time.sleep(0.01)
        _, port = parse_addresses(launch.hub._published["store"])
        secret = launch.hub.credentials.secret

        def look() -> tuple[list[str], bool]:
            store = TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=10))
            found = b"".join(readable(open_folder))
            return store.list_keys(), secret.encode() in found

        keys, found = as_nobody(look)
        (open_folder / "seen").touch()
    assert any(launch.hub.credentials.nonce in key for key in keys), "the store showed nothing"
    assert not [key for key in keys if secret in key]
    assert not found


# -- places --------------------------------------------------------------------------------------


def idle(port: int, number: int) -> Callable[[Connection], None]:
    """So many connections that say nothing, for ever; opened anew as they are ended."""

    def work(pipe: Connection) -> None:
        kept = [socket.create_connection(("127.0.0.1", port), WITHIN_S) for _ in range(number)]
        pipe.send(len(kept))
        while True:
            for at, each in enumerate(kept):
                each.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    if each.recv(1) == b"":
                        kept[at] = socket.create_connection(("127.0.0.1", port), WITHIN_S)

    return work


@pytest.mark.parametrize("number", [2 + 16 + 2, 600])
def test_idle_connections_keep_no_rank_out(monkeypatch, capfd, number):
    """Nor only until their time is over."""
    monkeypatch.setattr("slurm_forge.control.listener._HELLO_WITHIN_S", 1e6)
    with hub_of(2) as hub:
        port = parse_addresses(hub.addresses)[1]
        with beside_nobody(idle(port, number)) as pipe:
            assert pipe.poll(60) and pipe.recv() == number
            members = [join(hub, rank) for rank in range(2)]
            assert {hub.events.get(timeout=WITHIN_S) for _ in members} == {
                RankJoined(0), RankJoined(1)
            }  # fmt: skip
            hub.publish("alive", "yes")
            assert [member.published("alive", WITHIN_S) for member in members] == ["yes"] * 2
            for member in members:
                member.close()
    said = capfd.readouterr().err
    if number > 500:
        assert "a connection from 127.0.0.1 to the control channel was ended" in said
        assert said.count("slurm_forge:") == 1


def test_who_says_nothing_is_ended_soon(monkeypatch, capfd):
    monkeypatch.setattr("slurm_forge.control.listener._HELLO_WITHIN_S", 0.2)
    with hub_of(2) as hub:
        port = parse_addresses(hub.addresses)[1]

        def wait() -> bytes:
            with socket.create_connection(("127.0.0.1", port), WITHIN_S) as connection:
                return connection.recv(1)

        assert as_nobody(wait) == b""
    assert "127.0.0.1" in capfd.readouterr().err


def test_a_hub_that_can_open_no_more_files_lets_ranks_in_and_does_not_spin():
    """Strangers have taken every descriptor that is left."""

    def take_all() -> list[int]:
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        return taken

    def crowded() -> tuple[str, float]:
        with hub_of(2) as hub:
            port = parse_addresses(hub.addresses)[1]

            def rank(pipe: Connection) -> None:
                pipe.recv()
                # On a busy machine strangers, who come back at once, may be quicker several times.
                join(hub, 0, within_s=90.0)
                pipe.send("joined")

            with beside_nobody(rank) as ours, beside_nobody(idle(port, 100)) as pipe:
                assert pipe.poll(60), "the strangers did not come"
                limit = len(list(Path("/proc/self/fd").iterdir()))
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
                take_all()
                ours.send("now")
                said = ours.recv() if ours.poll(100) else "not joined"
            until = time.monotonic() + WITHIN_S
            # Who leaves gives back a descriptor, which the listener would use for the next one.
            while (hub._strangers or len(hub._peers)) and time.monotonic() < until:
                time.sleep(0.01)
            take_all()
            with socket.socket(fileno=spare) as knocking:
                knocking.connect(("127.0.0.1", port))
                began = time.process_time()
                time.sleep(1.0)
                return said, time.process_time() - began

    spare = socket.socket().detach()
    spent = bounded(crowded, seconds=60)
    os.close(spare)
    assert spent is not None
    assert isinstance(spent.result, tuple), spent.result
    said, busy = spent.result
    assert said == "joined"
    assert busy < 0.3, "the listener spins"


def test_a_launch_that_needs_more_files_than_it_may_open_is_refused_before_it_starts():
    def start() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
        hub = Hub(world_size=200)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        hub.close()
        try:
            Hub(world_size=400)
        except UnsupportedError as error:
            return f"{raised}: {error}"
        return "it starts"

    spent = bounded(start)
    assert spent is not None
    assert spent.result.startswith("1024: a launch of 400 ranks needs 1728 open files")
    assert "enough for 224 ranks" in spent.result
    assert "ulimit -Hn" in spent.result


@pytest.mark.parametrize("hard", [1024, None])
def test_supervisor_preflight_and_doctor_agree_on_the_limit_at_4096_ranks(hard: int | None):
    """``ulimit -n 1024`` is the soft limit of most sites: it counts only as the hard one."""

    def look() -> tuple[str, int, CheckVerdict, int]:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
        check = _open_files(4096)
        try:
            Hub(world_size=4096).close()
            refused = ""
        except UnsupportedError as error:
            refused = error.message
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return refused, soft, check.verdict, ranks_possible(open_files_allowed())

    spent = bounded(look)
    assert spent is not None
    refused, soft, verdict, possible = spent.result
    if hard is None:
        assert soft > 1024 or possible == 224, "it was not raised"
    assert (refused == "") == (verdict is CheckVerdict.FINE) == (possible >= 4096)
    if refused:
        assert "4096 ranks needs 16512 open files" in refused
        assert f"enough for {possible} ranks" in refused


def test_a_job_whose_ranks_need_more_files_claims_no_attempt(tmp_path: Path):
    run = new_run(tmp_path)

    def start() -> tuple[str, int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        environment = SlurmEnvironment.from_environ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "400"})
        assert environment is not None
        slurm = SubprocessSlurm.of_this_process()
        try:
            supervise(run, [], environment=environment, variables={}, slurm=slurm, via="test")
        except UnsupportedError as error:
            return error.message, len(list_claims(run))
        return "it starts", len(list_claims(run))

    spent = bounded(start)
    assert spent is not None
    message, claims = spent.result
    assert "enough for 224 ranks" in message
    assert claims == 0
