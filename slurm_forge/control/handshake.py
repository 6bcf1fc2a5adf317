"""Mutual authentication on a channel: both ends prove that they know its secret without sending it.

The lines of a handshake, each ended by a newline::

    client   forge 2 VERSION ROLE NONCE FRESH
    hub      forge 2 VERSION FRESH PROOF
    client   MAC HELLO
    hub      MAC welcome           or: MAC refused WHY

``NONCE`` names the launch (or the step, for agents) and is public.  ``PROOF`` and the two keys of
the session are HMAC-SHA256 under the secret, over the role, the nonce and both fresh numbers; each
has a purpose of its own, so nothing that one end sends can be replayed as the other end's part.
Every line from the third on carries a ``MAC`` of the session, which counts the lines: a line that
is changed, repeated, dropped or inserted ends the connection.  Nothing is encrypted.

A session belongs to a connection, not to a rank, because a relay, which speaks for the ranks of its
node, needs one.  A client of a relay names the hub in a line before its hello::

    client   MAC via HOST1,HOST2:PORT
"""

from __future__ import annotations

import contextlib
import hmac
import random
import re
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from slurm_forge.control.addresses import connect, format_addresses, usable_hosts
from slurm_forge.control.session import AuthenticatedConnection, Session
from slurm_forge.errors import ControlChannelError
from slurm_forge.format_version import PACKAGE_VERSION

#: Version of the handshake and of the messages after it; ends of different versions disconnect.
CHANNEL_VERSION = 2
#: Limit for lines of the handshake, which are shorter, whatever the other end sends.
_LONGEST = 4096
#: The first line in any version, so that each end can name the other's version.
_ANY = re.compile(rb"forge ([0-9]{1,4}) ([0-9A-Za-z.+-]{1,40}) .*")
_CHALLENGE = re.compile(rb"forge [0-9]+ \S+ ([a-z]{1,16}) ([0-9A-Za-z-]{1,64}) ([0-9a-f]{32})")
_ANSWER = re.compile(rb"forge [0-9]+ \S+ ([0-9a-f]{32}) ([0-9a-f]{64})")
#: Instead of a proof: the hub is that of another launch.
_ANOTHER = b"another-launch"
_WELCOME, _REFUSED = b"welcome", b"refused "
#: Longest pause before another attempt at a hub that closed the connection; it is randomized.
_AGAIN_S = 0.5


