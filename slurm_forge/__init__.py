"""slurm_forge: training runs that finish by themselves on any Slurm cluster.

The names below are the public interface.  They are loaded on first use, so that importing the
package costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_forge.errors import ForgeError, RefuseResume
    from slurm_forge.launch.attach import attach
    from slurm_forge.launch.submit.api import submit
    from slurm_forge.launch.submitit.job import ForgeJob
    from slurm_forge.spec import JobSpec
    from slurm_forge.training.core.duration import (
        Epochs,
        Steps,
    )
    from slurm_forge.training.core.loss import Loss
    from slurm_forge.training.data.batches import Batch
    from slurm_forge.training.data.worker_shield import shield_worker
    from slurm_forge.training.loop.run import Run
    from slurm_forge.vocabulary.decision import Decision, Incident

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Decision",
    "Epochs",
    "ForgeError",
    "ForgeJob",
    "Incident",
    "JobSpec",
    "Loss",
    "RefuseResume",
    "Run",
    "Steps",
    "attach",
    "shield_worker",
    "submit",
]

_WHERE = {
    "Batch": "slurm_forge.training.data.batches",
    "Decision": "slurm_forge.vocabulary.decision",
    "Epochs": "slurm_forge.training.core.duration",
    "Incident": "slurm_forge.vocabulary.decision",
    "ForgeError": "slurm_forge.errors",
    "ForgeJob": "slurm_forge.launch.submitit.job",
    "JobSpec": "slurm_forge.spec",
    "Loss": "slurm_forge.training.core.loss",
    "RefuseResume": "slurm_forge.errors",
    "Run": "slurm_forge.training.loop.run",
    "Steps": "slurm_forge.training.core.duration",
    "attach": "slurm_forge.launch.attach",
    "shield_worker": "slurm_forge.training.data.worker_shield",
    "submit": "slurm_forge.launch.submit.api",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'slurm_forge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
