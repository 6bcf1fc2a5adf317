"""A script of somebody's own that makes a run of itself."""

from __future__ import annotations

from train import train

import slurm_forge as forge

if __name__ == "__main__":
    with forge.attach(spec={"args": {"steps": 20}}) as run:
        train(run, steps=20)
    print(f"behind the block on rank {run.rank}", flush=True)
