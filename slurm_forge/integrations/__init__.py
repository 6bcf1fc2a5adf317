"""Libraries of others: trainers that become runs, trackers that continue; called by the user.

``trackers`` and ``tracker_events`` import no library; the others are imported by whoever uses them.

Entry: ``trackers``, ``transformers``, ``accelerate``, ``lightning``, ``keras``, ``torchtitan``.
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
