"""What ``run.advance`` costs in a loop that is the program's own.

    python -m benchmarks.custom_loop [--steps 20000] [--rounds 9] [--json FILE]

A whole run in this process, with its channel, conductor, journal and monitor, whose loop computes
nothing: each way of calling ``advance`` in turn, in rounds.  What the same loop takes without the
call is subtracted within the round.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import slurm_forge as forge
from benchmarks.tables import Machine, cell, plain, spread, table, write_json

#: Microseconds that a step may cost.
_GOAL_US = 10.0

Call = Callable[[forge.Run], None]


def _numbers(run: forge.Run) -> None:
    run.advance(loss=0.5, grad_norm=1.0, samples=8)


_LOSS, _NORM = torch.tensor(0.5), torch.tensor(1.0)


def _tensors(run: forge.Run) -> None:
    run.advance(loss=_LOSS, grad_norm=_NORM)


def _nothing_said(run: forge.Run) -> None:
    run.advance()


WAYS: dict[str, Call] = {
    "advance()": _nothing_said,
    "advance(loss=, grad_norm=, samples=), numbers": _numbers,
    "advance(loss=, grad_norm=), tensors on the CPU": _tensors,
}


def _loop(run: forge.Run, call: Call, steps: int) -> float:
    """Microseconds of the main thread per iteration: what else the machine does is not counted."""
    begun = time.thread_time()
    for _ in range(steps):
        call(run)
    return 1e6 * (time.thread_time() - begun) / steps


def _without(run: forge.Run) -> None:
    """The loop itself."""


def measure(steps: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of every round by the way of calling it."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    spec = {"checkpoint": {"every_steps": None, "every_minutes": None}}
    with (
        tempfile.TemporaryDirectory() as folder,
        forge.attach("custom-loop", spec=spec, runs=folder) as run,
    ):
        model = nn.Linear(4, 4)
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        run.restore()
        for call in WAYS.values():
            _loop(run, call, steps // 4)
        for _ in range(rounds):
            empty = _loop(run, _without, steps)
            for name, call in WAYS.items():
                found[name].append(_loop(run, call, steps) - empty)
    return found


def main() -> None:
    """The table, and all figures as JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20_000, help="of one way in one round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    found = measure(given.steps, given.rounds)
    spreads = {name: spread(values) for name, values in found.items()}
    print(table(["one step", "µs, median (range)"], [[n, cell(s)] for n, s in spreads.items()]))
    machine = Machine.measured(load, began)
    print(f"\ngoal: at most {_GOAL_US:g} µs.  {machine.text()}")
    data = {name: {"spread": plain(spreads[name]), "us": values} for name, values in found.items()}
    write_json(given.json, {"machine": asdict(machine), "goal_us": _GOAL_US, "ways": data})


if __name__ == "__main__":
    main()
