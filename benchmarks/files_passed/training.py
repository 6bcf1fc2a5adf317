"""A training step: from the request for a batch to the end of ``train_step``.

Two gloo ranks train a small model as a run of this machine.  Counted is the main thread of rank 0,
which does all that other ranks do, judges the loss besides, and writes the journal.  The samples
are fetched in this process, and the model has no buffers: loader workers do some of it in another
thread, and buffers are one more file.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from benchmarks.files_passed.counting import FileCounter, Passage
from slurm_forge.launch.local.runner import train_here

_FIRST = 20
#: The median of them: what is written every few seconds may come in one.
_STEPS = 5


def measure_step() -> Passage:
    """An ordinary step, some steps after the start."""
    return measure_both()[0]


def measure_nan() -> Passage:
    """The first step with a NaN gradient: its update is skipped, examined and written down."""
    return measure_both()[1]


def measure_both() -> tuple[Passage, Passage]:
    """An ordinary step, and the one with a NaN gradient, of one run."""
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        spec = {"name": "count", "args": {"results": str(results)}}
        train_here(f"{__name__}:train", spec, ranks=2, runs=folder)
        *steps, nan = [Passage(**passage) for passage in json.loads(results.read_text())]
    return sorted(steps, key=lambda passage: len(passage.files))[_STEPS // 2], nan


def train(run: forge.Run, *, results: str) -> None:
    """The entry: train, and write what was counted on rank 0."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    samples = [torch.full((4,), index / 64) for index in range(64)]

    def loss_of(factor: float, micro: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(micro).square().mean() * factor
        return loss

    last = _FIRST + _STEPS
    batches = run.batches(samples, global_batch_size=8, until=forge.Steps(last + 1))
    passages = []
    for step in range(last + 1):
        factor = float("nan") if step == last else 1.0
        counter = FileCounter()
        counter.start()
        batch = next(batches)
        run.train_step(batch, partial(loss_of, factor))
        passages.append(counter.stop())
    for _ in batches:
        raise AssertionError("more batches than steps")
    if run.rank == 0:
        counted = [asdict(passage) for passage in passages[_FIRST:]]
        Path(results).write_text(json.dumps(counted))
