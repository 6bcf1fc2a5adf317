"""``python submitted.py local|forge|api PLACE``: the ways that begin in Python."""

from __future__ import annotations

import sys

import submitit
from train import train

import slurm_forge as forge


def main() -> None:
    """A run that is there already as local processes, or the function on the cluster."""
    way, place = sys.argv[1:]
    if way == "local":
        local = submitit.LocalExecutor(folder="logs")
        local.update_parameters(timeout_min=30)
        print(local.submit(forge.ForgeJob(place)).result())
    elif way == "api":
        resources = {"mem": "1500M", "time": "00:20:00", "partition": "preempt"}
        spec = {"name": "api", "args": {"steps": 200, "pace": 0.5}, "resources": resources}
        print(forge.submit(train, spec, runs=place).path)
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
