"""Resumed on any number of ranks: the samples that were left, each once, at the same global batch.

And on the same number of ranks, however often interrupted: the same weights, moments, schedule and
random states, bit for bit.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import slurm_forge as forge
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.training.rank.main import RankOutcome
from tests.distributed.launches import Gate, launched, new_run, newest_manifest
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed]

LENGTH, BATCH, STEPS, EVAL_EVERY, SAVE_EVERY, SEED = 50, 8, 20, 5, 4, 11
WIDTH = 12


@dataclass(frozen=True)
class Part:
    """One launch: on how many ranks and how, and how it ends before the run does.

    ``until`` is the step that it stops at (``killed``: dies in, ``evaluating``: stops inside the
    evaluation of); None for the end of the run.
    """

    ranks: int
    until: int | None = None
    workers: int = 0
    micro_batch: int | None = None
    parallel: str = "ddp"
    killed: bool = False
    evaluating: bool = False


class Data(torch.utils.data.Dataset):
    """Augmented from all three global generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        base = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(WIDTH) + random.random() + float(np.random.random())
        return base + 0.1 * noise, index % 5, float(noise.sum())


class Net(nn.Module):
    """``random``: with dropout and with statistics over the micro-batch, as bitwise tests want."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm: nn.Module = nn.BatchNorm1d(16) if random else nn.LayerNorm(16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 5)
        self.dropout = 0.2 if random else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for block in self.blocks:
            x = x + F.dropout(torch.tanh(block(x)), self.dropout, self.training)
        return self.last(x)


def wrapped(run: forge.Run, model: nn.Module, parallel: str) -> nn.Module:
    if run.world_size == 1:
        return model
    if parallel == "fsdp2":
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        return fully_shard(model)
    return DistributedDataParallel(model, bucket_cap_mb=0.002)


def program(part: Part, gate: Gate, *, random_model: bool) -> Callable[[forge.Run], None]:
    """Rank 0 waits at the gate where the part is to be interrupted (in an evaluation all do)."""

    def train(run: forge.Run) -> None:
        torch.manual_seed(5)
        bare = Net(random_model)
        model = wrapped(run, bare, part.parallel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        averaged = random_model and part.parallel != "fsdp2"
        ema = AveragedModel(bare) if averaged else None
        run.register(ema=ema)
        notes = (run.directory / f"notes-{run.attempt}-{run.rank}.jsonl").open("a")

        def compute_loss(micro: Any) -> torch.Tensor:
            return F.cross_entropy(model(micro[0]), micro[1])

        for batch in run.batches(
            Data(),
            global_batch_size=BATCH,
            micro_batch_size=part.micro_batch,
            num_workers=part.workers,
            until=forge.Steps(STEPS),
        ):
            step = run.step_number
            if run.due("eval", every=EVAL_EVERY):
                with run.phase("eval"):
                    model.eval()
                    for number in range(6):
                        run.poll()
                        if number == 3 and part.evaluating and step == part.until:
                            gate.wait(run.rank)
                        torch.rand(1 + run.rank), random.random(), np.random.random()
                    model.train()
            if run.rank == 0 and not part.evaluating and step + 1 == part.until:
                gate.wait(0)
            seen = [value.hex() for micro in batch.micro_batches for value in micro[2].tolist()]
            run.train_step(batch, compute_loss, max_norm=1.0)
            if ema is not None:
                ema.update_parameters(bare)
            row = [step, [[*ids, value] for ids, value in zip(batch.sample_ids, seen, strict=True)]]
            notes.write(json.dumps(row) + "\n")
            notes.flush()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        if run.rank == 0:
            torch.save(weights, run.directory / "weights.pt")

    return train


def train_in_parts(run: RunDirectory, parts: list[Part], *, random_model: bool = False) -> None:
    """One launch after the other; each is interrupted where it says, the last one finishes."""
    for part in parts:
        gate = Gate()
        with launched(run, part.ranks, program(part, gate, random_model=random_model)) as launch:
            if part.until is not None:
                launch.at(gate, part.ranks if part.evaluating else 1)
                if part.killed:
                    for rank in range(part.ranks):
                        launch.kill(rank, signal.SIGKILL)
                else:
                    launch.stop_together()
                gate.open()
        gate.close()
        if part.killed:
            assert set(launch.exitcodes) == {-signal.SIGKILL}
            manifest = newest_manifest(run)
            # A save that was begun a moment before may not have been through.
            assert manifest is None or manifest.name.step < part.until
        elif part.until is not None:
            assert {(t.outcome, t.step) for t in launch.told} == {(RankOutcome.STOPPED, part.until)}
        else:
            assert {(t.outcome, t.step) for t in launch.told} == {(RankOutcome.FINISHED, STEPS)}
    assert run.is_done()


def begin(folder: Path, name: str, *, background: bool = True) -> RunDirectory:
    checkpoint = {
        "every_steps": SAVE_EVERY,
        "every_minutes": None,
        "keep_last": 100,
        "background": background,
    }
    return new_run(folder, name, checkpoint=checkpoint, seed=SEED)


def rows(run: RunDirectory) -> dict[int, list[tuple[int, int, str]]]:
    """Step by step the samples of all ranks: epoch, index, and what augmentation drew for it."""
    found: dict[int, list[tuple[int, int, str]]] = {}
    for file in sorted(run.path.glob("notes-*.jsonl")):
        for line in file.read_text().splitlines():
            step, samples = json.loads(line)
            found.setdefault(step, []).extend(map(tuple, samples))
    return {step: sorted(samples) for step, samples in found.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One process, never interrupted."""
    run = begin(tmp_path_factory.mktemp("alone"), "alone")
    train_in_parts(run, [Part(1)])
    return run


