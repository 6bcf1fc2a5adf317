"""Who is let in: proofs, sessions, and what becomes of lines that somebody has tampered with."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurm_forge
from slurm_forge.control import Hub, Member, handshake
from slurm_forge.control.addresses import connect, parse_addresses
from slurm_forge.control.handshake import Credentials, Role, answer_challenge, dial, is_hub_at
from slurm_forge.control.session import AuthenticatedConnection, Session
from slurm_forge.errors import ControlChannelError
from tests.channel_ends import CREDENTIALS, welcomed

WITHIN_S = 20.0
VERSION = slurm_forge.__version__.encode()
CHALLENGE = b"forge 2 0.1.0 rank " + CREDENTIALS.nonce.encode() + b" " + b"c" * 32


def call(port: int, *, within_s: float = WITHIN_S) -> AuthenticatedConnection:
    """As a rank that knows the secret."""
    return dial(
        ("127.0.0.1",), port, CREDENTIALS, Role.RANK, b"hello", who="rank 0", within_s=within_s
    )


@contextlib.contextmanager
def serving(body: Callable[[socket.socket], object]) -> Iterator[int]:
    """A listener whose connections are all given to ``body``, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError, EOFError, ControlChannelError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(WITHIN_S)
                        with contextlib.suppress(OSError, EOFError):
                            body(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(WITHIN_S)


def sessions() -> tuple[Session, Session]:
    return Session(b"a" * 32, b"b" * 32), Session(b"b" * 32, b"a" * 32)


def test_the_wire_of_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other versions refuse it by its number: what changes here needs another one."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "d" * 2 * size)
    answer = answer_challenge(CHALLENGE, CREDENTIALS)
    about = f"slurm_forge 2 rank {CREDENTIALS.nonce} {'c' * 32} {'d' * 32}"

    def key(purpose: str) -> bytes:
        text = f"{purpose}: {about}".encode()
        return hmac.new(CREDENTIALS.secret.encode(), text, sha256).digest()

    proof = key("proof of the hub").hex().encode()
    assert answer.line == b"forge 2 " + VERSION + b" " + b"d" * 32 + b" " + proof + b"\n"
    assert answer.session is not None
    code = hmac.new(key("hub to client"), b"1 welcome", sha256).hexdigest()[:32].encode()
    assert answer.session.sign(b"welcome") == code + b"welcome\n"
    code = hmac.new(key("client to hub"), b"1 hello", sha256).hexdigest()[:32].encode()
    assert answer.session.verify(code + b"hello") == b"hello"


def test_two_sessions_understand_each_other_and_nobody_else() -> None:
    ours, theirs = sessions()
    for line in (b"one\n", b"two", b""):
        assert theirs.verify(ours.sign(line)[:-1]) == line.removesuffix(b"\n")
        assert ours.verify(theirs.sign(line)[:-1]) == line.removesuffix(b"\n")


@given(st.binary(min_size=32, max_size=32), st.text(max_size=300).map(ascii))
def test_the_code_of_a_line_is_hmac(key: bytes, text: str) -> None:
    ours, line = Session(key, bytes(32)), text.encode()
    for number in (1, 2):
        code = hmac.digest(key, b"%d %b" % (number, line), "sha256").hex()[:32].encode()
        assert ours.sign(line) == code + line + b"\n"


@pytest.mark.parametrize(
    "tampered",
    [
        pytest.param(lambda first, second: first[:-1] + b"x", id="changed"),
        pytest.param(lambda first, second: b"0" * 32 + first[32:], id="another code"),
        pytest.param(lambda first, second: second, id="one left out"),
        pytest.param(lambda first, second: first[32:], id="no code"),
        pytest.param(lambda first, second: b"", id="nothing"),
        pytest.param(lambda first, second: b"\xff" * 40, id="no text"),
    ],
)
def test_a_line_that_is_not_the_next_one_is_refused(
    tampered: Callable[[bytes, bytes], bytes],
) -> None:
    ours, theirs = sessions()
    first, second = ours.sign(b"first")[:-1], ours.sign(b"second")[:-1]
    with pytest.raises(ControlChannelError, match="was not sent by the other end"):
        theirs.verify(tampered(first, second))


def test_a_line_is_good_once_and_in_one_direction() -> None:
    ours, theirs = sessions()
    line = ours.sign(b"once")[:-1]
    assert theirs.verify(line) == b"once"
    for receiver in (theirs, ours):  # again, and back to who has sent it
        with pytest.raises(ControlChannelError):
            receiver.verify(line)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"forge", b"forge 2 0.1.0 ", b"GET / HTTP/1.1\r", CHALLENGE[:-1], CHALLENGE + b"0",
        CHALLENGE.replace(b"c", b"C"), CHALLENGE.replace(b"rank", b"RANK"), b"forge " + b"1" * 5000,
        b'{"m":"hello","nonce":"x","rank":0,"world":1,"host":"h","pid":1}', b"\xff" * 90,
    ],
    ids=lambda line: ascii(line[:20]),
)  # fmt: skip
def test_what_is_no_knock_gets_no_session(line: bytes) -> None:
    assert answer_challenge(line, CREDENTIALS).session is None


