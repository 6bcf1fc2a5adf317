"""torchtitan's debug model on torchtitan's meshes, as a run: interrupted, and equal.

torchtitan's own trainer needs GPUs: ``torchtitan.tools.utils`` takes "cuda" for the device of a
machine that has none, ``torchtitan.models.moe.kernels`` imports triton, and its FSDP2 adds
gradients up (``set_gradient_divide_factor(1.0)``), for which gloo has no operation.  Its model, its
meshes and its parallelisation functions run on gloo ranks, in a loop of our own and with averaged
gradients.  That is torchtitan 0.2: from 0.3 on, its language models have no attention that a CPU
can train (``get_attention_config`` knows flex and varlen only).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

import slurm_forge as forge
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from tests.distributed.launches import Gate, launched, new_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
pytest.importorskip("triton", reason="torchtitan imports it")
if not version("torchtitan" if find_spec("torchtitan") else "torch").startswith("0.2."):
    pytest.skip(
        "needs torchtitan 0.2: later ones can't be trained on CPUs", allow_module_level=True
    )

RANKS, STEPS, TOKENS, BATCH = 4, 6, 32, 4


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Token numbers that follow from the index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 2048, (TOKENS + 1,), generator=draw)
        return tokens[:-1], tokens[1:]


def train_titan(before: Callable[[forge.Run], None]) -> Callable[[forge.Run], None]:
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.llama3 import Transformer, llama3_args, parallelize_llama

    def train(run: forge.Run) -> None:
        shard, tp = run.args["shard"], run.args["tp"]
        with mock.patch.object(parallel_dims, "device_type", "cpu"):
            dims = ParallelDims(
                dp_replicate=1, dp_shard=shard, cp=1, tp=tp, pp=1, ep=1, etp=1,
                world_size=run.world_size,
            )  # fmt: skip
            dims.build_mesh()
        config = JobConfig()
        config.training.seq_len = TOKENS
        config.training.mixed_precision_param = "float32"
        config.activation_checkpoint.mode = "none"
        config.parallelism.disable_loss_parallel = True
        description = llama3_args["debugmodel"]
        description.update_from_config(config)
        with torch.device("meta"):
            model = Transformer(description)
        parallelize_llama(model, dims, config)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                averaged: Any = None
                part.set_gradient_divide_factor(averaged)
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        with torch.no_grad():
            model.init_weights()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        run.register(model=model, optimizer=optimizer)

        def compute_loss(micro: Any) -> torch.Tensor:
            inputs, labels = micro
            return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

        names = [name for name in ("batch", "tp") if dims.get_optional_mesh(name) is not None]
        for batch in run.batches(
            Text(),
            global_batch_size=BATCH,
            until=forge.Steps(STEPS),
            mesh=dims.get_mesh(names),
        ):
            before(run)
            run.train_step(batch, compute_loss, max_norm=1.0)

    return train


def nothing(run: forge.Run) -> None:
    """Before a step that is not disturbed."""


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate()
    yield one
    one.close()


def run_of(folder: Path, name: str, **sizes: int) -> RunDirectory:
    return new_run(folder, name=name, checkpoint={"every_steps": 2}, args=dict(sizes))


def finished(run: RunDirectory) -> RunDirectory:
    with launched(run, RANKS, train_titan(nothing)) as launch:
        pass
    assert [(told.outcome, told.step) for told in launch.told] == [
        (RankOutcome.FINISHED, STEPS)
    ] * RANKS
    return run


@pytest.mark.parametrize(
    "sizes", [{"shard": 2, "tp": 2}, {"shard": 4, "tp": 1}], ids=["fsdp-tp", "fsdp"]
)
def test_a_debug_model_of_torchtitan_is_interrupted_and_ends_the_same(
    tmp_path: Path, gate: Gate, sizes: dict[str, Any]
) -> None:
    undisturbed = finished(run_of(tmp_path, "undisturbed", **sizes))
    run = run_of(tmp_path, "stopped", **sizes)

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 3:
            gate.wait(run.rank)

    with launched(run, RANKS, train_titan(before)) as launch:
        launch.at(gate, RANKS)
        launch.kill(1, signal.SIGTERM)
        launch.heard()
        gate.open()
    assert {told.outcome for told in launch.told} == {RankOutcome.STOPPED}
    finished(run)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)
