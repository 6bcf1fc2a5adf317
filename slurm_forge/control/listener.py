"""The listening end of a channel: admits its clients, drops those that misbehave or are gone.

One thread, one epoll set.  Subclasses define what lines mean and who may stay.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from slurm_forge.control.addresses import candidates, format_addresses, notice_dead_peer
from slurm_forge.control.handshake import Credentials, Role, answer_challenge, refuse, welcome
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.message import Message
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.errors import ControlChannelError
from slurm_forge.open_files import raise_open_files_limit

#: How long a connection may take to authenticate.
_HELLO_WITHIN_S = 5.0
#: The number of ranks assumed while it is unknown.
_UNKNOWN_WORLD = 4096
#: Unauthenticated connections allowed beside the places for all ranks and their monitors.
_STRANGERS = 256
#: Connections accepted in a row before existing ones are read again.
_ACCEPTED_AT_ONCE = 64
#: Addresses of strangers that are reported, each once.
_NAMED = 16
#: Wake-ups consumed at once.
_WAKES = 64
#: A peer that does not read must not block the others; a full buffer means that it is frozen.
_SEND_WITHIN_S = 2.0


@dataclass(slots=True)
class Peer:
    """A connection, and the peer behind it once known.  ``role`` is what the peer claims to be."""

    connection: AuthenticatedConnection
    since: float
    address: str
    rank: int | None = None
    role: str = ""
    #: Whether it has been taken off the list of strangers.
    is_known: bool = False

    @property
    def stranger(self) -> bool:
        """Whether it has not identified itself yet."""
        return self.rank is None


PeerT = TypeVar("PeerT", bound=Peer)


class Listener(ABC, Generic[PeerT]):
    """Serves the peers of one channel on a thread of its own, from ``start`` to ``close``.

    ``_take``, ``_on_closed`` and ``_tick`` are called on that thread, with the lock held.
    ``_on_closed`` is also called on a thread that notices in ``send`` or ``close`` that a peer
    is gone.
    """

    def __init__(
        self,
        *,
        world_size: int,
        credentials: Credentials | None,
        name: str,
        tick_s: float,
        interface_address: str | None = None,
        listening: socket.socket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world_size = world_size
        self.credentials = Credentials.new() if credentials is None else credentials
        self._open_files = raise_open_files_limit(world_size)
        self._tick_s = tick_s
        self._clock = clock
        self._lock = threading.RLock()
        self._peers: dict[int, PeerT] = {}  # by file descriptor
        #: Unauthenticated ones by address, the oldest of each address first.
        self._strangers: dict[str, dict[int, PeerT]] = {}
        self._named: set[str] = set()
        self._look_at = 0.0
        #: No more files can be opened: no connection is accepted until this time.
        self._full_until: float | None = None
        self._closing = False
        self._listener = listening or socket.create_server(("", 0), backlog=4096)
        self._listener.setblocking(False)
        self.addresses = ""
        if listening is None:
            port = self._listener.getsockname()[1]
            self.addresses = format_addresses(candidates(interface_address), port)
        self._waker, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        #: Without the objects of ``selectors``: thousands of descriptors become readable a second.
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._waker, select.EPOLLIN)
        self._resting = select.poll()
        self._resting.register(self._waker, select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    # -- what a channel is made of -------------------------------------------------------------

    @abstractmethod
    def _let_in(self, connection: AuthenticatedConnection, address: str) -> PeerT:
        """The peer object for a new connection."""

    @abstractmethod
    def _decode(self, peer: PeerT, line: bytes) -> Message:
        """Decode a peer's line; ``ControlChannelError`` for a line that is not of this channel."""

    @abstractmethod
    def _take(self, peer: PeerT, message: Message) -> None:
        """Handle a peer's message, including the hello of an authenticated one."""

    @abstractmethod
    def _on_closed(self, peer: PeerT) -> None:
        """A peer was dropped; called once for each."""

    @abstractmethod
    def _tick(self, now: float) -> None:
        """Called every ``tick_s`` and after every batch of messages."""

    def _credentials_for(self, peer: PeerT, line: bytes) -> Credentials:
        """The credentials to use for a client that begins with this line."""
        return self.credentials

    def _timeout_s(self) -> float:
        """How long without a message before ``_tick`` is called."""
        return self._tick_s

    def _rest_s(self) -> float:
        """How long reading may pause, so that messages are read in batches."""
        return 0.0

    def _lose(self, peer: PeerT) -> None:
        """Sending to a peer failed: it is gone or frozen."""
        self._drop(peer)

    # -- for those who derive ------------------------------------------------------------------

    def start(self) -> None:
        """Begin serving."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving; connected peers see the end of the channel.  May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._rouse()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._drop_all()
        for end in (self._listener, self._waker, self._wake, self._epoll):
            end.close()

    def _accepts(self, peer: PeerT, role: Role, world: int, rank: int) -> bool:
        """Whether a client with this hello belongs here; otherwise it is refused."""
        why = ""
        if peer.role != role.value:
            why = f"a connection of the role {peer.role} says what a {role.value} says"
        elif world != self.world_size:
            why = f"this launch has {self.world_size} ranks, not {world}"
        elif not 0 <= rank < self.world_size:
            why = f"this launch has no rank {rank}"
        if why:
            self._refuse(peer, why)
        return not why

    def _refuse(self, peer: PeerT, why: str) -> None:
        """Tell an authenticated client why it has no place here, and drop it."""
        with contextlib.suppress(OSError):
            refuse(peer.connection, why)
        self._drop(peer)

    def _welcome(self, peer: PeerT) -> bool:
        """Whether the client is still there; otherwise it never joined, and may try again."""
        try:
            welcome(peer.connection)
        except OSError:
            self._lose(peer)
            return False
        return True

    def _send(self, peer: PeerT, message: Message) -> None:
        self._send_line(peer, protocol.encode(message))

    def _send_line(self, peer: PeerT, line: bytes) -> None:
        try:
            peer.connection.send(line)
        except OSError:
            self._lose(peer)

    def _drop(self, peer: PeerT) -> None:
        descriptor = peer.connection.fileno()
        if descriptor not in self._peers:
            return
        del self._peers[descriptor]
        self._forget_stranger(peer, descriptor)
        self._epoll.unregister(peer.connection)
        peer.connection.close()
        self._on_closed(peer)

    def _rouse(self) -> None:
        """End the serving thread's pause, if it is in one."""
        with contextlib.suppress(OSError):  # enough wake-ups are queued, or it is closed
            self._wake.send(b"x")

    # -- the serving thread --------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            # However this thread ends, peers must not wait for ever: they see the end of the
            # channel, and whoever waits for them sees that they are gone.
            self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            for peer in list(self._peers.values()):
                self._drop(peer)

    def _turn(self) -> None:
        rest_s = self._rest_s()
        if rest_s > 0:
            self._resting.poll(1e3 * rest_s)
        for descriptor, _ in self._epoll.poll(self._timeout_s()):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._waker.fileno():
                self._waker.recv(_WAKES)
            else:
                self._receive(descriptor)
        with self._lock:
            now = self._clock()
            self._tick(now)
            self._end_silent(now)
            if self._full_until is not None and now >= self._full_until:
                self._full_until = None
                self._epoll.register(self._listener, select.EPOLLIN)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._on_full(error)
                return
            with contextlib.suppress(OSError):  # a peer that is gone is noticed on reading
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                notice_dead_peer(connection)
            connection.settimeout(_SEND_WITHIN_S)
            with self._lock:
                if len(self._peers) >= self._room:
                    self._end_oldest("there is room for no more of them")
                peer = self._let_in(
                    AuthenticatedConnection(connection), address[0] if address else "this node"
                )
                self._peers[connection.fileno()] = peer
                self._strangers.setdefault(peer.address, {})[connection.fileno()] = peer
                self._epoll.register(peer.connection, select.EPOLLIN)

    @property
    def _room(self) -> int:
        """The most connections: ranks and monitors of the launch always find room."""
        wanted = 2 * (self.world_size or _UNKNOWN_WORLD) + _STRANGERS
        return min(wanted, max(1, self._open_files - _STRANGERS // 4))

    def _on_full(self, error: OSError) -> None:
        """No file can be opened: drop a stranger, or else stop accepting for a moment.

        The socket stays readable meanwhile, so waiting for it would spin.
        """
        with self._lock:
            if self._end_oldest(f"this process can open no more files ({error.strerror})"):
                return
            self._full_until = self._clock() + self._tick_s
            self._epoll.unregister(self._listener)

    # -- strangers -----------------------------------------------------------------------------

    def _end_silent(self, now: float) -> None:
        """Drop peers that did not authenticate in time; checked once in a while."""
        if now < self._look_at:
            return
        self._look_at = now + self._tick_s
        for strangers in list(self._strangers.values()):
            for peer in list(strangers.values()):
                if now - peer.since <= _HELLO_WITHIN_S:
                    break  # the following ones connected later
                self._end_stranger(peer, f"it was silent for {_HELLO_WITHIN_S:.0f} s")

    def _end_oldest(self, why: str) -> bool:
        """Drop the oldest stranger of the address with the most; whether there was one."""
        most = max(self._strangers.values(), key=len, default=None)
        if most is None:
            return False
        self._end_stranger(next(iter(most.values())), why)
        return True

    def _end_stranger(self, peer: PeerT, why: str) -> None:
        if peer.address not in self._named and len(self._named) < _NAMED:
            self._named.add(peer.address)
            with contextlib.suppress(OSError, ValueError):  # a full disk must not end the launch
                sys.stderr.write(
                    f"slurm_forge: a connection from {peer.address} to the control channel was "
                    f"ended: {why}.  It has not proved that it belongs to this run, which goes "
                    "on.\n"
                )
        self._drop(peer)

    def _forget_stranger(self, peer: PeerT, descriptor: int) -> None:
        strangers = self._strangers.get(peer.address)
        if strangers is not None and strangers.pop(descriptor, None) is not None and not strangers:
            del self._strangers[peer.address]

    # -- what is said --------------------------------------------------------------------------

    def _receive(self, descriptor: int) -> None:
        # No other thread closes a connection meanwhile, so its number can't be reused.
        with self._lock:
            peer = self._peers.get(descriptor)
            if peer is None:
                return
            try:
                lines = peer.connection.receive_now()
            except BlockingIOError:
                return  # a newer connection, accepted in this turn; or the kernel has dropped it
            except (OSError, EOFError):
                self._drop(peer)
                return
            except ControlChannelError as error:
                self._end(peer, error.message)
                return
            for line in lines:
                if not self._hear_line(peer, line, descriptor):
                    return

    def _hear_line(self, peer: PeerT, line: bytes, descriptor: int) -> bool:
        """Handle one line; False if its connection was dropped and later lines do not count."""
        if peer.connection.session is None:
            self._answer(peer, line)
        else:
            try:
                message = self._decode(peer, peer.connection.verify(line))
            except ControlChannelError as error:
                self._end(peer, error.message)
                return False
            self._take(peer, message)
            if not peer.is_known and not peer.stranger:
                peer.is_known = True
                self._forget_stranger(peer, descriptor)
        return peer.connection.fileno() >= 0

    def _answer(self, peer: PeerT, line: bytes) -> None:
        """Handle the first line of a connection, which may be from anybody."""
        answer = answer_challenge(line, self._credentials_for(peer, line))
        try:
            peer.connection.socket.sendall(answer.line)
        except OSError:
            self._drop(peer)
            return
        if answer.session is None:
            self._end_stranger(peer, answer.why)
            return
        peer.connection.session, peer.role = answer.session, answer.role

    def _end(self, peer: PeerT, why: str) -> None:
        """Drop a connection that sent what no process of this launch sends."""
        if peer.stranger:
            self._end_stranger(peer, why)
        else:
            self._drop(peer)
