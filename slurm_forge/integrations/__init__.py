"""What experiment trackers need to know about a run, without importing any; called by the user.

Entry: ``trackers``.
"""

from __future__ import annotations

from slurm_forge.integrations.trackers import (
    mlflow_run_id,
    remember_mlflow_run,
    tensorboard_arguments,
    tracker_variables,
    wandb_arguments,
)

__all__ = [
    "mlflow_run_id",
    "remember_mlflow_run",
    "tensorboard_arguments",
    "tracker_variables",
    "wandb_arguments",
]
