"""Processes of their own that need not import everything anew.

A parent without anything of pytest in it imports the modules once.  Whoever is wanted is forked
from it, with streams, folder, environment and session of its own, as if it had been started by
name: a signal, a kill and an exit are those of a real process.  What a start itself does (an
interpreter that begins, a module that is run by name) is tested with what is really started.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_LONGEST = 1 << 20


@dataclass
class Process:
    """The part of ``subprocess.Popen`` that tests need; ``pid`` is a child of the warm parent."""

    pid: int
    stdin: IO[Any] | None
    stdout: IO[Any]
    stderr: IO[Any]
    ended: IO[bytes]
    returncode: int | None = None

    def wait(self, timeout: float = 60) -> int:
        """Its exit status, below 0 for a signal."""
        if self.returncode is None:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self.ended, selectors.EVENT_READ)
                if not waiting.select(timeout):
                    raise subprocess.TimeoutExpired([str(self.pid)], timeout)
            self.returncode = int(self.ended.readline())
            self.ended.close()
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[Any, Any]:
        """All that it says until it has closed its streams and has ended."""
        said: dict[str, Any] = {}

        def read(name: str, stream: IO[Any]) -> None:
            said[name] = stream.read()

        readers = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.stdout), ("err", self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired([str(self.pid)], timeout)
        self.wait(timeout)
        self.stdout.close()
        self.stderr.close()
        return said["out"], said["err"]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmParent:
    """Has imported ``modules``; ends with the block."""

    def __init__(self, *modules: str) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._parent = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def start(
        self,
        program: str,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        text: bool = False,
        new_session: bool = False,
        stdin: bool = False,
    ) -> Process:
        """``program`` is the path of a script, or a module with ``main()``."""
        given, told = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), None)
        (out, out_end), (err, err_end), (end, end_end) = (os.pipe() for _ in range(3))
        asked = {
            "program": program,
            "words": list(words),
            "cwd": str(cwd),
            "env": dict(env),
            "new_session": new_session,
        }
        theirs = [given, out_end, err_end, end_end]
        socket.send_fds(self._mine, [json.dumps(asked).encode()], theirs)
        for fd in theirs:
            os.close(fd)
        ended = os.fdopen(end, "rb", buffering=0)
        mode, buffering = ("r", -1) if text else ("rb", 0)
        return Process(
            pid=int(ended.readline()),
            stdin=None if told is None else os.fdopen(told, "wb", buffering=0),
            stdout=os.fdopen(out, mode, buffering=buffering),
            stderr=os.fdopen(err, mode, buffering=buffering),
            ended=ended,
        )

    def __enter__(self) -> WarmParent:
        return self

    def __exit__(self, *error: object) -> None:
        self._mine.close()
        self._parent.wait(60)


def _serve(asking: socket.socket, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    children: dict[int, tuple[int, int]] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(asking, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is asking:
                request, fds, _, _ = socket.recv_fds(asking, _LONGEST, 4)
                if not request:
                    return
                pid = os.fork()
                if pid == 0:
                    for fd in (*children, *(each for _, each in children.values())):
                        os.close(fd)
                    waiting.close()
                    asking.close()
                    _become(json.loads(request), fds)
                os.write(fds[3], b"%d\n" % pid)
                for fd in fds[:3]:
                    os.close(fd)
                watched = os.pidfd_open(pid)
                children[watched] = (pid, fds[3])
                waiting.register(watched, selectors.EVENT_READ)
            else:
                waiting.unregister(key.fileobj)
                pid, told = children.pop(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(key.fd)
                with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                    os.write(told, b"%d\n" % status)
                os.close(told)


def _become(asked: dict[str, Any], fds: Sequence[int]) -> None:
    """Never returns: it ends as an interpreter does, with all that is to be done at its exit."""
    if asked["new_session"]:
        os.setsid()
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")
    )
    sys.argv = [asked["program"], *asked["words"]]
    if asked["program"].endswith(".py"):
        runpy.run_path(asked["program"], run_name="__main__")
    else:
        importlib.import_module(asked["program"]).main()
    sys.exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
