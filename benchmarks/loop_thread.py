"""What slurm_forge takes of a rank's main thread, beside the same loop written plainly.

    python -m benchmarks.loop_thread [--steps 2000] [--source rows|crops|photos] [--json FILE]

One process trains two models by turns, a step of each: one with ``run.batches`` and
``run.train_step`` at their defaults, one as ``benchmarks.loop_program`` does under torchrun.  The
figures are medians of the thread's processor time, which other work on the machine changes less
than it changes a duration; only the difference within one call is to be compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import slurm_forge as forge
from benchmarks.loop_program import Samples, Source, build, loss_of
from benchmarks.tables import Machine, table, write_json

_WIDTH, _SAMPLES, _WARM_UP = 192, 32, 100
_PARTS = ("fetching", "step")


def measure(source: Source, steps: int, runs: str) -> dict[str, tuple[float, float]]:
    """Median microseconds of a batch and of a step: slurm_forge's, and the plain loop's."""
    torch.set_num_threads(1)
    with forge.attach("loop", runs=runs) as run:
        ours, theirs = build(_WIDTH), build(_WIDTH)
        run.register(model=ours[0], optimizer=ours[1])
        batches = run.batches(
            Samples(source), global_batch_size=_SAMPLES, until=forge.Steps(1 << 30)
        )
        data = Samples(source)
        sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0)
        plain = iter(DataLoader(data, _SAMPLES, sampler=sampler))
        clock, found = time.thread_time_ns, []
        for _ in range(_WARM_UP + steps):
            times = [clock()]
            batch = next(batches)
            times.append(clock())
            run.train_step(batch, lambda micro: loss_of(ours[0], micro), max_norm=1.0)
            times.append(clock())
            rows = next(plain)
            times.append(clock())
            theirs[1].zero_grad(set_to_none=True)
            loss_of(theirs[0], rows).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(theirs[0].parameters(), 1.0)
            theirs[1].step()
            times.append(clock())
            found.append([after - before for before, after in pairwise(times)])
        medians = [statistics.median(each) / 1000 for each in zip(*found[_WARM_UP:], strict=True)]
        batches.close()
    return {part: (medians[at], medians[at + 2]) for at, part in enumerate(_PARTS)}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--source", type=Source, default=Source.ROWS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as runs:
        found = measure(options.source, options.steps, runs)
    machine = Machine.measured(load, began)
    rows: list[list[str | None]] = [
        [part, f"{ours:.0f}", f"{plain:.0f}", f"{ours - plain:+.0f}"]
        for part, (ours, plain) in found.items()
    ]
    print(f"µs of the main thread per step; {machine.text()}\n")
    print(table(["part", "slurm_forge", "plain", "difference"], rows))
    write_json(options.json, {"machine": asdict(machine), "found": found})


if __name__ == "__main__":
    main()