def test_a_hub_without_a_secret_lets_nobody_in() -> None:
    assert answer_challenge(CHALLENGE, replace(CREDENTIALS, secret="")).session is None


def test_who_is_asked_twice_answers_otherwise() -> None:
    """Nothing that was recorded serves a second time."""
    first, second = (
        answer_challenge(CHALLENGE, CREDENTIALS),
        answer_challenge(CHALLENGE, CREDENTIALS),
    )
    assert first.line != second.line
    assert first.session is not None and second.session is not None
    with pytest.raises(ControlChannelError):
        second.session.verify(replayed(first.session))


def replayed(session: Session) -> bytes:
    """What the client of that session has sent first."""
    client = Session(b"", b"")
    client._send_key = session._receive_key
    return client.sign(b"hello")[:-1]


def test_roles_are_part_of_the_proof() -> None:
    agent = CHALLENGE.replace(b" rank ", b" agent ")
    fresh = b"d" * 32
    proofs = {
        handshake._keys(CREDENTIALS, role, "c" * 32, fresh.decode())
        for role in ("rank", "monitor", "agent", "node")
    }
    assert len({key for keys in proofs for key in keys}) == 12
    assert answer_challenge(agent, CREDENTIALS).role == "agent"


def test_a_hub_that_echoes_is_not_believed() -> None:
    def reflect(connection: socket.socket) -> None:
        while data := connection.recv(4096):
            connection.sendall(data)

    with serving(reflect) as port, pytest.raises(ControlChannelError, match="rank 0 can't reach"):
        call(port, within_s=2.0)


