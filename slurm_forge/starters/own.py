"""A training that knows nothing of slurm_forge: it saves when SIGTERM comes, resumes by a flag.

One process, or as many as srun or torchrun starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

asked: list[int] = []


def on_term(number: int, frame: object) -> None:
    """Only noted: the ranks agree at the next step."""
    asked.append(number)


def join() -> tuple[int, int]:
    """Rank and number of ranks, from torchrun's variables or srun's."""
    # The batch step has no such id, or a negative one (Slurm 26.05).
    if "RANK" not in os.environ and os.environ.get("SLURM_STEP_ID", "").isdigit():
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        # The node that srun was started on, which is the job's first one and has rank 0.
        os.environ.setdefault("MASTER_ADDR", os.environ["SLURM_LAUNCH_NODE_IPADDR"])
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return int(os.environ.get("RANK", "0")), ranks


def somebody_was_asked(ranks: int, device: torch.device) -> bool:
    """Whether any rank has heard the signal: all of them stop at the same step."""
    flag = torch.tensor(float(bool(asked)), device=device)
    if ranks > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def main() -> None:
    """Train; exit 0 when it is through, and also after a save that SIGTERM asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait per step")
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_term)
    rank, ranks = join()
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    here = f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    device = torch.device(here)
    torch.manual_seed(1234)
    model: nn.Module = nn.Linear(8, 1).to(device)
    trained = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    step = 0
    if args.resume is not None:
        state = torch.load(args.resume, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    args.out.mkdir(parents=True, exist_ok=True)
    while step < args.steps:
        generator = torch.Generator().manual_seed(step * ranks + rank)
        samples = torch.randn(64, 8, generator=generator).to(device)
        loss = nn.functional.mse_loss(trained(samples).squeeze(1), samples.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(args.pace)
        stop = somebody_was_asked(ranks, device)
        if rank == 0 and (stop or step % 50 == 0 or step == args.steps):
            path = args.out / f"checkpoint-{step}.pt"
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
            print(f"step {step}: loss {loss.item():.4f}, saved", flush=True)
        if stop:
            break
    else:
        if rank == 0:
            (args.out / "finished").touch()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
