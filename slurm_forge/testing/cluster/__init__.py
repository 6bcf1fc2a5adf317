"""A real Slurm on one machine; called by tests and by ``python -m slurm_forge.testing.cluster up``.

Entry: ``cluster``.
"""

from slurm_forge.testing.cluster.cluster import SlurmCluster
from slurm_forge.testing.cluster.records import SacctRow, ScontrolJob
from slurm_forge.testing.cluster.spec import (
    ClusterSpec,
    PartitionPreemption,
    PartitionSpec,
    Tracking,
    default_partitions,
)

__all__ = [
    "ClusterSpec",
    "PartitionPreemption",
    "PartitionSpec",
    "SacctRow",
    "ScontrolJob",
    "SlurmCluster",
    "Tracking",
    "default_partitions",
]
