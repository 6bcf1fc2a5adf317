"""Between clients and server: has what changes names done twice, and hands on the second answer.

So a client sees what it sees after a lost answer, when the server has forgotten that it answered
(it was restarted, or is busy): its retransmission is done as if it were new.  With sessions (NFS
4.1 and later) the server keeps its answers, so only 3 and 4.0 go through here.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

PORT = 20490
#: Of NFS 3 (RFC 1813): CREATE is left out, which carries a verifier when it is exclusive.
_REPEATED_3 = frozenset({9, 10, 12, 13, 14, 15})
#: Of NFS 4 (RFC 7530): CREATE (of a folder), LINK, REMOVE, RENAME.
_REPEATED_4 = frozenset({6, 11, 28, 29})
_PUTFH, _SAVEFH, _COMPOUND = 22, 32, 1
_OTHER_XID = 0x5A5A0000


class Repeater:
    """Listens on ``PORT``; ``repeated`` counts what was done twice."""

    def __init__(self, host: str, server_port: int = 2049) -> None:
        self._target = (host, server_port)
        self._listener = socket.create_server((host, PORT))
        self.repeated = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            dropped: set[bytes] = set()
            for act in (self._requests, self._answers):
                threading.Thread(target=act, args=(client, server, dropped), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, dropped: set[bytes]) -> None:
        with suppress(OSError), server, client:
            while record := _record(client):
                if _changes_names(record):
                    self.repeated += 1
                    other = struct.pack(">I", _OTHER_XID + self.repeated % 0xFFFF)
                    dropped.add(other)
                    _send(server, other + record[4:])
                    while other in dropped:  # the first one is over before the second one begins
                        threading.Event().wait(0.002)
                _send(server, record)

    def _answers(self, client: socket.socket, server: socket.socket, dropped: set[bytes]) -> None:
        with suppress(OSError), server, client:
            while record := _record(server):
                if record[:4] in dropped:
                    dropped.discard(record[:4])
                else:
                    _send(client, record)
        dropped.clear()


def _record(stream: socket.socket) -> bytes:
    """One message of RPC over TCP (RFC 5531, record marking); empty at the end."""
    record = b""
    while True:
        head = stream.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return b""
        (mark,) = struct.unpack(">I", head)
        record += stream.recv(mark & 0x7FFFFFFF, socket.MSG_WAITALL)
        if mark & 0x80000000:
            return record


def _send(stream: socket.socket, record: bytes) -> None:
    stream.sendall(struct.pack(">I", 0x80000000 | len(record)) + record)


def _changes_names(record: bytes) -> bool:
    kind, _, program, version, procedure, _, length = struct.unpack_from(">7I", record, 4)
    if kind != 0 or program != 100003:
        return False
    if version == 3:
        return procedure in _REPEATED_3
    if version != 4 or procedure != _COMPOUND:
        return False
    at = 32 + _padded(length)  # behind the credentials
    at += 8 + _padded(struct.unpack_from(">I", record, at + 4)[0])  # behind the verifier
    at += 4 + _padded(struct.unpack_from(">I", record, at)[0])  # behind the tag
    minor, count = struct.unpack_from(">2I", record, at)
    at += 8
    for _ in range(count if minor == 0 else 0):
        (operation,) = struct.unpack_from(">I", record, at)
        at += 4
        if operation in _REPEATED_4:
            return True
        if operation == _PUTFH:
            at += 4 + _padded(struct.unpack_from(">I", record, at)[0])
        elif operation != _SAVEFH:
            return False
    return False


def _padded(length: int) -> int:
    return (length + 3) & ~3
