"""Several incarnations of a run in one process, of which one at a time goes on, call by call.

Each incarnation has threads of its own.  Whenever one of them is about to list, create, rename or
remove something it stops, and goes on when the schedule says so.  Nothing is slept for, so the same
schedule gives the same interleaving.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_CALLS = ("listdir", "mkdir", "open", "link", "rename", "unlink", "rmdir")
#: Nothing here takes that long; a test that waits for ever tells nothing.
_STUCK_S = 30.0


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that an actor did, in the one order in which everything happened."""

    actor: str
    what: str
    detail: str = ""


@dataclass
class Actor:
    """One incarnation: its program, and where it stopped."""

    name: str
    program: Callable[[Actor], None]
    done: bool = False
    error: BaseException | None = None
    steps: int = 0
    _paused: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _thread: threading.Thread | None = None


class Clockwork:
    """Runs actors step by step; ``happenings`` is what they did."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []
        self._here = threading.local()

    def start(self, actor: Actor) -> Actor:
        """Get it to where its first step begins."""

        def run() -> None:
            self._here.actor = actor
            try:
                self.pause()
                actor.program(actor)
            except BaseException as error:
                actor.error = error
            actor.done = True
            actor._paused.release()

        actor._thread = threading.Thread(target=run, daemon=True)
        actor._thread.start()
        assert actor._paused.acquire(timeout=_STUCK_S)
        return actor

    def step(self, actor: Actor) -> None:
        """Let it go on to its next stop, or to its end."""
        actor.steps += 1
        actor._go.release()
        assert actor._paused.acquire(timeout=_STUCK_S), f"{actor.name} is stuck"

    def finish(self, actor: Actor) -> None:
        """Let it go on to its end."""
        while not actor.done:
            self.step(actor)

    def pause(self) -> None:
        """Stop here until the schedule lets this thread's actor go on."""
        actor: Actor | None = getattr(self._here, "actor", None)
        if actor is not None:
            actor._paused.release()
            assert actor._go.acquire(timeout=_STUCK_S)

    def note(self, what: str, detail: object = "") -> None:
        """Write down that the current actor has done something."""
        actor: Actor | None = getattr(self._here, "actor", None)
        if actor is not None:
            self.happenings.append(Happening(actor.name, what, str(detail)))

    @contextmanager
    def active(self) -> Iterator[Clockwork]:
        """Inside, file-system calls of actors stop and are noted; threads belong to who starts."""
        real_start = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            actor = getattr(self._here, "actor", None)
            run = thread.run

            def owned() -> None:
                self._here.actor = actor
                run()

            if actor is not None:
                thread.run = owned  # type: ignore[method-assign]
            real_start(thread)

        with mock.patch.object(threading.Thread, "start", start):
            with mock.patch.multiple(os, **{name: self._stopping(name) for name in _CALLS}):
                yield self

    def _stopping(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            self.pause()
            result = real(*args, **options)
            names = args[:2] if name in ("rename", "link") else args[:1]
            self.note(name, " -> ".join(Path(path).name for path in names))
            return result

        return call
