"""A hub, and the hub's end of one connection, for tests in which the hub is made up."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from slurm_forge.control import Hub
from slurm_forge.control.handshake import Credentials, accept, welcome
from slurm_forge.control.session import AuthenticatedConnection

CREDENTIALS = Credentials("n" * 32, "s" * 64)
_WITHIN_S = 20.0


@contextlib.contextmanager
def hub_of(world: int) -> Iterator[Hub]:
    """A hub that is closed at the end."""
    hub = Hub(world_size=world)
    hub.start()
    try:
        yield hub
    finally:
        hub.close()


def welcomed(
    server: socket.socket, credentials: Credentials = CREDENTIALS
) -> AuthenticatedConnection:
    """The next one that connects and knows the secret, as the hub sees it."""
    connection, _ = server.accept()
    connection.settimeout(_WITHIN_S)
    made, _ = accept(connection, credentials)
    welcome(made)
    return made
