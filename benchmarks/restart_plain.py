"""The same training with plain torch: a state that is saved every so many steps, and loaded again.

``python -m benchmarks.restart_plain FOLDER PACE WIDTH STEPS SAVE_EVERY`` below torchrun or srun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.marks import Marks, What
from benchmarks.workload import GLOBAL_BATCH, Samples, build_model, build_optimizer, loss_of, work


@dataclass(frozen=True)
class Workload:
    """What to train and where the one checkpoint file and the marks go."""

    folder: str
    pace: float
    width: int
    steps: int
    save_every: int

    @property
    def checkpoint(self) -> Path:
        """The file that holds the newest state."""
        return Path(self.folder) / "state.pt"


class PlainTraining:
    """Written in its favour where there was a choice.

    A save is written beside and renamed, the data is taken up where it was left, one thread per
    rank.
    """

    def __init__(self) -> None:
        self.model: DistributedDataParallel | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.marks: Marks | None = None
        self.step = 0

    def train(self, workload: Workload, rank: int) -> int:
        """Resume where there is a checkpoint, and train."""
        self.marks = Marks(Path(workload.folder)) if rank == 0 else None
        self._mark(What.IMPORTED)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._mark(What.MET)
        self.model = DistributedDataParallel(build_model(workload.width))
        self.optimizer = build_optimizer(self.model)
        self._mark(What.BUILT)
        if workload.checkpoint.exists():
            self._load(workload)
        self._mark(What.LOADED)
        for batch in self._batches(workload.steps):
            work(workload.pace)
            self.optimizer.zero_grad(set_to_none=True)
            loss_of(self.model, batch).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            self._mark(What.STEP)
            if self.step % workload.save_every == 0 and rank == 0:
                self._save(workload)
        return self.step

    def _batches(self, steps: int) -> Iterator[Any]:
        dataset = Samples()
        ranks = dist.get_world_size()
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=0)
        per_epoch = len(dataset) // GLOBAL_BATCH
        while self.step < steps:
            epoch, done = divmod(self.step, per_epoch)
            sampler.set_epoch(epoch)
            order = list(sampler)[done * (GLOBAL_BATCH // ranks) :]
            loader = DataLoader(dataset, GLOBAL_BATCH // ranks, sampler=order, drop_last=True)
            for batch in loader:
                if self.step >= steps:
                    return
                yield batch

    def _save(self, workload: Workload) -> None:
        if self.model is None or self.optimizer is None:
            return
        beside = workload.checkpoint.with_suffix(f".{os.getpid()}")
        state = {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, beside)
        beside.replace(workload.checkpoint)
        self._mark(What.SAVED)

    def _load(self, workload: Workload) -> None:
        assert self.model is not None and self.optimizer is not None
        state = torch.load(workload.checkpoint, weights_only=True)
        self.step = state["step"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _mark(self, what: What) -> None:
        if self.marks is not None:
            self.marks.add(what, self.step)


def main() -> None:
    """One rank, with torchrun's variables."""
    folder, pace, width, steps, save_every = sys.argv[1:]
    workload = Workload(
        folder=folder,
        pace=float(pace),
        width=int(width),
        steps=int(steps),
        save_every=int(save_every),
    )
    PlainTraining().train(workload, int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
