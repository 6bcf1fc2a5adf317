"""A script of somebody's own: ``srun python tests/attached.py STEPS PACE``."""

from __future__ import annotations

import sys

import slurm_forge as forge
from tests.jobs import train

if __name__ == "__main__":
    spec = {
        "args": {"steps": int(sys.argv[1]), "pace": float(sys.argv[2])},
        "checkpoint": {"every_steps": 20, "every_minutes": None},
    }
    with forge.attach(spec=spec) as run:
        train(run)
    print(f"behind the block on rank {run.rank}", flush=True)
