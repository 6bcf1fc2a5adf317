"""Where login node and job meet: questions answered by files, and a door for the other nodes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from slurm_forge.control.addresses import candidates, format_addresses
from slurm_forge.control.interfaces import interface_addresses
from slurm_forge.errors import ForgeError
from slurm_forge.files import read_json, write_atomic
from slurm_forge.launch.diagnose.live_node import GREETING
from slurm_forge.recovery.live_observations import Meeting

_EVERY_S = 0.05
_QUESTIONS = 4
#: How long an answer is waited for: attributes of files are cached for up to a minute on NFS.
_ANSWER_S = 45.0
_LIMIT = 4096


class Answering:
    """A thread of the job that answers the login node's files with this node's clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="forge-live-answer", daemon=True)

    def __enter__(self) -> Answering:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def _answer(self) -> None:
        number = 1
        while not self._over.is_set():
            # Opening asks the server, where looking at a cached folder would not.
            with contextlib.suppress(OSError):
                os.close(os.open(self._folder / f"ask-{number}", os.O_RDONLY | os.O_NOFOLLOW))
                words = json.dumps({"at": time.time()}).encode()
                write_atomic(self._folder / f"answer-{number}", words, durable=False)
                number += 1
                continue
            self._over.wait(_EVERY_S)


def meet(
    folder: Path,
    goes_on: Callable[[], bool],
    *,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Meeting:
    """Ask the job a few times: clocks, and how long files take to be seen, there and back.

    Gives up on an answer that does not come, and as soon as nothing ``goes_on``.
    """
    meeting = Meeting()
    for number in range(1, _QUESTIONS + 1):
        started_at = wall()
        write_atomic(folder / f"ask-{number}", b"?", durable=False)
        at = None
        while at is None and wall() < started_at + _ANSWER_S and goes_on():
            sleep(_EVERY_S)
            with contextlib.suppress(OSError, ForgeError, KeyError, TypeError, ValueError):
                at = float(read_json(folder / f"answer-{number}", _LIMIT)["at"])
        if at is None:
            break
        took = wall() - started_at
        longest = max(took, meeting.seen_after_s or 0.0)
        meeting = replace(meeting, seen_after_s=longest)
        if meeting.clock_give_s is None or took / 2 < meeting.clock_give_s:
            ahead = at - (started_at + took / 2)
            meeting = replace(meeting, clock_ahead_s=ahead, clock_give_s=took / 2)
    return meeting


class Door:
    """Listens on a port of this node for the other ones, who have to know the nonce."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce.encode()
        self._socket = socket.create_server(("", 0))
        self._thread = threading.Thread(target=self._serve, name="forge-live-door", daemon=True)

    @property
    def addresses(self) -> str:
        """Every way here, as ``host1,host2:port``: names, then the address of each interface."""
        known = [host for host in candidates() if not host.startswith("127.")]
        known += [address for _, address in interface_addresses()]
        hosts = tuple(dict.fromkeys(known)) or ("127.0.0.1",)
        return format_addresses(hosts, self._socket.getsockname()[1])

    def __enter__(self) -> Door:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(3.0)
                    if connection.recv(256).strip() == GREETING.strip() + b" " + self._nonce:
                        connection.sendall(self._nonce)
