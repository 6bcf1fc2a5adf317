"""What other programs need to know of a run, without importing any of them."""

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
