"""What the hang watchdog costs: a write of the clock page, the witness beside a rank, and a step.

    python -m benchmarks.watchdog [--seconds 20] [--rounds 30] [--json FILE]

Steps are those of a loop that does nothing but pass its boundaries (the most writes per second that
a program can cause), with and without a page, in turns; the witness is a real one, watched through
``/proc`` while its worker idles.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.tables import Machine, table, write_json
from slurm_forge.control import Hub, Member
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.clock_page import ProgressClock, new_page
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.step_boundary import StepBoundaries
from slurm_forge.training.monitor.client import prepare_monitor
from slurm_forge.training.monitor.procfs import (
    children_of,
    read_process,
)
from slurm_forge.vocabulary.position import Position

_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Costs:
    """Nanoseconds of one write and of all writes of a step, and what the witness takes."""

    write_ns: float
    step_without_ns: float
    step_with_ns: float
    more_per_step_ns: float
    witness_cpu_percent: float
    witness_rss_mib: float
    witness_start_ms: float


def main() -> int:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    costs = measure(asked.seconds, asked.rounds)
    machine = Machine.measured(load, began)
    rows = (
        ("one write of the page", f"{costs.write_ns:.0f} ns"),
        ("a step's boundaries without a page", f"{costs.step_without_ns / 1e3:.2f} us"),
        ("with a page", f"{costs.step_with_ns / 1e3:.2f} us"),
        ("more per step (median of pairs)", f"{costs.more_per_step_ns / 1e3:.2f} us"),
        ("witness: share of one processor", f"{costs.witness_cpu_percent:.2f} %"),
        ("witness: resident memory", f"{costs.witness_rss_mib:.1f} MiB"),
        ("witness: from start to its first word", f"{costs.witness_start_ms:.0f} ms"),
    )
    sys.stdout.write(f"{machine.text()}\n\n{table(('what', 'cost'), rows)}\n")
    write_json(asked.json, {"machine": asdict(machine), "watchdog": asdict(costs)})
    return 0


def measure(seconds: float, rounds: int) -> Costs:
    """All of it; ``seconds`` is how long the witness is watched."""
    with contextlib.ExitStack() as stack:
        hub = Hub(world_size=1)
        hub.start()
        stack.callback(hub.close)
        without, with_page = (_boundaries(stack, hub, page) for page in (False, True))
        pairs = [(_steps(without), _steps(with_page)) for _ in range(rounds)]
        cpu, rss, started = _witness(stack, hub, seconds)
    return Costs(
        write_ns=_per_call(ProgressClock(new_page()).advance, Position(3, 1)),
        step_without_ns=statistics.median(a for a, _ in pairs),
        step_with_ns=statistics.median(b for _, b in pairs),
        more_per_step_ns=statistics.median(b - a for a, b in pairs),
        witness_cpu_percent=cpu,
        witness_rss_mib=rss,
        witness_start_ms=started,
    )


def _boundaries(stack: contextlib.ExitStack, hub: Hub, page: bool) -> tuple[StepBoundaries, Member]:
    own = Hub(world_size=1)
    own.start()
    stack.callback(own.close)
    hosts, port = parse_addresses(own.addresses)
    member = Member(
        rank=0,
        world_size=1,
        credentials=own.credentials,
        hosts=hosts,
        port=port,
        host="here",
        pid=os.getpid(),
        on_abort=lambda _: None,
        progress=ProgressClock(new_page()) if page else None,
    )
    stack.callback(member.close)
    return StepBoundaries(member, lambda _: None), member


def _steps(what: tuple[StepBoundaries, Member]) -> float:
    """Nanoseconds per step of passing everything that a step of ``run.batches`` passes."""
    boundaries, member = what
    first = boundaries._step + 1
    begun = time.perf_counter_ns()
    for step in range(first, first + _STEPS):
        boundaries.boundary(step)
        boundaries.begin_data_wait()
        boundaries.end_data_wait()
        member.begin(step + 1)
    return (time.perf_counter_ns() - begun) / _STEPS


def _per_call(call: Callable[[Position], None], position: Position) -> float:
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter_ns()
        for _ in range(2000):
            call(position)
        best = min(best, (time.perf_counter_ns() - begun) / 2000)
    return best


def _witness(stack: contextlib.ExitStack, hub: Hub, seconds: float) -> tuple[float, float, float]:
    """Share of a processor, resident MiB, milliseconds until its first word."""
    witnessed = prepare_monitor()
    if witnessed is None:
        raise SystemExit("this system has no memory that can be shared so (memfd)")
    folder = stack.enter_context(TemporaryDirectory())
    before = set(children_of(os.getpid()))
    begun = time.monotonic()
    witnessed.start(
        RunDirectory.at(folder),
        rank=0,
        world_size=1,
        host="here",
        channel=hub.addresses,
        credentials=hub.credentials,
        attempt=1,
        launch=1,
        alone_after=None,
    )
    stack.callback(witnessed.end)
    while not any(view.pulse is not None for view in hub.monitors().values()):
        time.sleep(0.001)
    started = (time.monotonic() - begun) * 1e3
    (pid,) = set(children_of(os.getpid())) - before
    used, at = read_process(pid).cpu_s, time.monotonic()
    time.sleep(seconds)
    share = (read_process(pid).cpu_s - used) / (time.monotonic() - at)
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return 100 * share, rss / 1024, started


if __name__ == "__main__":
    sys.exit(main())
