"""The listening end of a channel: lets in who knocks, reads lines, drops who misbehaves or is gone.

One thread, one selector.  What lines mean, and who may stay, is said by whoever derives from it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from slurm_forge.control.addresses import candidates, format_addresses, notice_dead_peer
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.message import Message
from slurm_forge.errors import ControlChannelError

_HELLO_WITHIN_S = 10.0
#: How many may knock at once where it is not known yet how many there are.
_UNKNOWN_WORLD = 4096
#: Who does not read must not block the others; a full buffer means that it is frozen.
_SEND_WITHIN_S = 2.0


@dataclass(slots=True)
class Peer:
    """A connection, and whose it is once that was said."""

    connection: socket.socket
    since: float
    rank: int | None = None
    buffer: bytes = b""

    @property
    def stranger(self) -> bool:
        """Whether it has not said yet who it is."""
        return self.rank is None


PeerT = TypeVar("PeerT", bound=Peer)


class Listener(ABC, Generic[PeerT]):
    """Serves the peers of one channel on a thread of its own, from ``start`` to ``close``.

    ``_take``, ``_on_closed`` and ``_tick`` are called on that thread, with the lock held.
    ``_on_closed`` is also called on the thread that finds by sending, or by ``close``, that a peer
    is gone.
    """

    def __init__(
        self,
        *,
        world_size: int,
        nonce: str,
        name: str,
        tick_s: float,
        interface_address: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world_size = world_size
        self.nonce = nonce
        self._tick_s = tick_s
        self._clock = clock
        self._lock = threading.RLock()
        self._peers: dict[int, PeerT] = {}  # by file descriptor
        self._closing = False
        self._listener = socket.create_server(("", 0), backlog=4096)
        self._listener.setblocking(False)
        self.addresses = format_addresses(
            candidates(interface_address), self._listener.getsockname()[1]
        )
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    # -- what a channel is made of -------------------------------------------------------------

    @abstractmethod
    def _let_in(self, connection: socket.socket) -> PeerT:
        """What is kept of somebody who knocked."""

    @abstractmethod
    def _decode(self, line: bytes) -> Message:
        """The message on a line; ``ControlChannelError`` where it is none of this channel's."""

    @abstractmethod
    def _take(self, peer: PeerT, message: Message) -> None:
        """What a peer said, a stranger's first word included."""

    @abstractmethod
    def _on_closed(self, peer: PeerT) -> None:
        """A peer was dropped, whoever it was; once for each."""

    @abstractmethod
    def _tick(self, now: float) -> None:
        """Every ``tick_s``, and after whatever was heard."""

    # -- for those who derive ------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving; connected peers see the end of the channel.  Twice is fine."""
        if self._closing:
            return
        self._closing = True
        self._wake.send(b"x")
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._drop_all()
        for end in (self._listener, self._waker, self._wake, self._selector):
            end.close()

    def _belongs(self, nonce: str, world: int, rank: int) -> bool:
        """Whether somebody who introduces itself so is one of those that are listened for."""
        same = protocol.same_nonce(nonce, self.nonce)
        return same and world == self.world_size and 0 <= rank < self.world_size

    def _broadcast(self, message: Message) -> None:
        line = protocol.encode(message)
        for peer in list(self._peers.values()):
            if peer.rank is not None:
                self._send_line(peer, line)

    def _send(self, peer: PeerT, message: Message) -> None:
        self._send_line(peer, protocol.encode(message))

    def _send_line(self, peer: PeerT, line: bytes) -> None:
        try:
            peer.connection.sendall(line)
        except OSError:
            self._drop(peer)

    def _drop(self, peer: PeerT) -> None:
        descriptor = peer.connection.fileno()
        if descriptor not in self._peers:
            return
        del self._peers[descriptor]
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._on_closed(peer)

    # -- the serving thread --------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            # However this thread ends, peers that nobody listens to must not wait for ever: they
            # see the end of the channel, and whoever waits for them that they are gone.
            self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            for peer in list(self._peers.values()):
                self._drop(peer)

    def _turn(self) -> None:
        for key, _ in self._selector.select(timeout=self._tick_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is not self._waker:
                self._receive(key.fd)
        with self._lock:
            now = self._clock()
            self._tick(now)
            for peer in list(self._peers.values()):
                if peer.stranger and now - peer.since > _HELLO_WITHIN_S:
                    self._drop(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError):  # who is gone again is noticed by reading
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_dead_peer(connection)
        connection.settimeout(_SEND_WITHIN_S)
        with self._lock:
            strangers = sum(peer.stranger for peer in self._peers.values())
            if strangers > (self.world_size or _UNKNOWN_WORLD) + 16:
                connection.close()
                return
            self._peers[connection.fileno()] = self._let_in(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, descriptor: int) -> None:
        with self._lock:
            peer = self._peers.get(descriptor)
        if peer is None:
            return
        try:
            data = peer.connection.recv(1 << 16)
        except TimeoutError:
            return  # the descriptor was reused since select() saw it: nothing has come yet
        except OSError:
            data = b""
        with self._lock:
            if not data:
                self._drop(peer)
                return
            peer.buffer += data
            *lines, peer.buffer = peer.buffer.split(b"\n")
            if len(peer.buffer) > protocol.LINE_LIMIT:
                self._drop(peer)
                return
            for line in lines:
                try:
                    message = self._decode(line)
                except ControlChannelError:
                    self._drop(peer)
                    return
                self._take(peer, message)
                if peer.connection.fileno() < 0:
                    return  # dropped meanwhile: the rest was said by nobody
