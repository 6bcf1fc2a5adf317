"""A data source with a state on every rank, with loader workers, stopped and killed in between."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import slurm_forge as forge
from slurm_forge.run_directory import RunDirectory
from tests.distributed.launches import Program, launched, new_run

pytestmark = [pytest.mark.distributed]

RANKS, LENGTH, STEPS = 2, 40, 14


class Numbers(Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index


class Lengths:
    """A batch sampler by length: lists of 1 to 4 indices, drawn by torch with replacement."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randint(LENGTH, (LENGTH,)).tolist()
        while order:
            size = 1 + order[0] % 4
            yield order[:size]
            order = order[size:]


def loader(run: forge.Run, workers: int) -> StatefulDataLoader:
    sampler = DistributedSampler(Numbers(), run.world_size, run.rank, shuffle=True)
    return StatefulDataLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=workers)


def program(source: Any, dropout: float = 0.2, **how: Any) -> Program:
    """Notes the indices of each step that was applied."""

    def train(run: forge.Run) -> None:
        torch.manual_seed(5)
        bare = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        model = bare if run.world_size == 1 else DistributedDataParallel(bare)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.register(model=model, optimizer=optimizer)
        notes = run.directory / f"notes-{run.attempt}-{run.launch}-{run.rank}.jsonl"
        with notes.open("a") as file:
            for batch in run.batches(source(run), until=forge.Steps(STEPS), **how):
                step = run.step_number
                if run.due("eval", every=3):
                    with run.phase("eval"):
                        run.poll()
                        torch.rand(2)
                run.train_step(batch, lambda micro: model(micro[0]).square().mean(), max_norm=1.0)
                seen = [index for micro in batch.micro_batches for index in micro[1].tolist()]
                file.write(json.dumps([step, seen]) + "\n")
                file.flush()
        if run.rank == 0:
            torch.save(bare.state_dict(), run.directory / "weights.pt")

    return train


def begin(folder: Path, name: str, **spec: Any) -> RunDirectory:
    checkpoint = {"every_steps": 4, "every_minutes": None, "keep_last": 100, "good_after_steps": 1}
    return new_run(folder, name, checkpoint=checkpoint, seed=11, **spec)


def finish(run: RunDirectory, train: Program, ranks: int = RANKS) -> list[str]:
    """Launch after launch, until the run is done: how the ranks of each ended."""
    ends: list[str] = []
    while not run.is_done():
        assert len(ends) < 4, "the run comes to no end"
        with launched(run, ranks, train) as launch:
            pass
        killed = any(code < 0 for code in launch.exitcodes)
        ends.append("killed" if killed else ",".join({t.outcome.value for t in launch.told}))
    return ends


def steps_of(run: RunDirectory) -> dict[tuple[int, int], list[int]]:
    """What each rank trained on in each step; the last time counts, and all times are alike."""
    found: dict[tuple[int, int], list[int]] = {}
    for file in sorted(run.path.glob("notes-*.jsonl")):
        rank = int(file.stem.rpartition("-")[2])
        for line in file.read_text().splitlines():
            step, seen = json.loads(line)
            assert found.setdefault((step, rank), seen) == seen, f"step {step}, rank {rank}"
    return found


def weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(run.path / "weights.pt", weights_only=True)
    return state


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_loader_with_a_state_goes_on_as_if_never_interrupted(tmp_path, workers):
    train = program(lambda run: loader(run, workers))
    whole = begin(tmp_path, "whole")
    assert finish(whole, train) == ["finished"]
    parts = begin(tmp_path, "parts", inject=["term@6:rank0", "kill@11:rank1"])
    assert finish(parts, train) == ["stopped", "killed", "finished"]
    assert steps_of(parts) == steps_of(whole)
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(parts).items())
    # Five steps of 4 samples on 2 ranks are an epoch.
    for epoch in range(STEPS // 5):
        seen = [
            index
            for (step, _), indices in steps_of(parts).items()
            if step // 5 == epoch
            for index in indices
        ]
        assert Counter(seen) == dict.fromkeys(range(LENGTH), 1)


def test_a_rollback_takes_the_source_back_and_leaves_out_the_bad_window(tmp_path):
    train = program(lambda run: loader(run, 0))
    whole = begin(tmp_path, "whole")
    finish(whole, train)
    ladder = [{"do": "skip", "times": 2}, {"do": "rollback", "times": 1, "skip_samples": "window"}]
    # A micro-batch of each rank is one position: those of steps 5 and 6.
    back = begin(tmp_path, "back", inject=["nan:samples=10-13"], recovery={"non_finite": ladder})
    assert finish(back, train) == ["finished"]
    for rank in range(RANKS):
        file = back.path / f"notes-1-1-{rank}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [step for step, _ in rows] == [*range(7), *range(4, STEPS)]
        straight = [steps_of(whole)[step, rank] for step in range(STEPS)]
        assert [seen for _, seen in rows[:7]] == straight[:7]
        assert [seen for _, seen in rows[7:-2]] == [straight[4], *straight[7:]]


def test_lists_of_any_length_give_the_gradients_of_one_rank_alone(tmp_path):
    def train(accumulate: int) -> Program:
        how = {"batch_sampler": Lengths(), "accumulate": accumulate}
        return program(lambda _: Numbers(), dropout=0.0, **how)

    one, two = begin(tmp_path, "one"), begin(tmp_path, "two")
    finish(one, train(4), ranks=1)
    finish(two, train(2))
    together: dict[int, list[int]] = {}
    for (step, _), indices in sorted(steps_of(two).items()):
        together.setdefault(step, []).extend(indices)
    assert together == {step: indices for (step, _), indices in steps_of(one).items()}
    for key, value in weights(one).items():
        torch.testing.assert_close(weights(two)[key], value, rtol=1e-4, atol=1e-6)
