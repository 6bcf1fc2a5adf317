"""``python submitted.py local|forge RUN|FOLDER``: the ways through submitit."""

from __future__ import annotations

import sys

import submitit
from train import train

import slurm_forge as forge


def main() -> None:
    """A run that is there already as local processes, or a function on the cluster."""
    way, place = sys.argv[1:]
    if way == "local":
        local = submitit.LocalExecutor(folder="logs")
        local.update_parameters(timeout_min=30)
        print(local.submit(forge.ForgeJob(place)).result())
    else:
        cluster = submitit.AutoExecutor(folder=place, cluster="forge")
        cluster.update_parameters(
            name="submitted",
            timeout_min=20,
            slurm_partition="preempt",
            slurm_mem="1500M",
        )
        print(cluster.submit(train, steps=200, pace=0.5).job_id, flush=True)


if __name__ == "__main__":
    main()
