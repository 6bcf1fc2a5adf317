"""A real Slurm on one machine, for tests: ``python -m slurm_forge.testing.cluster up``."""

from slurm_forge.testing.cluster.cluster import SlurmCluster
from slurm_forge.testing.cluster.records import AccountingRecord, JobRecord
from slurm_forge.testing.cluster.spec import (
    ClusterSpec,
    PartitionPreemption,
    PartitionSpec,
    Tracking,
    default_partitions,
)

__all__ = [
    "AccountingRecord",
    "ClusterSpec",
    "JobRecord",
    "PartitionPreemption",
    "PartitionSpec",
    "SlurmCluster",
    "Tracking",
    "default_partitions",
]
