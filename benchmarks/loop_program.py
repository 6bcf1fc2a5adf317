"""The training of ``benchmarks.loop``, under slurm_forge (``train``) and under torchrun (a script).

Both train the same model with DDP on samples of the same cost, clip the gradients to the same
norm, and note the same moments.  The plain side is what torch's own tutorials write: a
``DataLoader`` with a ``DistributedSampler``, ``clip_grad_norm_``, one thread per rank.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import slurm_forge as forge

FEATURES, CLASSES = 256, 16
#: Steps before the first window: workers start, buffers grow.
WARM_UP = 60
_TICKS = os.sysconf("SC_CLK_TCK")


class Source(str, Enum):
    """What fetching a sample costs, and whether it draws random numbers."""

    ROWS = "rows"  #: a row of a tensor, about 3 us
    CROPS = "crops"  #: a random crop, mirrored by chance, about 50 us
    PHOTOS = "photos"  #: the same of a picture that takes 1 ms to make


@dataclass(frozen=True)
class Case:
    """One training: ``width`` of the model, and ``samples`` per rank and step."""

    folder: str
    width: int
    source: Source
    workers: int
    samples: int
    windows: int
    window_s: float
    #: Of the process whose descendants all belong to the training.
    root: int


@dataclass(frozen=True)
class Moment:
    """The end of the first step, or an edge of a window: seconds of the clock and of processors.

    ``cpu`` counts all processes of the training, ``rank_cpu`` rank 0 alone.
    """

    step: int
    time: float
    cpu: float
    rank_cpu: float


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Endless enough that no window has the end of an epoch in it."""

    def __init__(self, source: Source) -> None:
        generator = torch.Generator().manual_seed(1)
        self._source = source
        self._rows = torch.randn(1024, FEATURES, generator=generator)
        self._image = torch.randn(64, 64, generator=generator)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._source is Source.ROWS:
            return self._rows[index % 1024], index % CLASSES
        if self._source is Source.PHOTOS:
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
        top, left = random.randrange(48), random.randrange(48)
        cut = self._image[top : top + 16, left : left + 16]
        if torch.rand(()) < 0.5:
            cut = cut.flip(1)
        return ((cut - cut.mean()) / (cut.std() + 1e-6)).reshape(-1), index % CLASSES


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under DDP and its optimizer, the same on every rank."""
    torch.manual_seed(7)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
    layers = [nn.Linear(FEATURES, width), nn.GELU(), *hidden, nn.Linear(width, CLASSES)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean loss of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Clock:
    """Notes the first step and the edges of the windows, on rank 0; all ranks end together."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank, self._step = case, rank, 0
        self._edge: float | None = None
        self._left = case.windows
        self._every = 1

    def ended(self) -> bool:
        """Count a step; True after the last window."""
        self._step += 1
        if self._step in (1, WARM_UP):
            self._note()
        if self._step < WARM_UP:
            return False
        # Ranks agree on the end of a window by its number of steps, which rank 0 chooses once.
        if self._step == WARM_UP:
            self._began = time.perf_counter()
        if self._step == 2 * WARM_UP:
            per_step = (time.perf_counter() - self._began) / WARM_UP
            steps = torch.tensor(max(1, round(self._case.window_s / per_step)))
            dist.broadcast(steps, 0)
            self._every = int(steps)
            self._note()
        if self._step > 2 * WARM_UP and (self._step - 2 * WARM_UP) % self._every == 0:
            self._note()
            self._left -= 1
        return self._left == 0

    def _note(self) -> None:
        if self._rank == 0:
            cpu = processor_seconds(self._case.root)
            moment = Moment(self._step, time.time(), cpu, time.process_time())
            with (Path(self._case.folder) / "moments.jsonl").open("a") as file:
                file.write(json.dumps(asdict(moment)) + "\n")


def processor_seconds(root: int) -> float:
    """What all living descendants of a process, and the children they buried, have used."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(words[1])
            used[int(entry.name)] = sum(map(int, words[11:15])) / _TICKS
    total = 0.0
    for process, seconds in used.items():
        above = parents[process]  # the root's own seconds are those of earlier trainings
        while above not in (root, 0):
            above = parents.get(above, 0)
        total += seconds if above == root else 0.0
    return total


def case_of(values: dict[str, Any]) -> Case:
    """From what came as JSON."""
    return Case(**{**values, "source": Source(values["source"])})


def train(run: forge.Run) -> None:
    """Under slurm_forge, with all its defaults."""
    case = case_of(dict(run.args))
    torch.set_num_threads(1)
    model, optimizer = build(case.width)
    run.register(model=model, optimizer=optimizer)
    clock = Clock(case, run.rank)
    batches = run.batches(
        Samples(case.source),
        global_batch_size=case.samples * run.world_size,
        num_workers=case.workers,
        until=forge.Steps(1 << 30),
    )
    for batch in batches:
        run.train_step(batch, lambda micro: loss_of(model, micro), max_norm=1.0)
        if clock.ended():
            return


def _plain_batches(case: Case) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(Samples(case.source))
    yield from DataLoader(
        Samples(case.source), case.samples, sampler=sampler, num_workers=case.workers
    )


def train_plainly(case: Case) -> None:
    """Under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build(case.width)
    clock = Clock(case, dist.get_rank())
    for batch in _plain_batches(case):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if clock.ended():
            return


if __name__ == "__main__":
    start: Callable[[Case], None] = train_plainly
    start(case_of(json.loads(sys.argv[1])))
    # Workers of an epoch that goes on are not worth waiting for.
    os._exit(0)
