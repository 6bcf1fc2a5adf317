"""What run.batches costs over a StatefulDataLoader: samples per second, beside the plain loop.

    python -m benchmarks.data_sources [--workers 0,4] [--rounds 20] [--json FILE]

One process, one loader, one model: a round trains the same number of steps in a plain loop
(``for batch in loader``, backward, clip, step) and in ``run.batches`` with ``run.train_step``, in
another order each time.  A sample is cut from an image of 160 x 160 bytes, mirrored and normalised,
about 0.2 ms; a batch has 64 of them.  The first step of a turn, which starts the loader's workers,
is not measured.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import slurm_forge as forge
from benchmarks.tables import Machine, Spread, cell, paired_ratio, plain, spread, table, write_json

_BATCH, _CROP = 64, 96
#: Steps of a turn that are measured, after the one that starts the workers.
_STEPS = 24


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Augmented as images are; the numbers do not matter, the work does."""

    def __init__(self) -> None:
        self._image = np.random.default_rng(0).integers(0, 255, (3, 160, 160), np.uint8)

    def __len__(self) -> int:
        return _BATCH * (_STEPS + 8)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left = random.randrange(160 - _CROP), random.randrange(160 - _CROP)
        cut = self._image[:, top : top + _CROP, left : left + _CROP].astype(np.float32)
        if random.random() < 0.5:
            cut = cut[:, :, ::-1]
        mean = cut.mean(axis=(1, 2), keepdims=True)
        return torch.from_numpy((cut - mean) / (cut.std() + 1e-6)), index % 10


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small convolutional net: some tens of milliseconds per step on one core."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )
    net(torch.zeros(1, 3, _CROP, _CROP))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def timed(steps: Generator[None, None, None]) -> float:
    """Samples per second, but for the first step and for what ends a loop."""
    next(steps)
    began = time.perf_counter()
    count = sum(1 for _ in islice(steps, _STEPS))
    seconds = time.perf_counter() - began
    steps.close()
    return count * _BATCH / seconds


def plain_steps(
    loader: Any, net: nn.Module, optimizer: torch.optim.Optimizer
) -> Generator[None, None, None]:
    """The loop that everybody writes."""
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        yield


def forge_steps(run: forge.Run, loader: Any, net: nn.Module) -> Generator[None, None, None]:
    """The same with ``run.batches``."""
    for batch in run.batches(loader, until=forge.Steps(1 << 40)):
        run.train_step(
            batch, lambda micro: nn.functional.cross_entropy(net(micro[0]), micro[1]), max_norm=1.0
        )
        yield


def measure(run: forge.Run, workers: Sequence[int], rounds: int) -> dict[int, Any]:
    """Samples per second of both ways, round by round, for each number of workers."""
    torch.set_num_threads(1)
    net, optimizer = model_and_optimizer()
    run.register(model=net, optimizer=optimizer)
    run.restore()
    found: dict[int, Any] = {}
    for count in workers:
        loader = StatefulDataLoader(
            Images(), batch_size=_BATCH, shuffle=True, drop_last=True, num_workers=count
        )
        rates: dict[str, list[float | None]] = {"plain": [], "run.batches": []}
        for number in range(rounds + 1):
            ways = ["plain", "run.batches"][:: 1 if number % 2 else -1]
            for way in ways:
                steps = (
                    plain_steps(loader, net, optimizer)
                    if way == "plain"
                    else forge_steps(run, loader, net)
                )
                rate = timed(steps)
                if number:  # the first round warms up
                    rates[way].append(rate)
        found[count] = rates
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="0,4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    began, load = time.time(), os.getloadavg()[0]
    counts = [int(each) for each in options.workers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        spec = {"name": "data-sources", "checkpoint": {"every_minutes": None}}
        with forge.attach(spec=spec, runs=folder) as run:
            found = measure(run, counts, options.rounds)
    rows, data = [], {}
    for count, rates in found.items():
        ratio = paired_ratio(rates["run.batches"], rates["plain"])
        both: list[Spread | None] = [spread(rates[way]) for way in ("plain", "run.batches")]
        rows.append([str(count), *(cell(each, 0) for each in both), cell(ratio, 3)])
        data[count] = {"rates": rates, "ratio": plain(ratio)}
    header = ["workers", "plain, samples/s", "run.batches, samples/s", "ratio"]
    machine = Machine.measured(load, began)
    sys.stdout.write(f"{table(header, rows)}\n\n{machine.text()}\n")
    write_json(options.json, {"machine": asdict(machine), "workers": data})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
