"""For every packaged site a job that is usual there, as its users would write it."""

from __future__ import annotations

from typing import Any

NODES = (1, 2, 16)

#: ``resources`` of the job, but for the number of nodes.
ASKED: dict[str, dict[str, Any]] = {
    "alliance": {
        "tasks_per_node": 4, "gpus_per_node": "h100:4", "cpus_per_task": 12, "mem": "0",
        "time": "1-00:00:00", "account": "def-someone-gpu",
    },
    "cineca_leonardo": {
        "tasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 8, "time": "1-00:00:00",
        "partition": "boost_usr_prod", "account": "someproject",
    },
    "cscs_clariden": {
        "tasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 72, "time": "12:00:00",
        "partition": "normal", "account": "a01",
    },
    "generic": {"tasks_per_node": 4, "gpus_per_node": 4, "time": "1-00:00:00"},
    "idris_jean_zay": {
        "tasks_per_node": 4, "gpus_per_node": "h100:4", "cpus_per_task": 24, "time": "20:00:00",
        "account": "abc@h100", "qos": "qos_gpu_h100-t3",
    },
    "jsc_juwels_booster": {
        "tasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 12, "time": "1-00:00:00",
        "partition": "booster", "account": "someproject",
    },
    "kempner": {
        "tasks_per_node": 4, "gpus_per_node": "h100:4", "cpus_per_task": 16, "mem": "1000G",
        "time": "3-00:00:00", "partition": "kempner_requeue", "account": "kempner_some_lab",
    },
    "lumi_g": {
        "tasks_per_node": 8, "gpus_per_node": 8, "cpus_per_task": 7, "mem": "480G",
        "time": "2-00:00:00", "partition": "standard-g", "account": "project_465000001",
    },
    "mila": {
        "tasks_per_node": 4, "gpus_per_node": "a100:4", "cpus_per_task": 6, "mem": "120G",
        "time": "7-00:00:00", "partition": "long",
    },
    "nersc_perlmutter": {
        "tasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 32, "time": "1-00:00:00",
        "qos": "preempt", "constraint": "gpu&hbm80g", "account": "m1234_g",
    },
    "olcf_frontier": {
        "tasks_per_node": 8, "gpus_per_node": 8, "cpus_per_task": 7, "time": "02:00:00",
        "partition": "batch", "account": "abc123",
    },
    "princeton_della": {
        "tasks_per_node": 4, "gpus_per_node": "gpu80:4", "cpus_per_task": 12, "mem": "400G",
        "time": "1-00:00:00",
    },
    "stanford_sherlock": {
        "tasks_per_node": 4, "gpus_per_node": "h100:4", "cpus_per_task": 8, "time": "2-00:00:00",
        "partition": "owners",
    },
    "tacc_frontera": {
        "tasks_per_node": 4, "gpus_per_node": 4, "time": "2-00:00:00", "partition": "rtx",
    },
    "tacc_horizon": {
        "tasks_per_node": 2, "gpus_per_node": 2, "time": "2-00:00:00", "partition": "gb",
    },
    "tacc_vista": {
        "tasks_per_node": 1, "gpus_per_node": 1, "cpus_per_task": 72, "time": "2-00:00:00",
        "partition": "gh", "account": "someproject",
    },
    "test_cluster": {
        "tasks_per_node": 2, "gpus_per_node": 2, "mem": "1500M", "time": "00:30:00",
        "partition": "preempt",
    },
    "ulhpc_iris": {
        "tasks_per_node": 4, "gpus_per_node": "volta32:4", "cpus_per_task": 7,
        "time": "2-00:00:00", "partition": "gpu", "qos": "besteffort",
    },
}  # fmt: skip