CHAINS = {
    # An epoch is 6.25 steps: 3 is in the middle of one, 7 right behind the first boundary.
    "4-1-2-4": [
        Part(4, 3),
        Part(1, 7, workers=2),
        Part(2, 13, micro_batch=1),
        Part(4, workers=2, micro_batch=1),
    ],
    "1-2-4 sharded": [
        Part(1, 6, micro_batch=3),
        Part(2, 9, parallel="fsdp2", workers=1),
        Part(4, parallel="fsdp2"),
    ],
    "4 sharded-2-1": [
        Part(4, 4, parallel="fsdp2", micro_batch=1),
        Part(2, 12, workers=2),
        Part(1),
    ],
    "stopped at once, again and again": [
        Part(2, 1),
        Part(1, 2),
        Part(4, 3, parallel="fsdp2"),
        Part(2, 4, workers=1),
        Part(1, 5, workers=2),
        Part(2),
    ],
    "in evaluations": [
        Part(2, 5, evaluating=True),
        Part(4, 10, evaluating=True, parallel="fsdp2"),
        Part(1, 15, evaluating=True, workers=1),
        Part(4),
    ],
}


@pytest.mark.parametrize(
    "chain",
    [
        "4-1-2-4",
        "1-2-4 sharded",
        pytest.param("4 sharded-2-1", marks=pytest.mark.slow),
        pytest.param("stopped at once, again and again", marks=pytest.mark.slow),
        pytest.param("in evaluations", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_reads_what_was_left(
    chain: str, alone: RunDirectory, tmp_path: Path
) -> None:
    run = begin(tmp_path, "chain")
    train_in_parts(run, CHAINS[chain])
    order = SampleOrder(SEED, LENGTH, BATCH)
    found = rows(run)
    assert {step: [row[:2] for row in samples] for step, samples in found.items()} == {
        step: sorted(order.indices(step * BATCH, BATCH)) for step in range(STEPS)
    }
    assert found == rows(alone), "a sample was augmented unlike in one process"
    weights, expected = (torch.load(r.path / "weights.pt") for r in (run, alone))
    torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)


INTERRUPTIONS = [
    {"until": 3, "workers": 2},
    {"until": 5, "evaluating": True},
    {"until": 11, "killed": True},
    {"until": 13},
]


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (1, "none"),
        (2, "ddp"),
        (4, "fsdp2"),
        pytest.param(4, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.core
def test_interrupted_is_bitwise_uninterrupted(ranks: int, parallel: str, tmp_path: Path) -> None:
    """With dropout, BatchNorm, accumulation, augmentation, evaluations that draw random numbers."""
    micro_batch = 2 if ranks < 4 else None
    whole, parts = begin(tmp_path, "whole"), begin(tmp_path, "parts")
    last = Part(ranks, parallel=parallel, micro_batch=micro_batch)
    train_in_parts(whole, [last], random_model=True)
    interrupted = [
        Part(ranks, parallel=parallel, micro_batch=micro_batch, **how) for how in INTERRUPTIONS
    ]
    train_in_parts(parts, [*interrupted, last], random_model=True)
    assert digest(parts.path, random=True) == digest(whole.path, random=True)


def at_random(seed: int) -> list[dict[str, Any]]:
    """Where and how a run is interrupted: stopped or killed, with and without loader workers."""
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(1, STEPS), chance.randint(2, 5)))
    found: list[dict[str, Any]] = []
    for step in steps:
        # Killed before a new checkpoint there would be nothing new to tell.
        behind = found[-1]["until"] if found else 0
        killed = chance.random() < 0.4 and step // SAVE_EVERY > behind // SAVE_EVERY
        found.append({"until": step, "killed": killed, "workers": chance.choice([0, 2])})
    return found


@pytest.mark.parametrize(
    "background",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["background", "waiting"],
)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_interrupted_at_random_steps_is_bitwise_uninterrupted(
    seed: int, background: bool, tmp_path: Path
) -> None:
    """Weights, optimizer, schedule, randomness and consumed samples, saves of either kind."""
    ranks = 1 + seed % 2
    whole, parts = (begin(tmp_path, name, background=background) for name in ("whole", "parts"))
    last = Part(ranks, workers=2 * (seed % 3 == 0))
    train_in_parts(whole, [last], random_model=True)
    train_in_parts(
        parts, [*(Part(ranks, **how) for how in at_random(seed)), last], random_model=True
    )
    assert digest(parts.path, random=True) == digest(whole.path, random=True)
    taken, expected = rows(parts), rows(whole)
    # A step that was repeated after a kill is there twice, with the same samples.
    assert {step: sorted(set(samples)) for step, samples in taken.items()} == expected
