"""What it costs to know who is slow: per step, per message, per trial, and where it is judged.

    python -m benchmarks.pace [--rounds 40] [--ranks 1000] [--json FILE]

A step is measured with and without in turns, thousands of empty steps each: what is left is what
every real step pays, whatever it computes.  The judge is given windows of ``--ranks`` ranks.  All
by the processor time of the thread, so that a machine which is busy otherwise says the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.tables import Machine, table, write_json
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.protocol import decode, encode
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.control.roster import MemberView
from slurm_forge.launch.conductor.straggler_monitor import StragglerMonitor
from slurm_forge.training.faults.injector import FaultInjector
from slurm_forge.training.monitor.node_benchmark import HostBenchmark
from slurm_forge.training.monitor.step_timer import StepTimer

_STEPS = 5000
_EVERY_S = 15.0
_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of a rank's main thread, and of the conductor's."""

    step_without_us: float
    step_with_us: float
    more_per_step_us: float
    message_us: float
    trial_us: float
    trial_least_us: float
    heard_us: float
    window_ms: float
    ranks: int

    @property
    def rank_share(self) -> float:
        """Of a rank's time, steps left out: messages and trials at shipped settings."""
        return (self.message_us / _EVERY_S + self.trial_us / _PROBE_S) / 1e6

    @property
    def hub_share(self) -> float:
        """Of one processor where the conductor runs."""
        return (self.ranks * self.heard_us / 1e6 + self.window_ms / 1e3) / _EVERY_S


def main() -> int:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    load, began = os.getloadavg()[0], time.time()
    costs = measure(asked.rounds, asked.ranks)
    told = Machine.measured(load, began)
    rows = (
        ("an empty step without", f"{costs.step_without_us:.2f} us"),
        ("with its own part measured", f"{costs.step_with_us:.2f} us"),
        ("more per step (median of pairs)", f"{costs.more_per_step_us:.2f} us"),
        ("a message (median of a window)", f"{costs.message_us:.0f} us"),
        ("a trial, all of it", f"{costs.trial_us:.0f} us"),
        ("the fastest try of it", f"{costs.trial_least_us:.0f} us"),
        ("a rank: messages and trials", f"{100 * costs.rank_share:.4f} % of its time"),
        ("the hub: a message", f"{costs.heard_us:.0f} us"),
        (f"the judge: a window of {costs.ranks} ranks", f"{costs.window_ms:.1f} ms"),
        (f"both, for {costs.ranks} ranks", f"{100 * costs.hub_share:.2f} % of a processor"),
    )
    sys.stdout.write(f"{told.text()}\n\n{table(('what', 'cost'), rows)}\n")
    write_json(asked.json, {"machine": asdict(told), "pace": asdict(costs)})
    return 0


def measure(rounds: int, ranks: int) -> Costs:
    """All of it."""
    with TemporaryDirectory() as folder:
        quiet = FaultInjector((), rank=0, world_size=2, attempt=1, launch=1, directory=Path(folder))
        said: list[Message] = []
        seldom = _pacing(said, quiet, timedelta(hours=1))
        pairs = [(_steps(_idle, _idle, _end), _measured(seldom)) for _ in range(rounds)]
        often = _pacing(said, quiet, timedelta(0))
        message = _message(often, rounds)
        trial, least = _trial(rounds)
    heard, window = _hub(ranks)
    return Costs(
        step_without_us=statistics.median(a for a, _ in pairs),
        step_with_us=statistics.median(b for _, b in pairs),
        more_per_step_us=statistics.median(b - a for a, b in pairs),
        message_us=message,
        trial_us=trial,
        trial_least_us=least,
        heard_us=heard,
        window_ms=window,
        ranks=ranks,
    )


def _pacing(said: list[Message], fault_injector: FaultInjector, every: timedelta) -> StepTimer:
    def send(message: Message) -> None:
        said[:] = [message]
        encode(message)

    return StepTimer(
        send,
        device=torch.device("cpu"),
        every=every,
        fault_injector=fault_injector,
        models=lambda: (),
    )


def _idle() -> None:
    """What a step calls where nobody measures."""


def _end(step: int) -> None:
    """The same at its end."""


def _measured(pacing: StepTimer) -> float:
    return _steps(pacing.begin, pacing.handing_over, pacing.end)


def _steps(
    begin: Callable[[], None], hand_over: Callable[[], None], end: Callable[[int], None]
) -> float:
    """Microseconds per step."""
    began = time.thread_time_ns()
    for step in range(_STEPS):
        begin()
        hand_over()
        end(step)
    return (time.thread_time_ns() - began) / _STEPS / 1e3


def _message(pacing: StepTimer, rounds: int) -> float:
    """Of a step that tells, after a window of 256 steps; in microseconds."""
    took = []
    for _ in range(rounds):
        pacing._next = float("inf")
        for step in range(256):
            pacing.begin()
            pacing.handing_over()
            pacing.end(step)
        pacing._next = 0.0
        pacing.begin()
        pacing.handing_over()
        began = time.thread_time_ns()
        pacing.end(257)
        took.append((time.thread_time_ns() - began) / 1e3)
    return statistics.median(took)


def _trial(rounds: int) -> tuple[float, float]:
    """Microseconds of all tries, and of the fastest."""
    trial = HostBenchmark()
    took, least = [], []
    for _ in range(rounds + 1):
        began = time.thread_time_ns()
        trial.run(lambda _: None)
        took.append((time.thread_time_ns() - began) / 1e3)
        least.append(trial.take() * 1e6)
    return statistics.median(took[1:]), statistics.median(least[1:])


def _hub(ranks: int) -> tuple[float, float]:
    """Microseconds of a message from its line to the window, milliseconds of a window."""
    members = {
        rank: MemberView(
            rank=rank, host=f"n{rank // 8:04d}", pid=1, last_message_at=0.0, started=True
        )
        for rank in range(ranks)
    }
    monitor = StragglerMonitor(
        lambda: members,
        factor=1.25,
        every=timedelta(seconds=15),
        clock=time.monotonic,
    )
    heard, windows = [], []
    for window in range(12):
        lines = [encode(_said(rank, window)) for rank in members]
        began = time.thread_time_ns()
        for rank, line in enumerate(lines):
            message = decode(line)
            if isinstance(message, StepTiming):
                monitor.add((rank,), message)
        heard.append((time.thread_time_ns() - began) / 1e3 / ranks)
        began = time.thread_time_ns()
        monitor.poll(time.monotonic())
        windows.append((time.thread_time_ns() - began) / 1e6)
    return statistics.median(heard), statistics.median(windows[4:])


def _said(rank: int, window: int) -> StepTiming:
    slow = 1.6 if rank // 8 == 5 and window > 3 else 1.0
    return StepTiming(
        step=50 * (window + 1),
        count=50,
        own_s=(slow * (0.1 + 1e-5 * (rank % 7)),),
        spread_s=(0.001,),
        trial_s=(slow * 2e-4 if window % 4 == 0 else 0.0,),
    )


if __name__ == "__main__":
    sys.exit(main())
