"""A signal is only recorded: seen within a millisecond, acted on at a step boundary.

The wakeup descriptor is written by Python's C-level handler whatever the main thread is doing, a
thread reads it, and the Python-level handler does nothing.  No signal is masked: a library's thread
that has it unblocked would kill us, and children that inherit a mask can't be terminated.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType

#: Real preemption sends SIGTERM; the user signal comes only where the administrator asked for it.
SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: Of the real-time signals, far from the ends that libraries take first.  Ours alone: one has the
#: stacks of all threads written down, the other raises the end of the launch in the main thread.
STACK_SIGNAL = signal.SIGRTMIN + 11
UNWIND_SIGNAL = signal.SIGRTMIN + 12


def signal_name(number: int) -> str:
    """``SIGTERM``, and ``signal 36`` for one without a name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _recorded(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor has told the watcher already."""


class SignalWatcher:
    """Calls ``on_signal`` from its own thread for every save signal.  Main thread only."""

    def __init__(self, on_signal: Callable[[signal.Signals], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        self._active = True
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SAVE_SIGNALS:
            signal.signal(number, _recorded)
        os.register_at_fork(after_in_child=self._in_child)
        self._thread = threading.Thread(target=self._watch, name="forge-signals", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._active:
            for number in os.read(self._reader, 64):
                if number == 0:
                    return
                # Every signal with a handler in Python comes by, real-time ones without a name too.
                if number in SAVE_SIGNALS:
                    self._call(signal.Signals(number))

    def _call(self, received: signal.Signals) -> None:
        try:
            self._on_signal(received)
        except Exception:
            # This thread is the only one that hears: the next signal must find it alive.
            sys.stderr.write(traceback.format_exc())

    def _in_child(self) -> None:
        """A forked child is not a rank: its signals are its own, with their default effects."""
        if not self._active:
            return
        self._active = False
        signal.set_wakeup_fd(-1)
        for number in SAVE_SIGNALS:
            if signal.getsignal(number) is _recorded:
                signal.signal(number, signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)

    def close(self) -> None:
        """Stop watching and restore the default effects (for tests; a rank never does)."""
        if not self._active:
            return
        self._active = False
        signal.set_wakeup_fd(-1)
        for number in SAVE_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.write(self._writer, b"\0")
        self._thread.join(timeout=2)
        os.close(self._reader)
        os.close(self._writer)
