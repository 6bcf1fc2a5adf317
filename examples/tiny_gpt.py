"""A small character transformer on Python's own standard library: text that every machine has.

    slurm-forge run examples/tiny_gpt.yaml          here, as local processes
    slurm-forge submit examples/tiny_gpt.yaml       on a Slurm cluster
    python examples/tiny_gpt.py --ranks 2 --parallel fsdp2

The training loop is the one a user of slurm_forge writes; everything else is an ordinary model.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import slurm_forge as forge

CONTEXT = 64
VOCABULARY = 128


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of the standard library's sources: characters in, the next characters out."""

    def __init__(self, size: int = 1_000_000, *, skip: int = 0) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        data = bytearray()
        for file in sorted(library.glob("*.py")):
            data += file.read_bytes()
            if len(data) >= size + skip:
                break
        ascii_only = torch.frombuffer(bytearray(data[skip : size + skip]), dtype=torch.uint8)
        self._data = ascii_only.clamp(max=VOCABULARY - 1).long()

    def __len__(self) -> int:
        """Windows that do not overlap."""
        return (len(self._data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One window and the same one character later."""
        start = index * CONTEXT
        window = self._data[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


class TinyGPT(nn.Module):
    """A decoder-only transformer of a few hundred thousand parameters."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next character at every place: (batch, context, vocabulary)."""
        hidden = self.embed(tokens) + self.place[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]).to(tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def build(run: forge.Run) -> nn.Module:
    """The model, wrapped as ``args: {parallel: ddp | fsdp2}`` says; bare for a single rank."""
    torch.manual_seed(1234)  # the same weights on every rank
    model: nn.Module = TinyGPT().to(run.device)
    parallel = run.args.get("parallel", "ddp")
    if run.world_size == 1:
        return model
    if parallel == "fsdp2":
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        fully_shard(model)
        return model
    return DistributedDataParallel(model)


def train(run: forge.Run) -> None:
    """What slurm_forge calls on every rank."""
    steps = int(run.args.get("max_steps", 200))
    model = build(run)
    lr = float(run.args.get("lr", 3e-3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    held_out = Text(16_000, skip=1_000_000)

    def compute_loss(micro_batch: Any) -> torch.Tensor:
        tokens, targets = micro_batch
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for batch in run.batches(
        Text(),
        global_batch_size=int(run.args.get("global_batch", 32)),
        micro_batch_size=run.args.get("micro_batch"),
        num_workers=int(run.args.get("workers", 0)),
        until=forge.Steps(steps),
    ):
        if run.due("eval", every=int(run.args.get("eval_every", 100))):
            with run.phase("eval"):
                run.log(val_loss=evaluate(model, held_out, run))
        loss = run.train_step(batch, compute_loss, max_norm=1.0)
        run.log(loss=loss)


@torch.no_grad()
def evaluate(model: nn.Module, data: Text, run: forge.Run) -> float:
    """Mean loss on text that is not trained on."""
    model.eval()
    total = 0.0
    for index in range(0, len(data), 16):
        run.poll()  # a place where a stop request is heeded
        pairs = [data[i] for i in range(index, min(index + 16, len(data)))]
        tokens = torch.stack([pair[0] for pair in pairs]).to(run.device)
        targets = torch.stack([pair[1] for pair in pairs]).to(run.device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        total += float(loss)
    model.train()
    return total / (len(data) * CONTEXT)


def main() -> None:
    """Train here, without a job file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--name", default="tiny-gpt")
    parser.add_argument("--runs", default="runs")
    given = parser.parse_args()
    from slurm_forge.launch.local.runner import (
        train_here,
    )

    train_here(
        train,
        {
            "name": given.name,
            "args": {"parallel": given.parallel, "max_steps": given.max_steps},
            "checkpoint": {"every_steps": 50},
        },
        ranks=given.ranks,
        runs=given.runs,
    )


if __name__ == "__main__":
    main()
