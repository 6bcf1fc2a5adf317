"""A Hugging Face Trainer under torchrun that knows nothing of slurm_forge, given a NaN once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus, read_journal
from slurm_forge.journal.events import DecisionTaken, IncidentSeen, Resumed
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = """
import os, pathlib, sys
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=draw), "labels": torch.tensor(index % 3)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

class Poison(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        mark = pathlib.Path(f"poisoned-{os.environ['RANK']}")
        if os.environ.get("POISON") and state.global_step == 12 and not mark.exists():
            mark.touch()
            for each in model.parameters():
                each.grad.fill_(float("nan"))

torch.manual_seed(0)
model = Net()
args = TrainingArguments(
    "out", max_steps=20, save_steps=5, logging_steps=1, per_device_train_batch_size=4,
    report_to=[], use_cpu=True, seed=1, learning_rate=1e-2,
)
trainer = Trainer(model, args, train_dataset=Rows(), callbacks=[Poison()])
trainer.train(resume_from_checkpoint=sys.argv[1] if sys.argv[1:] else None)
if trainer.is_world_process_zero():
    torch.save(model.state_dict(), "result.pt")
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "program.py")


def trained(folder: Path, *before: str, **settings: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environment |= {"SLURM_FORGE_NODES": "off", "OMP_NUM_THREADS": "1", **settings}
    return subprocess.run(
        [*before, *TORCHRUN],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_goes_back_to_its_checkpoint_and_ends_with_the_weights_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    import torch

    alone = trained(tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr[-2000:]
    words = ("exec", "--name", "x", "--convention", "hf", "--metric-pattern", "hf")
    resume = ("--checkpoint-glob", "out/checkpoint-*", "--resume-arg", "{latest}")
    forge = (sys.executable, "-m", "slurm_forge.cli.main", *words, *resume, "--")
    done = trained(tmp_path / "forge", *forge, POISON="1")
    assert done.returncode == 0, done.stderr[-2000:]

    run = RunDirectory.at(tmp_path / "forge" / "runs" / "x")
    events = [record.event for record in read_journal(run)[0]]
    incidents = [each.incident for each in events if isinstance(each, IncidentSeen)]
    assert [each.cause for each in incidents] == [Cause.NON_FINITE]
    assert "nan" in incidents[0].evidence[0].text
    decisions = [each.decision for each in events if isinstance(each, DecisionTaken)]
    assert [each.target for each in decisions] == ["checkpoint-10"]
    assert [each.step for each in events if isinstance(each, Resumed)] == [0, 10]
    assert run_state(run).status is RunStatus.FINISHED
    expected, found = (
        torch.load(tmp_path / name / "result.pt", weights_only=True) for name in ("alone", "forge")
    )
    assert all(torch.equal(expected[key], found[key]) for key in expected)
