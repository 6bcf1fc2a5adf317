"""The training of ``tests/jobs.py`` as submitit's documentation shows it: a callable that
checkpoints itself.

Written in its favour where there was a choice: the state is also saved every so many steps, a save
is written beside and renamed, the data is taken up where it was left.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.jobs import Net, Samples, misbehave

_GLOBAL_BATCH = 16
_MARKS = "marks.jsonl"


@dataclass(frozen=True)
class StockWorkload:
    """``args`` as those of ``tests.jobs.train``; the one checkpoint file lies in ``keep``.

    Marks go into ``folder``, which no fault strikes.
    """

    folder: str
    keep: str
    args: Mapping[str, Any]
    every: int

    @property
    def checkpoint(self) -> Path:
        """The file that holds the newest state."""
        return Path(self.keep) / "state.pt"


@dataclass(frozen=True, slots=True)
class Mark:
    """Rank 0 did something: ``what`` is loaded, step or saved; ``start`` counts from 1."""

    time: float
    start: int
    what: str
    step: int


def marks_in(folder: Path) -> list[Mark]:
    """All marks so far, in the order in which they were made; a torn last line is left out."""
    path = folder / _MARKS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Mark(*json.loads(line)) for line in lines]


class StockTraining:
    """``executor.submit(StockTraining(), workload)``."""

    def __init__(self) -> None:
        # What checkpoint() needs to reach while __call__ is under way.
        self.model: DistributedDataParallel | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.rank = 0
        self.step = 0

    def __call__(self, workload: StockWorkload) -> int:
        """Every task: resume where there is a checkpoint, and train."""
        environment = submitit.helpers.TorchDistributedEnvironment()
        # The names of a test cluster's nodes, all on this machine, do not resolve.
        environment.master_addr = "127.0.0.1"
        environment.export(set_cuda_visible_devices=False)
        self.rank = environment.rank
        torch.set_num_threads(1)
        torch.manual_seed(7)
        dist.init_process_group("gloo")
        self.model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        if workload.checkpoint.exists():
            self._load(workload)
        self._mark(workload, "loaded")
        for batch in self._batches(workload.args.get("steps", 100)):
            self._dawdle(workload)
            self._train(batch)
            self.step += 1
            self._mark(workload, "step")
            if self.step % workload.every == 0 and self.rank == 0:
                self._save(workload)
        return self.step

    def checkpoint(self, workload: StockWorkload) -> Any:
        """Called by submitit, on rank 0 only, from its signal handler."""
        self._save(workload)
        return submitit.helpers.DelayedSubmission(StockTraining(), workload)

    def _train(self, batch: Any) -> None:
        assert self.model is not None and self.optimizer is not None
        features, labels = batch
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(features), labels).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _dawdle(self, workload: StockWorkload) -> None:
        """The pace and the faults that a cell asks for, as in ``tests.jobs.train``."""
        args, again = workload.args, _start() > 1
        if args.get("long_step") == self.step and (args.get("long_always") or not again):
            _sleep(args["long_seconds"])
        pace = args.get("pace", 0.0)
        _sleep(args.get("later_pace", pace) if again else pace)
        texts = args.get("misbehave", ())
        misbehave(texts, step=self.step, rank=self.rank, folder=Path(workload.folder))

    def _batches(self, steps: int) -> Iterator[Any]:
        dataset = Samples()
        each = _GLOBAL_BATCH // dist.get_world_size()
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=0)
        per_epoch = len(dataset) // _GLOBAL_BATCH
        while self.step < steps:
            epoch, done = divmod(self.step, per_epoch)
            sampler.set_epoch(epoch)
            order = list(sampler)[done * each :]
            for batch in DataLoader(dataset, each, sampler=order, drop_last=True):
                if self.step >= steps:
                    return
                yield batch

    def _save(self, workload: StockWorkload) -> None:
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
        self._mark(workload, "saved")

    def _load(self, workload: StockWorkload) -> None:
        assert self.model is not None and self.optimizer is not None
        state = torch.load(workload.checkpoint, weights_only=True)
        self.step = state["step"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _mark(self, workload: StockWorkload, what: str) -> None:
        if self.rank == 0:
            line = json.dumps([time.time(), _start(), what, self.step])
            with (Path(workload.folder) / _MARKS).open("a") as file:
                file.write(line + "\n")


def _start() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1


def _sleep(seconds: float) -> None:
    """In pieces, so that a signal's handler need not wait: Python's own sleep would do as well."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))
