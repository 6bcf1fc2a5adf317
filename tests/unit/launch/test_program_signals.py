"""Who hears of a signal that comes between two starts of a program."""

from __future__ import annotations

import time
from typing import Any

from slurm_forge.launch.command.program_signals import ProgramSignals


class Stops:
    def __init__(self) -> None:
        self.stopped: list[str] = []

    def add_request(self, why: str) -> None:
        self.stopped.append(why)

    def unhandled_signals(self) -> tuple[str, ...]:
        return ()


def test_ctrl_c_between_two_starts_stops_the_next() -> None:
    stops: Any = Stops()
    with ProgramSignals() as signals:
        signals.interrupt(2, None)
        deadline = time.monotonic() + 10
        while not signals.stopping:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        signals.wait(60)  # nobody is waited for any more
        with signals.go_to(stops):
            assert stops.stopped == ["SIGINT"]
        assert stops.stopped == ["SIGINT"], "said once: a second time would end it at once"
