"""torchtitan's debug model on torchtitan's meshes, as a run: interrupted, and equal.

torchtitan's own trainer needs GPUs: ``torchtitan.tools.utils`` takes "cuda" for the device of a
machine that has none, ``torchtitan.models.moe.kernels`` imports triton, and its FSDP2 adds
gradients up (``set_gradient_divide_factor(1.0)``), for which gloo has no operation.  Its model, its
meshes and its parallelisation functions run on gloo ranks, in a loop of our own and with averaged
gradients; so does its trainer, without what asks a GPU.  That is torchtitan 0.2: from 0.3 on, its
language models have no attention that a CPU can train (``get_attention_config`` knows flex and
varlen only).
"""

from __future__ import annotations

import importlib.util
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
from slurm_forge.cli.start.first_files import InitOptions, StartMethod, first_files
from slurm_forge.journal import fold, read_to_fold
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


# -- torchtitan's own trainer ----------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Token numbers that follow from how many a rank has had."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.position = rank, ranks, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            draw = torch.Generator().manual_seed(self.position * self.ranks + self.rank)
            self.position += 1
            tokens = torch.randint(0, 2048, (TOKENS + 1,), generator=draw)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def use_cpu() -> None:
    """Have torchtitan's trainer run on CPUs, in this process: what it asks a GPU is left out."""
    from torchtitan.components import metrics
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed import utils as distributed_utils
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.tools import utils

    class Monitor:
        device_name = "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            """There is no memory of a device."""

    for module in (metrics, parallel_dims, distributed_utils, utils):
        module.device_type = "cpu"
        module.device_module = torch.cpu
    metrics.build_device_memory_monitor = Monitor
    distributed_utils.set_pg_timeouts = lambda **_: None  # a barrier on a device's index
    parallelize.disable_fsdp_gradient_division = lambda _: None  # gloo can't add up so


def train_own_trainer(before: Callable[[forge.Run], None]) -> Callable[[forge.Run], None]:
    def train(run: forge.Run) -> None:
        use_cpu()
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.config import JobConfig
        from torchtitan.models.llama3 import get_train_spec
        from torchtitan.protocols.train_spec import register_train_spec
        from torchtitan.train import Trainer

        from slurm_forge.integrations.torchtitan import train_trainer

        spec = get_train_spec()
        spec.build_tokenizer_fn = None
        spec.build_dataloader_fn = lambda dp_world_size, dp_rank, **_: ParallelAwareDataloader(
            Stream(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=2
        )
        register_train_spec("stream", spec)
        config = JobConfig()
        config.model.name, config.model.flavor = "stream", "debugmodel"
        config.training.steps, config.training.seq_len = STEPS, TOKENS
        config.training.local_batch_size = 2
        config.training.mixed_precision_param = "float32"
        config.activation_checkpoint.mode = "none"
        config.optimizer.implementation = "for-loop"
        shard = run.args["shard"]
        config.parallelism.data_parallel_shard_degree = shard
        config.parallelism.data_parallel_replicate_degree = run.world_size // shard
        config.job.dump_folder = str(run.directory / "titan")
        trainer = Trainer(config)
        train_step = trainer.train_step

        def disturbed(batches: Any) -> None:
            before(run)
            train_step(batches)

        trainer.train_step = disturbed
        train_trainer(run, trainer)

    return train


@pytest.mark.parametrize("shard", [2, 1], ids=["fsdp", "ddp"])
def test_torchtitan_s_trainer_is_interrupted_and_ends_the_same(
    tmp_path: Path, gate: Gate, shard: int
) -> None:
    undisturbed, run = (run_of(tmp_path, name, shard=shard) for name in ("undisturbed", "stopped"))

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 3:
            gate.wait(run.rank)

    with launched(run, 2, train_own_trainer(before)) as launch:
        launch.at(gate, 2)
        launch.stop_together()
        gate.open()
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, 4)}
    for each in (run, undisturbed):
        with launched(each, 2, train_own_trainer(nothing)) as launch:
            pass
        assert [(told.outcome, told.step) for told in launch.told] == [
            (RankOutcome.FINISHED, STEPS)
        ] * 2
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


def test_a_gradient_of_torchtitan_s_that_is_not_finite_reaches_no_weight(tmp_path: Path) -> None:
    run = new_run(tmp_path, name="nan", checkpoint={"every_steps": 2}, args={"shard": 2},
                  inject=["nan@3"])  # fmt: skip
    with launched(run, 2, train_own_trainer(nothing)) as launch:
        pass
    assert {told.outcome for told in launch.told} == {RankOutcome.FINISHED}
    assert [step for each in fold(read_to_fold(run)).attempts for step in each.skipped]


# -- what init writes ------------------------------------------------------------------------------


def train_starter(folder: Path, before: Callable[[forge.Run], None]) -> Any:
    def train(run: forge.Run) -> None:
        use_cpu()
        spec = importlib.util.spec_from_file_location("titan_starter", folder / "train.py")
        assert spec is not None
        assert spec.loader is not None
        starter = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(starter)
        hand_over = starter.train_trainer

        def disturbed(run: forge.Run, trainer: Any) -> None:
            train_step = trainer.train_step

            def step(batches: Any) -> None:
                before(run)
                train_step(batches)

            trainer.train_step = step
            hand_over(run, trainer)

        starter.train_trainer = disturbed
        starter.train(run, max_steps=STEPS, global_batch=BATCH)

    return train


def test_the_starter_of_init_is_interrupted_and_ends_the_same(tmp_path: Path, gate: Gate) -> None:
    files = first_files(InitOptions(name="demo", start_method=StartMethod.TITAN)).files
    assert [each.name for each in files] == ["train.yaml", "train.py", "titan.toml"]
    for each in files:
        # What gloo can't add up in bfloat16, and AdamW does on GPUs only.
        text = each.text.replace('"bfloat16"', '"float32"')
        (tmp_path / each.name).write_text(
            text.replace("lr = 8e-4", 'lr = 8e-4\nimplementation = "for-loop"')
        )
    undisturbed, run = (run_of(tmp_path, name) for name in ("undisturbed", "stopped"))

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 3:
            gate.wait(run.rank)

    with launched(run, 2, train_starter(tmp_path, before)) as launch:
        launch.at(gate, 2)
        launch.stop_together()
        gate.open()
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, 4)}
    for each in (run, undisturbed):
        with launched(each, 2, train_starter(tmp_path, nothing)) as launch:
            pass
        assert [(told.outcome, told.step) for told in launch.told] == [
            (RankOutcome.FINISHED, STEPS)
        ] * 2
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)
