"""What the user asks for: the job file as a frozen value, with a default for nearly everything."""

from __future__ import annotations

from slurm_forge.spec.environment import EnvironmentSpec, Policy
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
from slurm_forge.spec.types import GpuRequest
from slurm_forge.spec.watchdog import WatchdogSpec

__all__ = [
    "BestMode",
    "CheckpointSpec",
    "EnvironmentSpec",
    "GpuRequest",
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