class Role(str, Enum):
    """What the client of a channel is; the other end is the hub."""

    RANK = "rank"
    MONITOR = "monitor"
    #: One per node: it forwards what ranks and monitors send.
    RELAY = "relay"
    AGENT = "agent"
    #: A node of ``doctor --live``.
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process needs to join a channel.

    Attributes:
        nonce: Names the launch or step of the channel; public.
        secret: The attempt's secret; never sent, printed, or part of a command line.
    """

    nonce: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> Credentials:
        """A fresh nonce and a fresh secret."""
        return cls(secrets.token_hex(16), secrets.token_hex(32))

    def with_new_nonce(self) -> Credentials:
        """Credentials for another channel of the same attempt: a new nonce, the same secret."""
        return replace(self, nonce=secrets.token_hex(16))


# -- the client ------------------------------------------------------------------------------


def dial(
    hosts: Sequence[str],
    port: int,
    credentials: Credentials,
    role: Role,
    hello: bytes,
    *,
    who: str,
    within_s: float,
) -> AuthenticatedConnection:
    """Connect to the first host at which the hub proves its identity, and be welcomed by it.

    A hub that closes the connection without an answer has no room at the moment and is tried again.

    Args:
        hosts: The addresses of the hub, in the order in which they are tried.
        port: Its port.
        credentials: Those of the channel.
        role: What this process is.
        hello: The first message, which introduces this process.
        who: The same for error messages: ``rank 3``.
        within_s: How long each host may take to connect, and all of them together to welcome.

    Raises:
        ControlChannelError: No host can be reached, none of them is the hub, or the hub refuses.
    """
    deadline = time.monotonic() + within_s
    while True:
        failed: ControlChannelError | None = None
        problems, ended = [], False
        for host in usable_hosts(hosts):
            try:
                connection = connect((host,), port, within_s)
            except OSError as error:
                problems.append(f"{host}: {error}")
                continue
            # A relay needs the address of the hub.
            via = f"via {format_addresses(hosts, port)}\n".encode() if host[0] == "/" else b""
            try:
                return _introduce(connection, credentials, role, via, hello, who, deadline)
            except (OSError, EOFError) as error:
                ended = True
                hung_up = isinstance(error, EOFError | ConnectionError)
                problems.append(f"{host}: {'it ended the connection' if hung_up else error}")
            except _HubRefusalError:
                raise
            except ControlChannelError as error:
                failed = error
                problems.append(f"{host}: {error.message}")
            connection.close()
        if not ended or time.monotonic() > deadline:
            break
        time.sleep(random.uniform(0.1, 1.0) * _AGAIN_S)  # noqa: S311  not all at once
    next_step = (
        "It has no place, does not answer, or is of an older version: see the output of what "
        "conducts the run."
        if ended
        else "Can compute nodes open TCP connections to each other?  A site file can name the "
        "interface (socket_interface)."
    )
    raise ControlChannelError(
        f"{who} can't reach the control channel at {','.join(hosts)}:{port} "
        f"({'; '.join(problems)})",
        next_step=next_step if failed is None else failed.next_step,
    )


class _HubRefusalError(ControlChannelError):
    """The hub refused, and would do so again."""


def is_hub_at(hosts: Sequence[str], port: int, credentials: Credentials, within_s: float) -> bool:
    """Whether the hub of this channel answers at one of the hosts now."""
    for host in usable_hosts(hosts):
        with contextlib.suppress(OSError, EOFError, ControlChannelError):
            with connect((host,), port, within_s) as connection:
                _verify_hub(connection, credentials, Role.RANK)
            return True
    return False


def _introduce(
    connection: socket.socket,
    credentials: Credentials,
    role: Role,
    via: bytes,
    hello: bytes,
    who: str,
    deadline: float,
) -> AuthenticatedConnection:
    before = connection.gettimeout()
    connection.settimeout(max(2.0, (deadline - time.monotonic()) / 2))
    made = _verify_hub(connection, credentials, role)
    if via:
        made.send(via)
    made.send(hello)
    # It is the hub, however slow: a second hello would look like another process's.
    connection.settimeout(max(2.0, deadline - time.monotonic()))
    answer = made.verify(_read_line(connection))
    if answer != _WELCOME:
        connection.close()
        reason = answer.removeprefix(_REFUSED).decode(errors="replace")
        raise _HubRefusalError(
            f"{who} was not welcomed on the control channel: {reason}",
            next_step="Is a rank of an older launch still alive on this node?",
        )
    connection.settimeout(before)
    return made


def _verify_hub(
    connection: socket.socket, credentials: Credentials, role: Role
) -> AuthenticatedConnection:
    """The connection, once the hub has proved its identity; the client sends the first line."""
    if not credentials.secret:
        raise ControlChannelError(
            "this process was not given the secret of the launch",
            next_step="Start the run with slurm-forge; does something in between (a container, "
            "sudo) remove SLURM_FORGE_SECRET from the environment?",
        )
    fresh = secrets.token_hex(16)
    challenge = f"{role.value} {credentials.nonce} {fresh}"
    connection.sendall(_head() + challenge.encode("ascii", "replace") + b"\n")
    line = _read_line(connection)
    found = _ANSWER.fullmatch(line) if _version_of(line) == CHANNEL_VERSION else None
    if found is None:
        raise _no_answer(line)
    theirs = found[1].decode()
    proof, up, down = _keys(credentials, role.value, fresh, theirs)
    if not hmac.compare_digest(found[2], proof.hex().encode()):
        raise ControlChannelError(
            "who answers does not know the secret of this launch",
            next_step="Another program listens on that port of that host: another user's, or one "
            "of an older launch.  Ask whose it is (ss -ltnp on that host).",
        )
    return AuthenticatedConnection(connection, Session(up, down))


def _no_answer(line: bytes) -> ControlChannelError:
    """Describe an answer that contains no proof."""
    found = _ANY.fullmatch(line)
    if found is None:
        return ControlChannelError(
            "who answers is no hub of slurm_forge",
            next_step="Another program listens on that port of that host.",
        )
    version, package = int(found[1]), found[2].decode()
    if version != CHANNEL_VERSION:
        return ControlChannelError(
            f"the hub speaks version {version} of the channel (slurm_forge {package}), this "
            f"process version {CHANNEL_VERSION} (slurm_forge {PACKAGE_VERSION})",
            next_step="All processes of a launch need one version: install slurm_forge "
            f"{package} where the ranks run, or {PACKAGE_VERSION} where the job was submitted.",
        )
    return ControlChannelError(
        "it is the channel of another launch",
        next_step="Is a rank of an older launch still alive on this node?",
    )


# -- the hub ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChallengeAnswer:
    """The hub's answer to a client's first line.

    ``session`` is None for a client that can't belong to the channel; ``why`` is the reason.
    A session alone proves nothing: the client is authenticated by the next line that it verifies.
    """

    line: bytes
    session: Session | None = None
    role: str = ""
    why: str = ""


def nonce_of(line: bytes) -> str:
    """The launch that the first line of a connection names; empty if it is no such line."""
    challenge = _CHALLENGE.fullmatch(line)
    return "" if challenge is None else challenge[2].decode()


def answer_challenge(line: bytes, credentials: Credentials) -> ChallengeAnswer:
    """Answer the first line of any connection; ``line`` lacks its newline."""
    version = _version_of(line)
    if line.startswith(b'{"m":'):
        return ChallengeAnswer(b"", why="it is a process of an older version of slurm_forge")
    if version is None or not credentials.secret:
        return ChallengeAnswer(b"", why="it does not speak this protocol")
    if version != CHANNEL_VERSION:
        found = _ANY.fullmatch(line)
        package = "" if found is None else found[2].decode()
        why = f"it speaks version {version} of the channel (slurm_forge {package}), not "
        return ChallengeAnswer(_head() + _ANOTHER + b"\n", why=f"{why}{CHANNEL_VERSION}")
    challenge = _CHALLENGE.fullmatch(line)
    if challenge is None:
        return ChallengeAnswer(b"", why="it does not speak this protocol")
    if not hmac.compare_digest(challenge[2], credentials.nonce.encode("ascii", "replace")):
        return ChallengeAnswer(_head() + _ANOTHER + b"\n", why="it belongs to another launch")
    role, fresh = challenge[1].decode(), secrets.token_hex(16)
    proof, up, down = _keys(credentials, role, challenge[3].decode(), fresh)
    reply = _head() + f"{fresh} {proof.hex()}\n".encode()
    return ChallengeAnswer(reply, Session(down, up), role)


def welcome(connection: AuthenticatedConnection) -> None:
    """The answer to a hello that is accepted."""
    connection.send(_WELCOME)


def refuse(connection: AuthenticatedConnection, why: str) -> None:
    """The answer to the hello of a client that knows the secret but has no place here."""
    connection.send(_REFUSED + why.encode(errors="replace"))


def accept(
    connection: socket.socket, credentials: Credentials
) -> tuple[AuthenticatedConnection, bytes]:
    """The hub's part, for a server of one connection at a time; ``welcome`` is left to the caller.

    Args:
        connection: With a timeout.
        credentials: Those of the channel.

    Returns:
        The connection, and the line with which the client introduced itself.

    Raises:
        ControlChannelError: The client does not know the secret.
        OSError: The client sends nothing, or has disconnected.
        EOFError: The client has disconnected.
    """
    answer = answer_challenge(_read_line(connection), credentials)
    connection.sendall(answer.line)
    if answer.session is None:
        raise ControlChannelError(
            f"somebody connected who is let in nowhere: {answer.why}",
            next_step="Nothing: the connection is ended.",
        )
    made = AuthenticatedConnection(connection, answer.session)
    return made, made.verify(_read_line(connection))


# -- both ------------------------------------------------------------------------------------


def _keys(credentials: Credentials, role: str, client: str, hub: str) -> tuple[bytes, bytes, bytes]:
    """The hub's proof, the key of the client's lines, and the key of the hub's lines."""
    about = f"slurm_forge {CHANNEL_VERSION} {role} {credentials.nonce} {client} {hub}"
    secret = credentials.secret.encode("utf-8", "surrogatepass")
    proof, up, down = (
        hmac.digest(secret, f"{purpose}: {about}".encode("utf-8", "surrogatepass"), "sha256")
        for purpose in ("proof of the hub", "client to hub", "hub to client")
    )
    return proof, up, down


def _head() -> bytes:
    return f"forge {CHANNEL_VERSION} {PACKAGE_VERSION} ".encode()


def _version_of(line: bytes) -> int | None:
    found = _ANY.fullmatch(line)
    return None if found is None else int(found[1])


def _read_line(connection: socket.socket) -> bytes:
    """The next line and no byte after it; ``EOFError`` at the end of the connection."""
    line, until = b"", time.monotonic() + (connection.gettimeout() or float("inf"))
    while len(line) <= _LONGEST:
        if time.monotonic() > until:
            raise TimeoutError("it says too little")
        data = connection.recv(4096, socket.MSG_PEEK)
        end = data.find(b"\n")
        line += connection.recv(len(data) if end < 0 else end + 1)
        if not data:
            raise EOFError
        if end >= 0:
            return line[:-1]
    raise ControlChannelError(
        "who answers is no hub of slurm_forge",
        next_step="Another program listens on that port of that host.",
    )
