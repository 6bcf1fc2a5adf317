"""Doing something that may never end, or eat the machine, in a process that may not."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

#: A user that owns nothing here.
NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Spent:
    """What it came to (an exception's type, or what was returned); processor seconds, memory."""

    result: Any
    seconds: float
    megabytes: float


def bounded(work: Callable[[], Any], *, seconds: int = 10, gigabytes: int = 8) -> Spent | None:
    """Run in a forked process within limits; None where it had to be ended."""

    def measured() -> Spent:
        address_space = gigabytes << 30
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        before, began = _resident(), time.process_time()
        try:
            result: Any = work()
        except Exception as error:
            result = type(error)
        return Spent(result, time.process_time() - began, _resident() - before)

    return _forked(measured)


def as_nobody(work: Callable[[], Any]) -> Any:
    """Run in a forked process of another user; what it returned, or the type of its exception."""
    return as_user(NOBODY, work)


def as_user(user: int, work: Callable[[], Any], *, groups: Sequence[int] = ()) -> Any:
    """Run in a forked process of that user; what it returned, or the type of its exception."""

    def other() -> Any:
        _become(user, groups)
        try:
            return work()
        except Exception as error:
            return type(error)

    return _forked(other)


@contextlib.contextmanager
def beside_nobody(work: Callable[[Connection], None]) -> Iterator[Connection]:
    """Run in a forked process of another user as long as the block runs, with a pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            signal.alarm(120)
            _become(NOBODY)
            work(theirs)
            signal.pause()
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _become(user: int, groups: Sequence[int] = ()) -> None:
    os.setgroups(groups)
    os.setgid(user)
    os.setuid(user)


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _forked(work: Callable[[], Any]) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            signal.alarm(60)
            with os.fdopen(writing, "wb") as out:
                out.write(pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as found:
        data = found.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else None
