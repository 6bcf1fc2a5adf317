"""The supervisor's end of the agents' channel: a connection per rank, over all launches of a step.

One thread, one selector, as the hub of the control channel.  It keeps what agents have said;
whoever starts launches reads it from there.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm_forge.control import agents as a
from slurm_forge.control import protocol as p
from slurm_forge.control.addresses import candidates, format_addresses
from slurm_forge.errors import ControlChannelError

__all__ = ["AgentEnd", "AgentView", "AgentsHub"]

_HELLO_WITHIN_S = 10.0
_TICK_S = 0.5
_SEND_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How the worker of a rank ended, and when that was heard (on the hub's monotonic clock)."""

    rank: int
    host: str
    at: float
    said: a.Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What is known of the agent of a rank; ``begun`` is the last launch that it began."""

    rank: int
    host: str
    pid: int
    connected: bool = True
    ready: bool = False
    begun: int = 0
    worker: int = 0
    how: str = ""


@dataclass(slots=True)
class _Agent:
    connection: socket.socket
    since: float
    rank: int | None = None
    host: str = ""
    pid: int = 0
    buffer: bytes = b""
    ready: bool = False
    begun: int = 0
    worker: int = 0
    how: str = ""
    ends: list[AgentEnd] = field(default_factory=list)


class AgentsHub:
    """Listens for the agents of one step.  ``on_notice`` is called on its thread.

    ``hosts`` are the names and addresses of this node to try, best first.
    """

    def __init__(
        self,
        *,
        world_size: int,
        nonce: str,
        on_notice: Callable[[int, str], None],
        hosts: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world_size = world_size
        self.nonce = nonce
        self._on_notice = on_notice
        self._clock = clock
        self._lock = threading.RLock()
        self._peers: dict[int, _Agent] = {}  # by file descriptor
        self._agents: dict[int, _Agent] = {}  # by rank, those that are gone too
        self._ends: list[AgentEnd] = []
        self._order: a.Begin | None = None
        self._closing = False
        self._listener = socket.create_server(("", 0), backlog=4096)
        self._listener.setblocking(False)
        self.addresses = format_addresses(hosts or candidates(), self._listener.getsockname()[1])
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="forge-agents", daemon=True)
        self._thread.start()

    def begin(self, order: a.Begin) -> None:
        """Have every agent start its rank of a launch, those that connect later too."""
        with self._lock:
            self._order = order
            self._broadcast(order)

    def end(self, launch: int) -> None:
        """Have every agent kill its worker of that launch; who has not begun it does not."""
        with self._lock:
            self._order = None
            self._broadcast(a.End(launch=launch))

    def leave(self) -> None:
        """Nothing follows: every agent ends what is left, and itself."""
        with self._lock:
            self._order = None
            self._broadcast(a.Leave())

    def ends(self, launch: int) -> tuple[AgentEnd, ...]:
        """How workers of a launch ended so far, in the order in which it was heard."""
        with self._lock:
            return tuple(end for end in self._ends if end.said.launch == launch)

    def agents(self) -> dict[int, AgentView]:
        """What is known of every agent that ever connected."""
        with self._lock:
            return {
                rank: AgentView(
                    rank=rank,
                    host=agent.host,
                    pid=agent.pid,
                    connected=agent.connection.fileno() >= 0,
                    ready=agent.ready,
                    begun=agent.begun,
                    worker=agent.worker,
                    how=agent.how,
                )
                for rank, agent in self._agents.items()
            }

    def close(self) -> None:
        """Stop listening; agents see the end of the channel.  Twice is fine."""
        if self._closing:
            return
        self._closing = True
        self._wake.send(b"x")
        self._thread.join(timeout=5)
        with self._lock:
            for peer in list(self._peers.values()):
                self._drop(peer)
        for end in (self._listener, self._waker, self._wake, self._selector):
            end.close()

    # -- the serving thread --------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            # However this thread ends, agents that nobody listens to must not wait for ever: they
            # see the end of the channel, and whoever waits for the launch that they are gone.
            with self._lock:
                for peer in list(self._peers.values()):
                    self._drop(peer)

    def _turn(self) -> None:
        for key, _ in self._selector.select(timeout=_TICK_S):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is not self._waker:
                self._receive(key.fd)
        with self._lock:
            now = self._clock()
            for peer in list(self._peers.values()):
                if peer.rank is None and now - peer.since > _HELLO_WITHIN_S:
                    self._drop(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_WITHIN_S)
        with self._lock:
            strangers = sum(peer.rank is None for peer in self._peers.values())
            if strangers > self.world_size + 16:
                connection.close()
                return
            self._peers[connection.fileno()] = _Agent(connection, self._clock())
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, descriptor: int) -> None:
        with self._lock:
            peer = self._peers.get(descriptor)
        if peer is None:
            return
        try:
            data = peer.connection.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        with self._lock:
            peer.buffer += data
            *lines, peer.buffer = peer.buffer.split(b"\n")
            if not data or len(peer.buffer) > p.LINE_LIMIT:
                self._drop(peer)
            for line in lines:
                try:
                    self._take(peer, a.decode_agents(line))
                except ControlChannelError:
                    self._drop(peer)
                    return

    def _take(self, peer: _Agent, message: p.Message) -> None:
        if peer.rank is None:
            self._greet(peer, message)
            return
        match message:
            case a.Ready():
                peer.ready = True
            case a.Begun():
                peer.begun, peer.worker, peer.how = message.launch, message.pid, message.how
            case a.Ended():
                self._ends.append(AgentEnd(peer.rank, peer.host, self._clock(), message))
            case a.Noticed():
                self._on_notice(peer.rank, message.what)
            case _:
                pass

    def _greet(self, peer: _Agent, message: p.Message) -> None:
        if not (
            isinstance(message, a.AgentHello)
            and p.same_nonce(message.nonce, self.nonce)
            and message.world == self.world_size
            and 0 <= message.rank < self.world_size
            and message.rank not in self._agents
        ):
            self._drop(peer)
            return
        peer.rank, peer.host, peer.pid = message.rank, message.host, message.pid
        self._agents[message.rank] = peer
        self._send(peer, a.AgentWelcome(nonce=self.nonce))
        if self._order is not None:
            self._send(peer, self._order)

    def _broadcast(self, message: p.Message) -> None:
        for peer in list(self._peers.values()):
            if peer.rank is not None:
                self._send(peer, message)

    def _send(self, peer: _Agent, message: p.Message) -> None:
        try:
            peer.connection.sendall(p.encode(message))
        except OSError:
            self._drop(peer)

    def _drop(self, peer: _Agent) -> None:
        descriptor = peer.connection.fileno()
        if descriptor in self._peers:
            del self._peers[descriptor]
            self._selector.unregister(peer.connection)
        peer.connection.close()
