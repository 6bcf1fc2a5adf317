"""Where a worker waits that has unwound, until its agent has another launch for it."""

from __future__ import annotations

import contextlib
import socket

from slurm_forge.control import agents as a
from slurm_forge.control import protocol as p
from slurm_forge.errors import ControlChannelError

__all__ = ["PARKED", "ParkedWorker", "ParkingPlace"]

#: What a worker says to its agent once it has unwound; the agent answers with a ``Begin``.
PARKED = b"parked\n"


class ParkingPlace:
    """The worker's end of a pair of sockets with its agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self) -> a.Begin | None:
        """Say that nothing of the launch is left, and wait; None where there is nothing to come."""
        buffer = b""
        try:
            self._connection.sendall(PARKED)
            while not buffer.endswith(b"\n"):
                data = self._connection.recv(1 << 16)
                if not data:
                    return None
                buffer += data
            order = a.decode_agents(buffer)
        except (OSError, ControlChannelError):
            return None
        return order if isinstance(order, a.Begin) else None


class ParkedWorker:
    """The agent's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        #: Whether the worker waits for an order.
        self.waits = False

    def fileno(self) -> int:
        """For a selector; -1 once closed."""
        return self._connection.fileno()

    def heard(self) -> bool:
        """Read; False when the worker's end is closed."""
        try:
            data = self._connection.recv(64)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.waits = self.waits or PARKED in data
        return bool(data)

    def go_on(self, order: p.Message) -> bool:
        """Hand it the next launch; whether that could be done."""
        self.waits = False
        with contextlib.suppress(OSError):
            self._connection.sendall(p.encode(order))
            return True
        return False

    def close(self) -> None:
        """The worker is gone, or this is the child."""
        self._connection.close()
