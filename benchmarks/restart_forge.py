"""The workload under slurm_forge.  ``args``: folder, pace, width, fault_every."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from benchmarks.marks import Marks, What
from benchmarks.workload import GLOBAL_BATCH, Samples, build_model, build_optimizer, loss_of, work

#: Three bad steps in a row are what the default ladder skips before it rolls back.
_BAD_STEPS = 3


class _Silent:
    def add(self, what: What, step: int = 0) -> None:
        """Nothing: only rank 0 marks."""


def train(run: forge.Run) -> None:
    """Train until the harness ends the job; with ``fault_every`` each launch ends in NaNs."""
    args = run.args
    marks = Marks(Path(args["folder"]), launch=run.launch) if run.rank == 0 else _Silent()
    marks.add(What.MET)
    model = DistributedDataParallel(build_model(args["width"]).to(run.device))
    optimizer = build_optimizer(model)
    run.register(model=model, optimizer=optimizer)
    marks.add(What.BUILT)
    fault_at: int | None = None
    bad = 0

    def compute_loss(micro: Any) -> torch.Tensor:
        nonlocal bad
        loss = loss_of(model, micro)
        if fault_at is None or run.step_number < fault_at or bad == _BAD_STEPS:
            return loss
        bad += 1
        if bad == 1:
            marks.add(What.FAULT, run.step_number)
        return loss * float("nan")

    for batch in run.batches(
        Samples(), global_batch_size=GLOBAL_BATCH, until=forge.Steps(args["steps"])
    ):
        if fault_at is None and args["fault_every"]:
            fault_at = run.step_number + args["fault_every"]
        work(args["pace"])
        run.train_step(batch, compute_loss, max_norm=1.0)
        marks.add(What.STEP, run.step_number)
