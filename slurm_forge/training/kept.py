"""What a worker's process keeps while it may be the rank of several launches, and its channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from signal import Signals
from typing import Any

from slurm_forge.control import Member
from slurm_forge.control import protocol as p
from slurm_forge.signals import SignalWatcher

__all__ = ["Channel", "Kept", "Notices"]


class Channel(Member):
    """Knows whether something could not be said any more."""

    mute = False

    def _send(self, message: p.Message) -> None:
        try:
            super()._send(message)
        except OSError:
            self.mute = True
            raise


class Notices:
    """Signals seen while there is no channel are said as soon as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: list[Signals] = []
        self._member: Member | None = None

    def seen(self, signal: Signals) -> None:
        """The process got a signal; on the watcher's thread."""
        with self._lock:
            if self._member is None:
                self._early.append(signal)
            else:
                self._member.send(p.Notice(what=signal.name))

    def say_through(self, member: Member | None) -> None:
        """Say what was seen, and what will be, over that channel; keep it where there is none."""
        with self._lock:
            self._member = member
            if member is None:
                return
            early, self._early = self._early, []
        for signal in early:
            self.seen(signal)


class Kept:
    """What a process has once, however many launches it is a rank of.  Main thread."""

    def __init__(self) -> None:
        self.notices = Notices()
        self.watcher = SignalWatcher(self.notices.seen)
        #: The program, once it is imported: what it keeps in its modules is kept.
        self.entry: Callable[..., Any] | None = None
