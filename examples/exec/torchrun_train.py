"""A training script that knows nothing of slurm_forge: it saves at SIGTERM and resumes by a flag.

torchrun --nproc-per-node 2 torchrun_train.py --out out --steps 200 [--resume out/checkpoint-40.pt]
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

asked: list[int] = []


def on_term(number: int, frame: object) -> None:
    """Only noted: the ranks agree at the next step."""
    asked.append(number)


def main() -> None:
    """Train; exit 0 when it is through, and also after a save that SIGTERM asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_term)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights, step = torch.zeros(8), 0
    if args.resume is not None:
        state = torch.load(args.resume, weights_only=True)
        weights, step = state["weights"], state["step"]
    args.out.mkdir(parents=True, exist_ok=True)
    while step < args.steps:
        gradient = torch.full((8,), float(rank + step))
        dist.all_reduce(gradient)
        weights, step = weights - 0.01 * gradient, step + 1
        time.sleep(args.pace)
        flag = torch.tensor(float(bool(asked)))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if rank == 0 and (flag or step % 20 == 0 or step == args.steps):
            path = args.out / f"checkpoint-{step}.pt"
            torch.save({"weights": weights, "step": step}, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            print(f"step {step}: saved", flush=True)
        if flag:
            break
    else:
        if rank == 0:
            (args.out / "result.txt").write_text(f"{weights.sum().item()!r}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
