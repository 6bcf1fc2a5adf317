"""What a checkpoint of the run holds of a Trainer of Lightning, besides weights and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slurm_forge.training.loop.positions import KeptState

#: What of a checkpoint of Lightning is registered with the run, or made by the program.
NOT_KEPT = (
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    *(f"{of}{name}" for of in ("", "datamodule_") for name in ("hyper_parameters", "hparams_name")),
    "hparams_type",
    "datamodule_hparams_type",
)

#: What of the Trainer's state each rank has of its own.
_OWN = frozenset(
    {"accumulated", "callback_metrics", "metrics", "order", "position", "random", "should_stop"}
)


class TrainerState:
    """What the Trainer has at a boundary, once something asks for it; None is asked for anew."""

    def __init__(self, take: Callable[[], dict[str, Any]]) -> None:
        self._take = take
        self.state: dict[str, Any] | None = None

    def parts(self) -> dict[str, KeptState]:
        """What is registered: what is the same on all ranks, and what each rank has of its own."""
        return {"trainer": _Part(self, own=False), "trainer_rank": _Part(self, own=True)}

    def of(self, *, own: bool) -> dict[str, Any]:
        """One of the two parts."""
        if self.state is None:
            self.state = self._take()
        return {name: each for name, each in self.state.items() if (name in _OWN) is own}


class _Part(KeptState):
    """One part of the Trainer's state; it is loaded into the whole."""

    def __init__(self, whole: TrainerState, *, own: bool) -> None:
        super().__init__(None)
        self._whole, self._own = whole, own

    def state_dict(self) -> Any:
        """The part of the state that is kept, or that of now."""
        return self._whole.of(own=self._own)

    def load_state_dict(self, state: Any) -> None:
        """The part of a checkpoint."""
        self._whole.state = {**(self._whole.state or {}), **state}


def values_of(metric: Any) -> dict[str, torch.Tensor]:
    """What has come together of a figure that is logged for the epoch; of its mean two sums."""
    if metric.has_reset or not (metric.is_tensor and metric.meta.on_epoch):
        return {}
    names = ("value", "cumulated_batch_size")
    return {name: getattr(metric, name) for name in names if hasattr(metric, name)}


def metrics_of(module: Any) -> Iterator[tuple[str, Any]]:
    """The objects of torchmetrics; no state_dict has what they have accumulated."""
    for name, part in module.named_modules():
        if hasattr(part, "metric_state") and hasattr(part, "_update_count"):
            yield name, part


def metric_state(metric: Any) -> dict[str, Any]:
    """What a metric of torchmetrics has accumulated."""
    return {"values": dict(metric.metric_state), "updates": metric._update_count}


def restore_metric(metric: Any, saved: dict[str, Any] | None) -> None:
    """Have it go on from what it had accumulated, if that was saved."""
    if saved is not None:
        for name, value in saved["values"].items():
            setattr(metric, name, copy.deepcopy(value))
        metric.to(metric.device)
        metric._update_count, metric._computed = saved["updates"], None


def end_restart(loop: Any) -> None:
    """No loop makes up for what Lightning's own checkpoints lack."""
    loop._restarting = False
    for part in vars(loop).values():
        if hasattr(part, "_restarting"):
            end_restart(part)
