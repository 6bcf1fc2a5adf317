"""Two workers of Ray Train that save when the job's time is up, and go on where they were.

Started by ``ray.sbatch``: the driver starts Ray on the batch node, and hears of the end alone.  A
file tells its workers, which report a checkpoint and return.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

OUT = Path(os.environ["OUT"]).absolute()
STOP = OUT / "stop"


def loop(settings: dict[str, Any]) -> None:
    """The training of a worker."""
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin, rank = 0, train.get_context().get_world_rank()
    latest = train.get_checkpoint()
    if latest is not None:
        with latest.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        begin = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(begin + 1, settings["steps"] + 1):
        # Asked before the step: collectives are in lockstep, so that all workers agree.
        told = torch.tensor(float(STOP.exists()))
        torch.distributed.all_reduce(told)
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(settings["pace"])
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        is_last = bool(told) or step == settings["steps"]
        if is_last or step % 50 == 0:
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                train.report({"step": step, "loss": loss.item()}, checkpoint=checkpoint)
        if is_last:
            break


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    STOP.unlink(missing_ok=True)
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000)
    signal.signal(signal.SIGTERM, lambda *_: STOP.touch())  # behind ray.init: it has one of its own
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": int(os.environ["STEPS"]), "pace": 0.05},
        scaling_config=ScalingConfig(num_workers=2),
        # The same name and place: the run goes on.
        run_config=RunConfig(name="big", storage_path=str(OUT / "ray")),
    )
    result: Any = trainer.fit()
    if result.metrics["step"] < int(os.environ["STEPS"]):
        sys.exit(3)  # told to stop
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / "state.pt", weights_only=True)
    weights = [each.tolist() for each in saved["model"].values()]
    (OUT / "result.txt").write_text(f"{saved['step']} {weights}\n")
