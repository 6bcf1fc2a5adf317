"""The loop of an agent, which waits for descriptors and signals together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable
from types import FrameType

from slurm_forge.signals import SAVE_SIGNALS


def _recorded(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor has woken the loop already."""


class AgentLoop:
    """Waits for descriptors and signals at once; has no thread and is not thread-safe.

    Create it in the main thread: from then on the signals of ``SAVE_SIGNALS`` and SIGCHLD are only
    recorded, for ``on_signal``.
    """

    def __init__(self, on_signal: Callable[[signal.Signals], None]) -> None:
        self._on_signal = on_signal
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*SAVE_SIGNALS, signal.SIGCHLD):
            signal.signal(number, _recorded)
        self.add_reader(self._reader, self._signalled)

    def add_reader(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever the descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, ready)

    def forget(self, descriptor: int) -> None:
        """Stop watching the descriptor, if it is watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def run_once(self, timeout_s: float) -> None:
        """Wait until something is readable, and call its reader."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def leave_in_child(self) -> None:
        """Detach a forked child from the loop.

        Save signals stay without effect until the worker handles them: the agent gets them, too.
        """
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def _signalled(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._reader, 64):
                if number in SAVE_SIGNALS:
                    self._on_signal(signal.Signals(number))
