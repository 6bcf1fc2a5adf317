"""Keras 3 with its torch backend as a run: saved, stopped and resumed between two of its batches.

    with slurm_forge.attach("my-run") as run:
        model.compile(...)
        ForgeCallback(run).fit(model, x, y, epochs=10)      # in place of model.fit(x, y, epochs=10)

Each rank is given its own share of the samples; their gradients are averaged.  Keras keeps its
loop: after a resume it passes over the batches of the epoch that were trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.external_loop import (
    ExternalLoop,
    TakenState,
    replaced,
    require_same_samples,
)
from slurm_forge.training.core import rng
from slurm_forge.training.loop.run import Run

#: What of a callback is not its state.
_NOT_STATE = frozenset({"params", "_params", "model", "_model", "validation_data"})
_BATCH_SIZE = 32


class ForgeCallback(keras.callbacks.Callback):
    """Trains a compiled model of Keras as a run.

    A stop loses no step: it is saved between two batches.  An update whose gradient is not finite,
    or whose norm is far beyond the usual, is skipped on all ranks; the recovery plan's scale of the
    learning rate is applied.  The figures of an epoch are in ``status``.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._loop = ExternalLoop(run, keeps_gradients=True)
        self._state = TakenState(self._take)
        self._moments = TakenState(self._take_moments)
        self._others: list[Any] = []
        self._samples = 0
        self._epoch = 0
        #: Batches that are trained on in this epoch, and those that are still to be passed over.
        self._batches = 0
        self._to_pass = 0
        #: Whether the last batch was one of those.
        self._passed = False
        self._epoch_random: dict[str, torch.Tensor] = {}
        #: The norm of the gradients of the update that is being made, where Keras needs it, too.
        self._norm: torch.Tensor | None = None
        #: Which variables have no gradient, as of the first step.
        self._without: list[bool] | None = None
        self._resumed: dict[str, Any] | None = None

    def fit(self, model: Any, x: Any, y: Any = None, **options: Any) -> Any:
        """Train, in place of ``model.fit(x, y, …)``: from the run's checkpoint if it has one.

        Args:
            model: Compiled; its weights are the same on all ranks.
            x: Arrays, a ``DataLoader`` or a ``PyDataset`` with this rank's samples, as many batches
                on every rank.
            y: The targets, where ``x`` is arrays.
            **options: As for ``model.fit``.

        Returns:
            What ``model.fit`` returns.

        Raises:
            UnsupportedError: The backend is not torch, or the data or the optimizer can't be
                resumed exactly.
        """
        _require_supported(model, x, options)
        size = getattr(x, "batch_size", None) or options.get("batch_size") or _BATCH_SIZE
        self._samples = size * self._run.world_size
        self._others = list(options.pop("callbacks", None) or ())
        wrapped: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
            (model.optimizer, "apply", self._guard),
            (model.optimizer, "_clip_gradients", self._clip),
            (model, "_compute_loss", self._note_loss),
            (model, "evaluate", self._evaluate),
            *((each, "on_train_batch_begin", _unless(self._is_to_pass)) for each in self._others),
            *((each, "on_train_batch_end", _unless(self._was_passed)) for each in self._others),
        ]
        with ExitStack() as stack:
            for owner, name, wrap in wrapped:
                stack.enter_context(replaced(owner, name, wrap))
            stack.callback(setattr, model, "train_function", None)
            stack.callback(setattr, model, "_initial_epoch", None)
            return model.fit(x, y, callbacks=[*self._others, self], **options)

    # -- what Keras calls ----------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Register and restore."""
        run, model = self._run, self.model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._optimizer = _TorchOptimizer(model.optimizer, model.trainable_variables)
        run.register(model=_Variables(model.variables), optimizer=self._optimizer)
        run.register(trainer=self._state, optimizer_variables=self._moments)
        if run.restore():
            self._resume({**self._state.state, "moments": self._moments.state["variables"]})
        self._state.state = self._moments.state = None
        model.train_function = self._step(model.train_function)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Draw the order of the epoch from what it was drawn from before, if it is repeated."""
        saved, self._resumed, self._epoch = self._resumed, None, epoch
        if saved is None:
            self._batches, self._epoch_random = 0, rng.capture()
            return
        self._assign(self.model.metrics_variables, saved["metrics"])
        # Others have begun this epoch a second time, and may have changed the learning rate.
        self._assign(self.model.optimizer.variables, saved["moments"])
        for each, state in zip(self._stateful(), saved["callbacks"], strict=True):
            vars(each).update(_unpacked(state))
        rng.restore(self._epoch_random)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Another batch of an evaluation, which may be broken off here and is done again then."""
        self._loop.poll()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Hand the figures on; what follows belongs to the next epoch."""
        self._loop.log(logs or {})
        self._epoch, self._batches, self._epoch_random = epoch + 1, 0, {}

    def on_train_end(self, logs: Any = None) -> None:
        """The last state is part of the last checkpoint."""
        self._state.state = self._take()

    # -- what is wrapped -----------------------------------------------------------------------

    def _step(self, train: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The place where the run may save and stop is before it: the batch is fetched, as then.

        A callback for the end of each batch would have Keras wait for the figures of each.
        """

        def step(data: Any) -> Any:
            self._passed = self._is_to_pass()
            if self._passed:
                self._to_pass -= 1
                return self.model.get_metrics_result()
            self._loop.release_random()
            if self._loop.counted:
                self._loop.boundary()
            logs = train(data)
            self._batches += 1
            self._loop.count(self._samples)
            return logs

        return step

    def _guard(self, apply: Callable[..., None]) -> Callable[..., None]:
        """Have the run make the updates: checked, and the same on all ranks."""

        def guarded(gradients: list[Any], variables: Any = None) -> None:
            self._average(gradients)
            self._optimizer.update = apply
            if self._clips_all(gradients):
                self._norm = _global_norm(gradients)
                self._loop.note_norm(self._norm)
            self._loop.apply(self._optimizer)
            self._norm = None

        return guarded

    def _clips_all(self, gradients: list[Any]) -> bool:
        """Whether Keras needs the norm of these gradients, too: not where it accumulates them."""
        optimizer = self.model.optimizer
        if not optimizer.global_clipnorm or optimizer.gradient_accumulation_steps:
            return False
        return any(each is not None for each in gradients)

    def _clip(self, clip: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Clip as ``clip_by_global_norm`` of Keras does, with the norm that is known."""

        def clip_gradients(gradients: list[Any]) -> list[Any]:
            norm = self._norm
            if norm is None:
                return clip(gradients)
            most = self.model.optimizer.global_clipnorm
            scale = most * torch.minimum(1.0 / norm, torch.full_like(norm, 1.0 / most))
            return [None if each is None else each * scale for each in gradients]

        return clip_gradients

    def _average(self, found: list[torch.Tensor | None]) -> None:
        if self._run.world_size == 1:
            return
        if self._without is None:
            self._without = [each is None for each in found]
        if self._without != [each is None for each in found]:
            raise UnsupportedError(
                "a variable has a gradient in one step and none in another: ranks could average "
                "gradients of different variables with each other",
                next_step="Let every variable take part in every step, for instance with a factor "
                "of 0.",
            )
        gradients = [each for each in found if each is not None]
        if gradients:
            together = torch.cat([each.reshape(-1) for each in gradients])
            dist.all_reduce(together)
            together /= self._run.world_size
            at = 0
            for each in gradients:
                each.copy_(together[at : at + each.numel()].view_as(each))
                at += each.numel()

    def _note_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            if kwargs.get("training") and not self._loop.evaluating:
                self._loop.add_loss(loss.detach())
            return loss

        return compute

    def _evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate_in_a_phase(*args: Any, **kwargs: Any) -> Any:
            self._loop.release_random()
            self._state.state = self._take()  # a place to stop, too
            with self._loop.evaluation():
                results = evaluate(*args, **kwargs)
            self._state.state = None
            return results

        return evaluate_in_a_phase

    def _is_to_pass(self) -> bool:
        return self._to_pass > 0

    def _was_passed(self) -> bool:
        return self._passed

    # -- the state -----------------------------------------------------------------------------

    def _take_moments(self) -> dict[str, Any]:
        return {"variables": [each.value.detach() for each in self.model.optimizer.variables]}

    def _take(self) -> dict[str, Any]:
        model = self.model
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "samples": self._samples,
            "random": self._epoch_random,
            "metrics": [each.value.detach().cpu().clone() for each in model.metrics_variables],
            "callbacks": [_packed(vars(each)) for each in self._stateful()],
            "stop": bool(model.stop_training),
        }

    def _resume(self, saved: dict[str, Any]) -> None:
        require_same_samples(
            saved["samples"], self._samples, each="batch", step=self._run.step_number,
            how=f"{self._run.world_size} ranks of {self._samples // self._run.world_size}",
        )  # fmt: skip
        self._assign(self.model.optimizer.variables, saved["moments"])
        self.model._initial_epoch = self.params["epochs"] if saved["stop"] else saved["epoch"]
        self._epoch, self._batches = saved["epoch"], saved["batches"]
        self._to_pass, self._epoch_random = saved["batches"], saved["random"]
        if saved["random"]:  # in an epoch; else another one begins, with the states of now
            self._resumed = saved
            self._loop.hold_random()

    def _stateful(self) -> Iterator[Any]:
        yield from self._others
        yield self.model.history

    @staticmethod
    def _assign(variables: list[Any], values: list[torch.Tensor]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


class _Variables(nn.Module):
    """The variables of a model under their paths; as a module each layer has them once more.

    What is not trained is a buffer: ranks may differ in it.
    """

    def __init__(self, variables: list[Any]) -> None:
        super().__init__()
        for each in variables:
            add = self.register_parameter if each.trainable else self.register_buffer
            add(each.path.replace(".", "_"), each.value)


class _TorchOptimizer(torch.optim.Optimizer):
    """An optimizer of Keras for the run: it has no state of its own, and scales a learning rate."""

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        super().__init__([each.value for each in variables], {"lr": 1.0})
        self._optimizer, self._variables = optimizer, variables
        self.update: Callable[..., None] = optimizer.apply

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update with the gradients that the parameters have."""
        del closure
        scale = float(self.param_groups[0]["lr"])
        gradients = [each.grad for each in self.param_groups[0]["params"]]
        name = "_get_current_learning_rate"
        context: AbstractContextManager[None] = nullcontext()
        if scale != 1.0:
            context = replaced(self._optimizer, name, lambda rate: lambda: rate() * scale)
        with torch.no_grad(), context:
            self.update(gradients, self._variables)

    step.hooked = True  # type: ignore[attr-defined]  # by torch's profiler: Keras has its own


def _unless(passed: Callable[[], bool]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Other callbacks do not see batches that are passed over: they have seen them."""

    def wrap(hook: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if not passed():
                hook(*args, **kwargs)

        return call

    return wrap


def _global_norm(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    """As Keras computes it to clip by it, to the last bit."""
    squares = [torch.square(each).sum() for each in gradients if each is not None]
    return torch.stack(squares).sum().sqrt()


def _require_supported(model: Any, x: Any, options: dict[str, Any]) -> None:
    if keras.backend.backend() != "torch":
        raise UnsupportedError(
            f"Keras with the backend {keras.backend.backend()}: a run trains torch's parameters",
            next_step="Set KERAS_BACKEND=torch before keras is imported, or start the script with "
            "slurm-forge exec (docs/how-to/exec.md).",
        )
    if not hasattr(model, "_initial_epoch"):
        raise UnsupportedError(
            "this version of keras has no Model._initial_epoch: training would resume in epoch 0",
            next_step="Use keras 3.15, or start the script with slurm-forge exec "
            "(docs/how-to/exec.md).",
        )
    if options.get("steps_per_epoch") is not None:
        raise UnsupportedError(
            "steps_per_epoch: an epoch begins where the one before it has ended in the data, and "
            "no checkpoint holds that position",
            next_step="Leave it out: an epoch is one pass over the data.",
        )
    one = next(iter(x.values() if isinstance(x, dict) else x), None) if _is_nested(x) else x
    arrays = isinstance(one, np.ndarray | torch.Tensor)
    if not arrays and not isinstance(x, torch.utils.data.DataLoader | keras.utils.PyDataset):
        raise UnsupportedError(
            f"data of type {type(x).__name__}: whether it begins at the same sample in the next "
            "launch is not known",
            next_step="Give arrays, a torch DataLoader, or a keras.utils.PyDataset.",
        )
    if isinstance(x, torch.utils.data.DataLoader) and any(
        getattr(each, "generator", None) is not None
        for each in (x, x.sampler, x.batch_sampler, getattr(x.batch_sampler, "sampler", None))
    ):
        raise UnsupportedError(
            "a DataLoader with a generator of its own: no checkpoint holds its state, and the "
            "order of a resumed epoch would be another",
            next_step="Leave generator= out: the order is drawn from torch's own generator then.",
        )
    if type(model.optimizer).__name__ == "LossScaleOptimizer":
        raise UnsupportedError(
            "LossScaleOptimizer (mixed_float16): its gradients are scaled when they are judged",
            next_step='Use keras.mixed_precision.set_global_policy("mixed_bfloat16").',
        )


def _is_nested(x: Any) -> bool:
    return isinstance(x, list | tuple | dict)


def _packed(values: dict[str, Any]) -> dict[str, Any]:
    """What of a callback's attributes can be saved; arrays as tensors."""
    return {
        name: copied
        for name, value in values.items()
        if name not in _NOT_STATE and (copied := _plain(value)) is not ...
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list:
        parts = [_plain(each) for each in value]
        return ... if any(each is ... for each in parts) else parts
    if type(value) is dict and all(isinstance(each, str) for each in value):
        entries = {name: _plain(each) for name, each in value.items()}
        return ... if any(each is ... for each in entries.values()) else entries
    name = getattr(value, "__name__", "")
    if name and getattr(keras.ops, name, None) is value:  # how a callback compares
        return {"op": name}
    return ...


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            return value["array"].numpy()
        if value.keys() == {"op"}:
            return getattr(keras.ops, value["op"])
        return {name: _unpacked(each) for name, each in value.items()}
    return value
