"""Training functions for tests: small, deterministic, with faults on purpose.

Submitted by file name (``tests/jobs.py:train``), so ranks import this without pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import slurm_forge as forge
from slurm_forge.testing.faults import Faults
from tests.fsdp import fully_shard

FEATURES = 32


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each sample is a function of its index and of its own randomness."""

    def __init__(self, length: int = 997, wait: float = 0.0) -> None:
        self._length = length
        self._wait = wait

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._wait:
            time.sleep(self._wait)
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(FEATURES, generator=generator)
        noise = 0.01 * torch.randn(FEATURES)  # augmentation: from the global generator
        return features + noise, torch.tensor(index % 10)


class Net(nn.Module):
    """Enough layers for several DDP buckets and several FSDP units; dropout uses the rank's RNG."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(features))
        for block in self.blocks:
            hidden = hidden + F.dropout(torch.tanh(block(hidden)), 0.1, self.training)
        out: torch.Tensor = self.last(self.norm(hidden))
        return out


def build(run: forge.Run) -> nn.Module:
    torch.manual_seed(7)
    model: nn.Module = Net().to(run.device)
    if run.world_size == 1:
        return model
    if run.args.get("parallel", "ddp") == "fsdp2":
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        return fully_shard(model)
    return DistributedDataParallel(model, bucket_cap_mb=0.01)


def train(run: forge.Run) -> None:
    """``args``: steps, lr, parallel, global_batch, micro_batch, workers, pace (s per step;
    later_pace after the first start), faults, misbehave, record (the folder for what was trained
    on, instead of the run's), eval_every, eval_pace, long_step (a step that takes ``long_seconds``,
    in the first attempt only, or with long_always in each), hold (a step at which the first start
    stays until it is ended), variables (whose values are written down)."""
    args = run.args
    first_start = run.attempt == 1 and run.launch == 1
    pace = args.get("pace", 0.0)
    if not first_start:
        pace = args.get("later_pace", pace)
    model = build(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.get("lr", 1e-2), fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=25, gamma=0.9)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    _tell_variables(run)
    faults = Faults(args.get("faults", ()))
    record = _Record(run)

    def compute_loss(micro: Any) -> torch.Tensor:
        features, labels = micro
        loss = F.cross_entropy(model(features), labels)
        return faults.loss(loss, run, samples=len(labels))

    for batch in run.batches(
        Samples(wait=args.get("data_wait", 0.0)),
        global_batch_size=args.get("global_batch", 16),
        micro_batch_size=args.get("micro_batch"),
        num_workers=args.get("workers", 0),
        until=forge.Steps(args.get("steps", 100)),
    ):
        if run.due("eval", every=args.get("eval_every", 10**9)):
            with run.phase("eval"):
                for _ in range(args.get("eval_batches", 20)):
                    run.poll()
                    time.sleep(args.get("eval_pace", 0.0))
                    torch.rand(3)  # an evaluation may draw as it likes
        step = run.step_number
        if args.get("long_step") == step and (run.attempt == 1 or args.get("long_always")):
            time.sleep(args["long_seconds"])
        while first_start and args.get("hold") == step:
            time.sleep(0.05)
        time.sleep(pace)
        misbehave(args.get("misbehave", ()), step=step, rank=run.rank, folder=run.directory)
        run.train_step(batch, compute_loss, max_norm=1.0)
        record.write(step, batch.sample_ids)


def _tell_variables(run: forge.Run) -> None:
    names = run.args.get("variables", ())
    if names:
        file = run.directory / f"variables-a{run.attempt}-l{run.launch}-r{run.rank}.json"
        file.write_text(json.dumps({name: os.environ.get(name) for name in names}))


def told_variables(run: Path, rank: int) -> list[dict[str, str | None]]:
    """What a rank had in its environment, launch by launch."""
    return [json.loads(file.read_text()) for file in sorted(run.glob(f"variables-*-r{rank}.json"))]


def misbehave(texts: Iterable[str], *, step: int, rank: int, folder: Path) -> None:
    """What a rank does to itself before a step, once in the life of a run unless it says always.

    ``segfault@15:rank1``, ``abort@15:rank1``, ``memory@15:rank1``, ``exception@15:rank1:always``,
    ``orphan@15:rank1`` (a process in a session of its own), ``swallow@15:rank1`` (whatever is
    raised in it), ``gil@15:rank1`` (kept for a minute).
    """
    for text in texts:
        kind, _, rest = text.partition("@")
        at, who, *more = rest.split(":")
        if (int(at), who) != (step, f"rank{rank}"):
            continue
        struck = folder / f"struck-{kind}-{step}-{rank}"
        if "always" not in more and struck.exists():
            continue
        struck.touch()
        # Nobody wants hundreds of megabytes of it where the tests were started.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if kind == "segfault":
            ctypes.string_at(0)
        elif kind == "abort":
            os.abort()
        elif kind == "orphan":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        elif kind == "swallow":
            for _ in range(600):
                with contextlib.suppress(BaseException):
                    time.sleep(0.1)
        elif kind == "gil":
            ctypes.PyDLL(None).sleep(60)
        elif kind == "memory":
            _kept.append(torch.ones(450 << 20, dtype=torch.uint8))
        else:
            raise RuntimeError(f"a bug of the program at step {step}")


_kept: list[torch.Tensor] = []


class _Record:
    """Which samples went into which step, per rank and attempt: for checking that none is lost."""

    def __init__(self, run: forge.Run) -> None:
        folder = Path(run.args.get("record", run.directory)) / "samples"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"a{run.attempt:03d}-l{run.launch:03d}-r{run.rank}.jsonl"
        self._file = (folder / name).open("a")

    def write(self, step: int, samples: Any) -> None:
        self._file.write(json.dumps([step, [list(sample) for sample in samples]]) + "\n")
        self._file.flush()


def consumed(run: Path) -> dict[int, list[tuple[int, int]]]:
    """The samples of every step that counts: of each step, those of its last execution."""
    found: dict[int, tuple[str, list[tuple[int, int]]]] = {}
    for file in sorted((run / "samples").iterdir()):
        incarnation = file.name[:9]
        # A rank comes by a step again after a rollback: then the last time counts.
        own = dict(map(json.loads, file.read_text().splitlines()))
        for step, samples in own.items():
            before = found.get(step, ("", []))
            kept = before[1] if before[0] == incarnation else []
            found[step] = (incarnation, kept + [(epoch, index) for epoch, index in samples])
    return {step: sorted(samples) for step, (_, samples) in found.items()}
