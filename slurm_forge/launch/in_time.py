"""Waiting for what may never come, for a bounded time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Gathered", "gather", "in_time"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gathered(Generic[_T]):
    """What came in time; ``complete`` where all of it did, ``error`` what ended it otherwise."""

    items: tuple[_T, ...]
    complete: bool
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def gather(make: Callable[[], Iterator[_T]], seconds: float) -> Gathered[_T]:
    """What an iterator gives within that time: a hung file system holds up nobody."""
    answers: queue.SimpleQueue[tuple[_T] | _End] = queue.SimpleQueue()
    enough = threading.Event()

    def work() -> None:
        try:
            for item in make():
                answers.put((item,))
                if enough.is_set():
                    return
        except BaseException as error:
            answers.put(_End(error))
        else:
            answers.put(_End(None))

    end = time.monotonic() + seconds
    threading.Thread(target=work, name="node-ledger", daemon=True).start()
    items: list[_T] = []
    while True:
        try:
            answer = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            enough.set()
            return Gathered(tuple(items), complete=False)
        if isinstance(answer, _End):
            return Gathered(tuple(items), complete=answer.error is None, error=answer.error)
        items += answer


def in_time(work: Callable[[], _T], seconds: float) -> _T:
    """The answer, or what it raised; ``TimeoutError`` (an ``OSError``) where none came."""
    found = gather(lambda: iter((work(),)), seconds)
    if found.items:
        return found.items[0]
    raise found.error or TimeoutError("no answer in time")
