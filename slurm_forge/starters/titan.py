"""A small language model with torchtitan's own trainer, as a run.  It needs GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

import slurm_forge as forge
from slurm_forge.integrations.torchtitan import train_trainer

#: Of torchtitan, which says what model it is and how it is laid out over the ranks.
CONFIG = Path(__file__).with_name("titan.toml")


class Counting(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Numbers that count up, to be continued.  Put your data here, or leave it to torchtitan."""

    def __init__(self, rank: int, ranks: int, tokens: int) -> None:
        self._rank, self._ranks, self._tokens = rank, ranks, tokens
        self._position = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Samples without end, from where it stands."""
        while True:
            first = 7 * (self._position * self._ranks + self._rank)
            self._position += 1
            row = (first + torch.arange(self._tokens + 1)) % 2048
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; torchtitan asks any dataset for it."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._position = state["position"]


def load(
    dp_world_size: int, dp_rank: int, job_config: JobConfig, **_: Any
) -> ParallelAwareDataloader:
    """What torchtitan calls for the batches of a rank."""
    training = job_config.training
    rows = Counting(dp_rank, dp_world_size, training.seq_len)
    return ParallelAwareDataloader(
        rows, dp_rank, dp_world_size, batch_size=training.local_batch_size
    )


def train(run: forge.Run, max_steps: int = 300, global_batch: int = 240, pace: float = 0.0) -> None:
    """Called on every rank; the other parameters are the args of the job."""
    spec = get_train_spec()
    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, load
    register_train_spec("counting", spec)
    words = [
        f"--job.config_file={CONFIG}",
        f"--job.dump_folder={run.directory / 'titan'}",
        f"--training.steps={max_steps}",
        f"--training.global_batch_size={global_batch}",
        f"--training.local_batch_size={global_batch // run.world_size}",
    ]
    trainer = Trainer(ConfigManager().parse_args(words))
    train_step = trainer.train_step

    def paced(batches: Any) -> None:
        time.sleep(pace)  # only so that there is time to interrupt it
        train_step(batches)

    trainer.train_step = paced
    train_trainer(run, trainer)
