"""What a program has registered: models, optimizers, and anything else that has a state.

How far a run is: what of a checkpoint is neither a tensor nor the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_forge.errors import UnsupportedError
from slurm_forge.vocabulary.json_value import Json


@dataclass(slots=True)
class Registry:
    """Registered objects by name; the names are the keys in every checkpoint of the run."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Take in one object, or a list of them under numbered names."""
        if value is None:
            return
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self.add(f"{name}.{index}", item)
            return
        if name in self.models or name in self.optimizers or name in self.others:
            raise UnsupportedError(
                f"{name!r} is registered twice",
                next_step="Give each object a name of its own: run.register(generator=…, …).",
            )
        if isinstance(value, nn.Module):
            self.models[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self.others[name] = value
        else:
            raise UnsupportedError(
                f"{name!r} ({type(value).__name__}) has no state_dict and load_state_dict",
                next_step="Register objects with both, or keep plain values in run.extra.",
            )

    def names(self) -> list[Json]:
        """Every name with the kind of its object, in the order of the alphabet."""
        everything = {**self.models, **self.optimizers, **self.others}
        return [f"{name} ({type(value).__name__})" for name, value in sorted(everything.items())]

    @property
    def schedulers(self) -> list[Any]:
        """Learning-rate schedulers that advance once per step (not those that need a metric)."""
        from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

        return [
            other
            for other in self.others.values()
            if isinstance(other, LRScheduler) and not isinstance(other, ReduceLROnPlateau)
        ]

    @property
    def scaler(self) -> Any:
        """The gradient scaler, if one is registered."""
        return next((o for o in self.others.values() if isinstance(o, GradScaler)), None)

    def ddp(self) -> Iterable[DistributedDataParallel]:
        """Models wrapped in DistributedDataParallel."""
        return [m for m in self.models.values() if isinstance(m, DistributedDataParallel)]


@dataclass(slots=True)
class Progress:
    """Counts of steps and samples, which phases are done, and the program's own plain values."""

    step: int = 0
    consumed: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    #: The highest loss that was usual, as rank 0 has seen it.
    loss_summit: float | None = None
    phases: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "step": self.step,
            "consumed": self.consumed,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_summit": self.loss_summit,
            "phases": dict(self.phases),
            "extra": dict(self.extra),
        }

    def restore(self, body: Mapping[str, Any]) -> None:
        """In place, because the program may hold a reference."""
        self.step = int(body["step"])
        self.consumed = int(body["consumed"])
        self.skipped = int(body["skipped"])
        self.skipped_in_a_row = int(body["skipped_in_a_row"])
        summit = body.get("loss_summit")  # checkpoints from before have none
        self.loss_summit = None if summit is None else float(summit)
        self.phases = {str(name): int(step) for name, step in body["phases"].items()}
        self.extra.clear()
        self.extra.update(body["extra"])