def test_the_first_of_several_hosts_may_be_a_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, and not told who calls."""
    heard = []

    def overhear(connection: socket.socket) -> None:
        heard.append(connection.recv(4096))
        connection.sendall(b"forge 2 0.1.0 " + b"0" * 32 + b" " + b"0" * 64 + b"\n")
        heard.append(connection.recv(4096))

    with serving(overhear) as stranger, socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"stranger": stranger, "hub": server.getsockname()[1]}
        monkeypatch.setattr(
            handshake,
            "connect",
            lambda hosts, port, within: connect(("127.0.0.1",), ports[hosts[0]], within),
        )
        hub = threading.Thread(target=lambda: welcomed(server), daemon=True)
        hub.start()
        hosts = ("stranger", "hub")
        dial(hosts, 1, CREDENTIALS, Role.RANK, b"hello", who="it", within_s=9.0).close()
        hub.join(WITHIN_S)
    assert b"hello" not in b"".join(heard)
    assert CREDENTIALS.secret.encode() not in b"".join(heard)


def test_a_relay_that_changes_a_line_ends_the_session() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def forward(connection: socket.socket) -> None:
            with socket.create_connection(server.getsockname(), WITHIN_S) as onward:
                for source, sink in ((connection, onward), (onward, connection)):
                    sink.sendall(handshake._read_line(source) + b"\n")
                line = handshake._read_line(connection)
                onward.sendall(line.replace(b"hello", b"jello") + b"\n")
                connection.sendall(onward.recv(4096))

        with serving(forward) as port:
            threading.Thread(target=lambda: _try(port), daemon=True).start()
            with pytest.raises(ControlChannelError, match="was not sent by the other end"):
                welcomed(server)


def _try(port: int) -> None:
    with contextlib.suppress(ControlChannelError):
        call(port, within_s=1.0)


@pytest.mark.parametrize(
    ("answer", "why", "step"),
    [
        (b"forge 7 0.9.0 something new\n", r"version 7 of the channel \(slurm_forge 0.9.0\)",
         "install slurm_forge 0.9.0"),
        (b"forge 1 0.0.9 " + b"0" * 32 + b" " + b"0" * 64 + b"\n",
         r"version 1 of the channel \(slurm_forge 0.0.9\)", "install slurm_forge 0.0.9"),
        (b"forge 2 0.1.0 another-launch\n", "another launch", "older launch"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no hub of slurm_forge", "Another program"),
        (b"forge 2 0.1.0 " + b"0" * 32 + b" " + b"0" * 64 + b"\n", "does not know the secret",
         "another user's"),
        (b"x" * 9000 + b"\n", "no hub of slurm_forge", "Another program"),
    ],
    ids=["newer", "older", "another launch", "ssh", "a guess", "endless"],
)  # fmt: skip
def test_who_answers_otherwise_is_named_with_what_to_do(answer: bytes, why: str, step: str) -> None:
    def say(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    with serving(say) as port, pytest.raises(ControlChannelError, match=why) as raised:
        call(port)
    assert f"127.0.0.1:{port}" in raised.value.message
    assert step in raised.value.next_step


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (b"forge 7 0.9.0 whatever comes then", "version 7 of the channel (slurm_forge 0.9.0)"),
        (CHALLENGE.replace(b"forge 2 0.1.0 rank", b"forge 1 0.0.9 relay"),
         "version 1 of the channel (slurm_forge 0.0.9)"),
    ],
    ids=["newer", "older"],
)  # fmt: skip
def test_one_of_another_version_hears_which_version_the_hub_has(line: bytes, version: str) -> None:
    answer = answer_challenge(line, CREDENTIALS)
    assert answer.session is None
    assert answer.line.startswith(b"forge 2 " + VERSION)
    assert version in answer.why


def test_a_rank_of_before_there_was_a_handshake_is_told_apart() -> None:
    line = b'{"m":"hello","nonce":"x","rank":0,"world":1,"host":"h","pid":1}'
    assert "older version of slurm_forge" in answer_challenge(line, CREDENTIALS).why


def test_a_hub_that_always_hangs_up_is_given_up_on_in_the_end() -> None:
    with (
        serving(lambda connection: connection.recv(4096)) as port,
        pytest.raises(ControlChannelError, match="it ended the connection") as raised,
    ):
        call(port, within_s=0.2)
    assert "conducts the run" in raised.value.next_step


def test_a_hub_without_a_place_is_tried_again() -> None:
    """It ends the connection without a word: under an attack, or while it starts."""
    tries = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                server.accept()[0].close()
                tries.append(1)
            welcomed(server)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        call(server.getsockname()[1]).close()
        thread.join(WITHIN_S)
    assert len(tries) == 2


def test_a_hub_that_is_not_there_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ControlChannelError, match="Connection refused") as raised:
        call(port)
    assert "socket_interface" in raised.value.next_step


def test_it_is_known_whether_the_hub_of_a_channel_answers() -> None:
    hub = Hub(world_size=1)
    hub.start()
    hosts, port = parse_addresses(hub.addresses)
    assert is_hub_at(hosts, port, hub.credentials, 5.0)
    assert not is_hub_at(hosts, port, hub.credentials.with_new_nonce(), 5.0)
    assert not is_hub_at(hosts, port, replace(hub.credentials, secret="other"), 5.0)
    hub.close()
    assert not is_hub_at(hosts, port, hub.credentials, 5.0)


def test_a_monitor_can_not_pass_for_a_rank() -> None:
    hub = Hub(world_size=1)
    hub.start()
    _, port = parse_addresses(hub.addresses)
    hello = b'{"m":"hello","rank":0,"world":1,"host":"h","pid":1}'
    with pytest.raises(ControlChannelError, match="role monitor"):
        dial(
            ("127.0.0.1",), port, hub.credentials, Role.MONITOR, hello, who="it", within_s=WITHIN_S
        )
    assert hub.members() == {}
    hub.close()


def test_credentials_are_not_printed() -> None:
    made = Credentials.new()
    assert made.secret not in repr(made) and made.nonce in repr(made)
    assert made.with_new_nonce().secret == made.secret != made.with_new_nonce().nonce != made.nonce
    with pytest.raises(TypeError):
        Member(rank=0)  # type: ignore[call-arg]
