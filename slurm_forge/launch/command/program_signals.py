"""Signals for the job, or by a person: to the start of the program that is on."""

from __future__ import annotations

import threading
import time
from types import FrameType, TracebackType

from slurm_forge.launch.attempt.attempt_signals import LaunchSignals
from slurm_forge.launch.attempt.stop_request import StopRequest
from slurm_forge.launch.conductor.stop_monitor import StopMonitor

_TICK_S = 0.1


class ProgramSignals(LaunchSignals):
    """Hears of Ctrl-C and of a person's other signals, too.  Use as a context."""

    def __init__(self) -> None:
        super().__init__()
        self._request: StopRequest | None = None
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

    def listen_to(self, request: StopRequest) -> None:
        """A person's own signals, where there is no Slurm."""
        self._request = request
        self._thread = threading.Thread(target=self._watch_person, name="forge-asked", daemon=True)
        self._thread.start()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C; a handler of Python's, which runs between any two lines: a thread says it."""

        def tell() -> None:
            with self._lock:
                self._interrupted = True
                stops = self._stops
            self._arrived.set()
            if stops is not None:
                stops.add_request("SIGINT")

        threading.Thread(target=tell, name="forge-interrupt", daemon=True).start()

    @property
    def stopping(self) -> bool:
        """Whether a person wants it to stop."""
        return self._interrupted or bool(self._request)

    def _hand_over(self, stops: StopMonitor) -> None:
        """As for every launch; one that a person has interrupted before stops at once."""
        super()._hand_over(stops)
        if self._interrupted:
            stops.add_request("SIGINT")

    def wait(self, seconds: float) -> None:
        """Not where a person wants it to stop."""
        if not self.stopping:
            super().wait(seconds)

    def _watch_person(self) -> None:
        stopped = insisted = False
        while not self._over.is_set():
            request, stops = self._request, self._stops
            if request and not (stopped and insisted):
                self._arrived.set()
                if stops is not None and not stopped:
                    stopped = True
                    stops.add_request(request.name)
                if stops is not None and stopped and request.insists and not insisted:
                    insisted = True
                    stops.add_request(request.name)
            time.sleep(_TICK_S)
