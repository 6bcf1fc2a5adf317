"""The loggers of the frameworks go on with the same run after a kill: offline, where installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRANSFORMERS = """
import os, sys, torch, slurm_forge
from transformers import Trainer, TrainerCallback, TrainingArguments
from slurm_forge.integrations.transformers import ForgeCallback

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        out = self.layer(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == int(sys.argv[3]):
            found(run)
            os._exit(9)

data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(8)]
with slurm_forge.attach("logged", runs=sys.argv[1]) as run:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    trainer = Trainer(
        Net(),
        TrainingArguments(output_dir=sys.argv[2], max_steps=4, logging_steps=1, use_cpu=True,
                          save_strategy="no", report_to=[tracker], disable_tqdm=True),
        train_dataset=data, callbacks=[Kill()],
    )
    ForgeCallback(run).train(trainer)
    found(run)
"""

LIGHTNING = """
import os, sys, torch, slurm_forge
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from slurm_forge.integrations import mlflow_run_id
from slurm_forge.integrations.lightning import ForgeCallback, ForgeEnvironment

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Kill(Callback):
    def on_train_batch_end(self, trainer, *_, **__):
        if trainer.global_step == int(sys.argv[3]):
            found(run)
            os._exit(9)

with slurm_forge.attach("logged", runs=sys.argv[1]) as run:
    if tracker == "wandb":
        logger = WandbLogger(save_dir=sys.argv[2])
    elif tracker == "tensorboard":
        logger = TensorBoardLogger(os.environ["TENSORBOARD_LOGGING_DIR"], name="", version="")
    else:
        logger = MLFlowLogger(tracking_uri=f"file:{sys.argv[2]}/ml", run_id=mlflow_run_id(run))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=4, log_every_n_steps=1, logger=logger,
        default_root_dir=sys.argv[2], enable_checkpointing=False, enable_progress_bar=False,
        plugins=[ForgeEnvironment(run)], callbacks=[ForgeCallback(run), Kill()],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 4)))
    found(run)
"""

WANDB = """
tracker = "wandb"
def found(run):
    import wandb
    print("found", wandb.run.id, flush=True)
"""

MLFLOW = """
tracker = "mlflow"
def found(run):
    import mlflow
    from slurm_forge.integrations import remember_mlflow_run
    active = mlflow.active_run() or mlflow.last_active_run()
    id = logger.run_id if "logger" in globals() else active.info.run_id
    remember_mlflow_run(run, id)
    print("found", id, flush=True)
"""


TENSORBOARD = """
tracker = "tensorboard"
def found(run):
    print("found", run.step_number, flush=True)
"""


@pytest.mark.parametrize(("module", "tracker", "program"), [
    ("wandb", WANDB, TRANSFORMERS),
    ("mlflow", MLFLOW, TRANSFORMERS),
    ("wandb", WANDB, LIGHTNING),
    ("mlflow", MLFLOW, LIGHTNING),
], ids=["hf-wandb", "hf-mlflow", "lightning-wandb", "lightning-mlflow"])  # fmt: skip
def test_a_killed_run_goes_on_under_the_same_id(
    tmp_path: Path, module: str, tracker: str, program: str
) -> None:
    pytest.importorskip(module)
    first, second = killed_and_resumed(tmp_path, tracker, program)
    assert first == second


@pytest.mark.parametrize(("program", "tag"), [
    (TRANSFORMERS, "train/loss"), (LIGHTNING, "loss"),
], ids=["hf", "lightning"])  # fmt: skip
def test_a_killed_run_has_one_curve_in_a_folder_that_stays(
    tmp_path: Path, program: str, tag: str
) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed_and_resumed(tmp_path, TENSORBOARD, program)
    folder = tmp_path / "tensorboard"
    assert len(list(folder.glob("events.*"))) == 2
    curve = accumulators.EventAccumulator(str(folder))
    curve.Reload()
    assert {each.step for each in curve.Scalars(tag)} >= {1, 2, 3}


def killed_and_resumed(tmp_path: Path, tracker: str, program: str) -> list[str]:
    """What a program has found at its kill, and at its end in the launch behind that."""
    pytest.importorskip("transformers" if program is TRANSFORMERS else "lightning")
    script = tmp_path / "train.py"
    script.write_text(tracker + program)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "WANDB", "MLFLOW"))
    }
    environment |= {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    environment |= {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard")}
    environment |= {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/ml", "WANDB_DIR": str(tmp_path)}
    ids = []
    for killed_at, status in (("2", 9), ("-1", 0)):
        # Into a file: what a tracker leaves behind may hold a pipe open.
        with (tmp_path / f"output{killed_at}").open("w+") as output:
            done = subprocess.run(
                [sys.executable, str(script), str(tmp_path / "runs"), str(tmp_path), killed_at],
                stdout=output, stderr=output, check=False, env=environment, cwd=tmp_path,
            )  # fmt: skip
            output.seek(0)
            lines = output.read().splitlines()
        assert done.returncode == status, "\n".join(lines)
        ids += [line.split()[1] for line in lines if line.startswith("found")]
    return ids
