"""Signals for the batch step, the steps, or by a person: to the start of the program that is on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from signal import Signals
from types import FrameType, TracebackType

from slurm_forge.launch.attempt.attempt_signals import AskedToStop
from slurm_forge.launch.command.conductor import ProgramConductor

__all__ = ["ProgramSignals"]

_TICK_S = 0.1
_ENDING = frozenset({"SIGTERM", "SIGINT"})


class ProgramSignals:
    """What comes between two starts is for the next one.  Use as a context."""

    def __init__(self) -> None:
        self._conductor: ProgramConductor | None = None
        self._early: list[tuple[str, bool]] = []
        self._lock = threading.Lock()
        self._seen = threading.Event()
        self._terminated = threading.Event()
        self._asked: AskedToStop | None = None
        self._interrupted = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgramSignals:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def batch(self, signal: Signals) -> None:
        """The batch step got one."""
        if signal.name in _ENDING:
            self._terminated.set()
        self._say(signal.name, of_batch=True)

    def steps(self, name: str) -> None:
        """Every step got one, as the sentinel says."""
        self._say(name, of_batch=False)

    def listen_to(self, asked: AskedToStop) -> None:
        """A person's own signals, where there is no Slurm."""
        self._asked = asked
        self._thread = threading.Thread(target=self._look, name="forge-asked", daemon=True)
        self._thread.start()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C; a handler of Python's, which runs between any two lines: a thread says it."""

        def tell() -> None:
            self._seen.set()
            with self._lock:
                self._interrupted = True
                conductor = self._conductor
            if conductor is not None:
                conductor.stop("SIGINT")

        threading.Thread(target=tell, name="forge-interrupt", daemon=True).start()

    @property
    def stopping(self) -> bool:
        """Whether a person wants it to stop."""
        return self._interrupted or bool(self._asked)

    @contextlib.contextmanager
    def go_to(self, conductor: ProgramConductor) -> Iterator[None]:
        """While entered, signals go to this one; first those that came before it."""
        with self._lock:
            self._conductor = conductor
            early, self._early = self._early, []
            interrupted = self._interrupted
        if interrupted:
            conductor.stop("SIGINT")
        for name, of_batch in early:
            conductor.signal(name) if of_batch else conductor.hear(name)
        try:
            yield
        finally:
            with self._lock:
                self._conductor = None
                self._early += [(name, True) for name in conductor.unheard()]

    def batch_signals_since(self) -> tuple[str, ...]:
        """Those for the batch step since the last start ended."""
        with self._lock:
            return tuple(name for name, of_batch in self._early if of_batch)

    @property
    def terminated(self) -> bool:
        """Whether one has told the batch step to end, of whichever start."""
        return self._terminated.is_set()

    def wait(self, seconds: float) -> None:
        """Between two starts; a signal ends the wait, for the next start to act on."""
        if seconds > 0 and not self._early and not self.stopping:
            self._seen.clear()
            self._seen.wait(seconds)

    def wait_for_the_end(self, seconds: float) -> None:
        """Slurm is about to end the job: until it says so, or ``seconds`` are over."""
        self._terminated.wait(seconds)

    def _say(self, name: str, *, of_batch: bool) -> None:
        self._seen.set()
        with self._lock:
            conductor = self._conductor
            if conductor is None:
                self._early.append((name, of_batch))
            else:
                conductor.signal(name) if of_batch else conductor.hear(name)

    def _look(self) -> None:
        told = insisted = False
        while not self._over.is_set():
            asked = self._asked
            if asked is not None and asked and not (told and insisted):
                self._seen.set()
                conductor = self._conductor
                if conductor is not None and not told:
                    told = True
                    conductor.stop(asked.name)
                if conductor is not None and told and asked.insists and not insisted:
                    insisted = True
                    conductor.stop(asked.name)
            time.sleep(_TICK_S)
