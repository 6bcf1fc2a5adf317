"""What run.batches costs over a StatefulDataLoader: samples per second, beside the plain loop.

    python -m benchmarks.data_sources [--workers 0,4] [--rounds 20] [--json FILE]

One process, one model, two loaders of one kind: a plain loop (``for batch in loader``, backward,
clip, step) and ``run.batches`` with ``run.train_step`` take a step in turn, so that what else goes
on on the machine slows both down.  A sample is cut from an image of 160 x 160 bytes, mirrored and
normalised, about 0.2 ms; a batch has 64 of them.  A round has loaders of its own, and their first
step, which starts the workers, is not measured.

The ratio is that of the samples per second of a round; beside it that of the samples per second of
processor time of this process, in which the loaders' workers are not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import slurm_forge as forge
from benchmarks.tables import Machine, cell, paired_ratio, plain, spread, table, write_json

_BATCH, _CROP = 64, 96
_PLAIN, _FORGE = "plain", "run.batches"
#: Steps of a round that are measured, after the one that starts the workers.
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


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples per second in one round, and per second of the process's processor time."""

    wall: float
    cpu: float


def keep_memory() -> None:
    """Have freed memory used again, and not given back to the kernel.

    It makes the difference of some thousand page faults a step, several ms, whether it is; by
    chance, and for one way in one round and for the other in the next.
    """
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 1 << 30)
    libc.mallopt(trim_threshold, (1 << 31) - 1)


def one_round(ways: Mapping[str, Iterator[None]]) -> dict[str, Rate]:
    """One step of each way after the other, but for the first and for what ends a loop."""
    for steps in ways.values():
        next(steps)
    wall, cpu = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for number in range(_STEPS):
        for way in [*ways][:: 1 if number % 2 else -1]:
            began, worked = time.perf_counter(), time.process_time()
            next(ways[way])
            wall[way] += time.perf_counter() - began
            cpu[way] += time.process_time() - worked
    samples = _STEPS * _BATCH
    return {way: Rate(samples / wall[way], samples / cpu[way]) for way in ways}


def measure(
    run: forge.Run, workers: Sequence[int], rounds: int
) -> dict[int, list[dict[str, Rate]]]:
    """Every round, for each number of workers."""
    torch.set_num_threads(1)
    keep_memory()
    net, optimizer = model_and_optimizer()
    run.register(model=net, optimizer=optimizer)
    run.restore()

    def loader(count: int) -> Any:
        return StatefulDataLoader(
            Images(), batch_size=_BATCH, shuffle=True, drop_last=True, num_workers=count
        )

    found: dict[int, list[dict[str, Rate]]] = {}
    for count in workers:
        for _ in range(rounds + 1):
            plain_loop = plain_steps(loader(count), net, optimizer)
            with closing(plain_loop), closing(forge_steps(run, loader(count), net)) as forge_loop:
                rates = one_round({_PLAIN: plain_loop, _FORGE: forge_loop})
            found.setdefault(count, []).append(rates)
        del found[count][0]  # it warmed up
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
    for count, turns in found.items():
        wall, cpu = (
            {way: [getattr(each[way], kind) for each in turns] for way in (_PLAIN, _FORGE)}
            for kind in ("wall", "cpu")
        )
        ratios = [paired_ratio(of[_FORGE], of[_PLAIN]) for of in (wall, cpu)]
        rates = [spread(wall[way]) for way in (_PLAIN, _FORGE)]
        cells = [*(cell(each, 0) for each in rates), *(cell(each, 3) for each in ratios)]
        rows.append([str(count), *cells])
        data[count] = {
            "wall": wall,
            "cpu": cpu,
            "ratio": plain(ratios[0]),
            "cpu_ratio": plain(ratios[1]),
        }
    header = ["workers", f"{_PLAIN}, samples/s", f"{_FORGE}, samples/s", "ratio", "of CPU time"]
    machine = Machine.measured(load, began)
    sys.stdout.write(f"{table(header, rows)}\n\n{machine.text()}\n")
    write_json(options.json, {"machine": asdict(machine), "workers": data})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
