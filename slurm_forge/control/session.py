"""A connection whose lines are signed: each end verifies that every line is the next one meant.

The keys are derived in the handshake (``control.handshake``).
"""

from __future__ import annotations

import os
import socket
from hashlib import sha256
from hmac import compare_digest

from slurm_forge.errors import ControlChannelError

#: Last words carry a traceback; nothing of ours is longer.
LINE_LIMIT = 1 << 16
#: What a relay adds to a line that it forwards.
_ENVELOPE = 64
#: Length of the code before a line, in hexadecimal digits.
_MAC = 32
_READ = 1 << 16


class Session:
    """Signs the lines that one end of a connection sends, and verifies those that it receives."""

    __slots__ = ("_receive_key", "_received", "_send_key", "_sent")

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = _padded(send_key), _padded(receive_key)
        self._sent = self._received = 0

    def sign(self, line: bytes) -> bytes:
        """Sign a line, with or without its newline; lines must be sent once, and in this order."""
        line = line.removesuffix(b"\n")
        self._sent += 1
        return b"%b%b\n" % (_mac(self._send_key, self._sent, line), line)

    def verify(self, line: bytes) -> bytes:
        """Verify a line and strip its code.

        Args:
            line: As received, without its newline.

        Raises:
            ControlChannelError: It is not the next line that the other end signed.
        """
        self._received += 1
        code, line = line[:_MAC], line[_MAC:]
        if not compare_digest(code, _mac(self._receive_key, self._received, line)):
            raise ControlChannelError(
                "a line on the control channel was not sent by the other end, or was changed or "
                "repeated on its way",
                next_step="Ask who runs the network between the nodes; the launch is ended.",
            )
        return line


def _padded(key: bytes) -> tuple[bytes, bytes]:
    """A key padded for HMAC's inner and outer hash (RFC 2104), computed once for all lines."""
    block = key.ljust(sha256().block_size, b"\0")
    return bytes(each ^ 0x36 for each in block), bytes(each ^ 0x5C for each in block)


def _mac(key: tuple[bytes, bytes], number: int, line: bytes) -> bytes:
    """A prefix of HMAC-SHA256; ``hmac.digest`` takes half as much time again."""
    inner, outer = key
    hashed = sha256(b"%b%d %b" % (inner, number, line)).digest()
    return sha256(outer + hashed).hexdigest()[:_MAC].encode()


class AuthenticatedConnection:
    """A connection whose lines are signed once it has a session.  Receives on one thread."""

    __slots__ = ("_buffer", "longest", "session", "socket")

    def __init__(self, connection: socket.socket, session: Session | None = None) -> None:
        self.socket = connection
        self.session = session
        #: A longer line ends the connection.
        self.longest = LINE_LIMIT + _ENVELOPE
        self._buffer = b""

    def fileno(self) -> int:
        """For a selector; -1 once closed."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the connection.  May be called twice."""
        self.socket.close()

    def send(self, line: bytes) -> None:
        """Send a line of the session; ``OSError`` if the other end is gone."""
        assert self.session is not None  # noqa: S101  nothing is said to strangers
        self.socket.sendall(self.session.sign(line))

    def receive(self) -> list[bytes]:
        """The received lines, not verified yet; blocks as the socket does.

        Raises:
            EOFError: The other end closed the connection.
            ControlChannelError: A line is too long.
        """
        return self._lines(self.socket.recv(_READ))

    def receive_now(self) -> list[bytes]:
        """The same without blocking, on a socket with a timeout, in a single system call.

        Raises:
            BlockingIOError: There is nothing to read.
            EOFError: The other end closed the connection.
            ControlChannelError: A line is too long.
        """
        return self._lines(os.read(self.socket.fileno(), _READ))

    def _lines(self, data: bytes) -> list[bytes]:
        if not data:
            raise EOFError
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > self.longest + _MAC:
            raise ControlChannelError(
                f"a line on the control channel has more than {self.longest} bytes",
                next_step="Are all ranks running the same version of slurm_forge?",
            )
        return lines

    def verify(self, line: bytes) -> bytes:
        """Verify a line of ``receive`` and strip its code; ``ControlChannelError`` on mismatch."""
        assert self.session is not None  # noqa: S101  the first line of a stranger is its challenge
        return self.session.verify(line)
