"""Workers of Horovod's elastic mode that save at SIGTERM, and resume by a flag.

Started by ``horovod.sbatch``.  ``state.commit()`` keeps the state in the memory of the workers that
live; what a requeue resumes from is a file.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

asked: list[int] = []


def save(state: Any, path: Path) -> None:
    """Into a file that has its name once it is whole."""
    values = {"step": state.step, "model": state.model.state_dict()}
    torch.save(values | {"optimizer": state.optimizer.state_dict()}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    print(f"step {state.step}: saved", flush=True)


@hvd.elastic.run  # type: ignore[untyped-decorator]
def train(state: Any, args: argparse.Namespace) -> bool:
    """Whether all steps are done."""
    while state.step < args.steps:
        rows = torch.randn(
            8, 4, generator=torch.Generator().manual_seed(2 * state.step + hvd.rank())
        )
        loss = (state.model(rows) - rows.sum(1, keepdim=True)).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        time.sleep(args.pace)
        # The same on all workers, so that they leave behind the same step.
        stops = bool(hvd.allreduce(torch.tensor(float(bool(asked))), name="stops", op=hvd.Sum))
        if hvd.rank() == 0:
            print(f"step {state.step} loss {loss.item():.6f}", flush=True)
            if stops or state.step % 50 == 0 or state.step == args.steps:
                save(state, args.out / f"checkpoint-{state.step}.pt")
        if stops:
            return False
        if state.step % 10 == 0:
            state.commit()
    return True


def main() -> None:
    """Train, and write the weights once all steps are done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    hvd.init()
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if args.resume is not None:
        saved = torch.load(args.resume, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    args.out.mkdir(parents=True, exist_ok=True)
    done = train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=step), args)
    if done and hvd.rank() == 0:
        weights = [each.tolist() for each in model.state_dict().values()]
        (args.out / "result.txt").write_text(f"{args.steps} {weights}\n")


if __name__ == "__main__":
    main()
