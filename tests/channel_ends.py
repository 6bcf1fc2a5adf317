"""The hub's end of one connection, for tests in which the hub is made up."""

from __future__ import annotations

import socket

from slurm_forge.control.handshake import (
    AuthenticatedConnection,
    Credentials,
    accept,
    welcome,
)

CREDENTIALS = Credentials("n" * 32, "s" * 64)
_WITHIN_S = 20.0


def welcomed(
    server: socket.socket, credentials: Credentials = CREDENTIALS
) -> AuthenticatedConnection:
    """The next one that connects and knows the secret, as the hub sees it."""
    connection, _ = server.accept()
    connection.settimeout(_WITHIN_S)
    made, _ = accept(connection, credentials)
    welcome(made)
    return made
