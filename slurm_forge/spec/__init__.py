"""The job file as a frozen value, with a default for nearly everything; read by all packages above.

Entry: ``job``.
"""

from __future__ import annotations

from slurm_forge.spec.job import BestMode, CheckpointSpec, JobSpec, KeepBest, ProbeSpec
from slurm_forge.spec.loading import (
    from_yaml,
    job_from_mapping,
    job_schema,
    load_job,
    to_mapping,
    to_yaml,
)
from slurm_forge.spec.recovery import Ladder, Recovery, Rung, SkipSamples, default_recovery
from slurm_forge.spec.resources import Resources
from slurm_forge.spec.safeguards import EnvironmentSpec, Policy, WatchdogSpec
from slurm_forge.spec.types import GpuCount

__all__ = [
    "BestMode",
    "CheckpointSpec",
    "EnvironmentSpec",
    "GpuCount",
    "JobSpec",
    "KeepBest",
    "Ladder",
    "Policy",
    "ProbeSpec",
    "Recovery",
    "Resources",
    "Rung",
    "SkipSamples",
    "WatchdogSpec",
    "default_recovery",
    "from_yaml",
    "job_from_mapping",
    "job_schema",
    "load_job",
    "to_mapping",
    "to_yaml",
]
