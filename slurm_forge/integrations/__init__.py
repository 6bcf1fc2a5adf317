"""Libraries of others: trainers that become runs, trackers that continue; called by the user.

``transformers``, ``accelerate`` and ``torchtitan`` are imported by whoever uses them; the others
import no library.

Entry: ``trackers``, ``tracker_events``, ``transformers``, ``accelerate``, ``torchtitan``.
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
