"""Lightning's Trainer as a run: saved, stopped and resumed between two of its batches.

    with slurm_forge.attach("my-run") as run:
        trainer = Trainer(..., plugins=[ForgeEnvironment(run)], callbacks=[ForgeCallback(run)])
        trainer.fit(model, loader)

The Trainer keeps its loops, its data and its schedules.  While it fits, some of its methods are
wrapped, on the objects alone.  Checkpoints are those of the run; what a checkpoint of Lightning has
besides weights and optimizers (loops, callbacks, the data module) is part of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map_only

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.external_loop import (
    ExternalLoop,
    nothing,
    replaced,
    require_same_samples,
    shield_workers,
)
from slurm_forge.integrations.index_order import IndexOrder
from slurm_forge.integrations.lightning_data import (
    fetch_over,
    has_state,
    repeatable,
    samples_of_batch,
    set_epoch,
    training_loaders,
)
from slurm_forge.integrations.lightning_environment import (
    Callback,
    ForgeEnvironment,
    require_supported,
)
from slurm_forge.integrations.lightning_state import (
    NOT_KEPT,
    TrainerState,
    end_restart,
    metric_state,
    metrics_of,
    restore_metric,
    values_of,
)
from slurm_forge.training.core import rng
from slurm_forge.training.loop.run import Run
from slurm_forge.training.step.gradient_guard import drop_gradients
from slurm_forge.training.step.gradient_norms import clip_gradients

__all__ = ["ForgeCallback", "ForgeEnvironment"]


class ForgeCallback(Callback):
    """Trains a model of Lightning as a run: ``Trainer(callbacks=[ForgeCallback(run)])``.

    A stop loses no step: it is saved between two batches.  An update whose gradient is not finite,
    or whose norm is far beyond the usual, is skipped on all ranks; the recovery plan's scale of the
    learning rate is applied.  Figures that the Trainer logs are in ``status``.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
    """

    # Lightning calls each hook within a context for its profiler, which takes longer than most.
    on_train_batch_start = on_train_batch_end = on_before_zero_grad = on_before_backward = None
    on_after_backward = on_before_optimizer_step = None

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loop = ExternalLoop(run)
        self._state = TrainerState(self._take)
        self._wrapped = ExitStack()
        self._trainer: Any = None
        #: What the Trainer resumes from, until its first batch.
        self._resumed: dict[str, Any] | None = None
        #: The random states that this epoch began with; of a loader with indices their order.
        self._epoch_random: dict[str, torch.Tensor] = {}
        self._order: IndexOrder | None = None
        #: The position of a loader that is read ahead of: before the batch that waits.
        self._before_waiting: Any = None
        #: Of figures that are logged for an epoch: what was accumulated before the resume.
        self._accumulated: dict[str, dict[str, torch.Tensor]] = {}
        #: What counts the updates of the Trainer, and how many there were at the last step.
        self._optimizer_steps: Any = None
        self._updates = 0
        #: Of the training loader: samples of a batch over all ranks, and whether it has a state.
        self._samples = 0
        self._has_state = False

    # -- what Lightning calls ------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap what has to be: no loop has begun.

        Raises:
            UsageError: The Trainer has another number of ranks than the run.
            UnsupportedError: It has a strategy, a loop or loaders that can't be resumed exactly, or
                it fits for a second time.
        """
        if stage != "fit":
            return
        require_supported(trainer, pl_module, self._run)
        if self._trainer is not None:
            raise UnsupportedError(
                "a second Trainer.fit in one run: everything is registered by the first",
                next_step="Give each fit a run of its own, of another name.",
            )
        self._trainer = trainer
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        plugin = trainer.strategy.precision_plugin
        for owner, name, wrap in (
            (trainer._signal_connector, "register_signal_handlers", nothing),
            (trainer._logger_connector, "log_metrics", self._log),
            (fit, "_load_combined_loader_states", self._begin_data),
            (epoch, "on_run_start", self._begin_epoch),
            (epoch, "advance", self._next_batch),
            (epoch.automatic_optimization, "run", self._count),
            (epoch.manual_optimization, "run", self._count),
            (epoch, "_broadcast_sigterm_tensor", nothing),
            (epoch.val_loop, "run", self._evaluate),
            (epoch.val_loop, "setup_data", self._shield_evaluation),
            (plugin, "optimizer_step", self._guard),
            (plugin, "clip_grad_by_norm", self._clip_by_norm),
            (plugin, "clip_grad_by_value", self._clip_by_value),
        ):
            self._wrap(owner, name, wrap)

    def _wrap(self, owner: Any, name: str, wrap: Callable[..., Callable[..., Any]]) -> None:
        if hasattr(owner, name):
            self._wrapped.enter_context(replaced(owner, name, wrap))
        elif wrap is not nothing:  # what is not there need not be kept from anything
            self._wrapped.close()
            raise UnsupportedError(
                f"this version of Lightning has no {type(owner).__name__}.{name}, which has to "
                "be wrapped",
                next_step="Use lightning 2.6, or start the script with slurm-forge exec "
                "(docs/how-to/exec.md).",
            )

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Another batch of a validation, which may be broken off here and is done again then."""
        self._loop.poll()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save before the Trainer takes apart what there is to save."""
        self._state.state = self._take(ended=True)
        if self._loop.counted:
            self._run.save()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Unwrap: a stop of the run comes as one, too."""
        self._wrapped.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Unwrap."""
        self._wrapped.close()

    # -- what is wrapped -----------------------------------------------------------------------

    def _begin_data(self, load_states: Callable[[], None]) -> Callable[[], None]:
        """The loaders exist, and nothing is fetched: the place to resume from a checkpoint."""

        def begin() -> None:
            trainer = self._trainer
            (loader,) = training_loaders(trainer)
            if not self._run.restored:
                self._restore()
            shield_workers(loader)
            self._samples, self._has_state = samples_of_batch(trainer), has_state(loader)
            self._order = repeatable(loader)
            if self._resumed is None:
                load_states()
                self._epoch_random = rng.capture()
                return
            set_epoch(loader, trainer.current_epoch)
            load_states()
            rng.restore(self._epoch_random)
            if self._order is not None:
                done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
                self._order.resume(self._resumed["order"], done)

        return begin

    def _begin_epoch(self, on_run_start: Callable[[Any], None]) -> Callable[[Any], None]:
        """The loader begins to iterate, but for the first epoch of a launch, where it has."""

        def begin(fetcher: Any) -> None:
            if self._trainer.current_epoch > 0 and self._resumed is None:
                self._epoch_random = rng.capture()
                self._note_position()
            on_run_start(fetcher)

        return begin

    def _next_batch(self, advance: Callable[[Any], None]) -> Callable[[Any], None]:
        """The place where the run may save and stop: before the next batch is fetched."""

        def next_batch(fetcher: Any) -> None:
            resumed, self._resumed = self._resumed, None
            if resumed is not None:
                self._continue(fetcher)
                if resumed["validating"]:
                    return  # a validation comes behind the batch
            if self._loop.counted:
                self._state.state = None
                self._loop.boundary()
                self._state.state = None
            self._note_position()
            advance(fetcher)

        return next_batch

    def _count(self, run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Count the step, if the batch has made an update."""

        def run_and_count(*args: Any, **kwargs: Any) -> dict[str, Any]:
            outputs = run(*args, **kwargs)
            self._loop.add_loss(outputs.get("loss"))
            updates = self._optimizer_steps.completed
            if updates != self._updates:
                self._updates = updates
                self._loop.count(self._samples * self._trainer.accumulate_grad_batches)
            return outputs

        return run_and_count

    def _evaluate(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            if self._trainer.sanity_checking:
                return run()
            # A place to stop, too: what follows the batch is done again then.
            stops = not self._trainer.fit_loop._should_accumulate()
            if stops:
                self._state.state = copy.deepcopy(self._take(validating=True))
            with self._loop.evaluation(stops=stops):
                outputs = run()
            self._state.state = None
            return outputs

        return evaluate

    def _shield_evaluation(self, setup_data: Callable[[], None]) -> Callable[[], None]:
        def setup() -> None:
            setup_data()
            combined = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
            for loader in () if combined is None else combined.flattened:
                shield_workers(loader)

        return setup

    def _guard(self, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
        """Have the run make the updates: checked, and the same on all ranks."""
        plugin = self._trainer.strategy.precision_plugin

        def step(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            if getattr(plugin, "scaler", None) is not None:  # it skips such updates by itself
                return optimizer_step(optimizer, model=model, closure=closure, **kwargs)
            result = plugin._wrap_closure(model, optimizer, closure)
            self._loop.apply(optimizer)
            return result

        return step

    def _clip_by_norm(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        plugin = self._trainer.strategy.precision_plugin

        def clip_by_norm(optimizer: Any, clip_val: float) -> None:
            self._loop.note_norm(clip_gradients(plugin.main_params(optimizer), clip_val))

        return clip_by_norm

    def _clip_by_value(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Judge the norm from before: what is infinite is finite behind it."""
        plugin = self._trainer.strategy.precision_plugin

        def clip_by_value(optimizer: Any, clip_val: float) -> None:
            gradients = [p.grad for p in plugin.main_params(optimizer) if p.grad is not None]
            self._loop.note_norm(torch.nn.utils.get_total_norm(gradients))
            clip(optimizer, clip_val)

        return clip_by_value

    def _log(self, log_metrics: Callable[..., None]) -> Callable[..., None]:
        def log(metrics: dict[str, Any], step: int | None = None) -> None:
            if not self._trainer.sanity_checking:
                self._loop.log(metrics)
            log_metrics(metrics, step)

        return log

    # -- the state -----------------------------------------------------------------------------

    def _restore(self) -> None:
        """Register and restore everything, the Trainer's loops included."""
        run, trainer = self._run, self._trainer
        optimizers = trainer.strategy.optimizers
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        plateaus = [each for each in schedulers if isinstance(each, ReduceLROnPlateau)]
        run.register(
            model=trainer.strategy.model,
            optimizer=optimizers[0] if len(optimizers) == 1 else list(optimizers),
            scheduler=[each for each in schedulers if each not in plateaus],
            scaler=getattr(trainer.strategy.precision_plugin, "scaler", None),
            **self._state.parts(),
        )
        for each in optimizers:
            if type(each).zero_grad is torch.optim.Optimizer.zero_grad:
                self._wrap(each, "zero_grad", partial(_dropping, each))
        if run.restore():
            self._resume_trainer(self._state.state or {})
        self._state.state = None
        epoch = trainer.fit_loop.epoch_loop
        if trainer.lightning_module.automatic_optimization:
            self._loop.keeps_gradients = True
            self._optimizer_steps = epoch.automatic_optimization.optim_progress.optimizer.step.total
        else:
            self._optimizer_steps = epoch.manual_optimization.optim_step_progress.total
        self._updates = self._optimizer_steps.completed

    def _resume_trainer(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        require_same_samples(
            saved["samples"], samples_of_batch(trainer), each="batch", step=self._run.step_number,
            how=f"{trainer.world_size} ranks of {samples_of_batch(trainer) // trainer.world_size}",
        )  # fmt: skip
        weights = trainer.strategy.lightning_module_state_dict()
        checkpoint = connector._loaded_checkpoint = {**saved["checkpoint"], "state_dict": weights}
        checkpoint["loops"]["fit_loop"]["state_dict"].update(saved["position"])
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_loops()
        connector._loaded_checkpoint = {}
        for scheduler, state in zip(self._plateaus(), saved["plateaus"], strict=True):
            scheduler.load_state_dict(state)
        trainer.should_stop = saved["should_stop"]
        trainer._logger_connector._callback_metrics.update(saved["callback_metrics"])
        self._accumulated = dict(saved["accumulated"])
        if self._accumulated:
            results = trainer.fit_loop.epoch_loop._results
            self._wrap(results, "update_metrics", self._resume_metric)
        for name, metric in metrics_of(trainer.lightning_module):
            restore_metric(metric, saved["metrics"].get(name))
        self._epoch_random = saved["random"]
        if saved["ended"]:
            end_restart(trainer.fit_loop)  # whoever trains on begins with another epoch
        else:
            self._resumed = saved
            self._loop.hold_random()

    def _continue(self, fetcher: Any) -> None:
        """Everything is as it was when the checkpoint was saved, but for the random states."""
        fit = self._trainer.fit_loop
        end_restart(fit)
        if self._order is not None:
            self._order.pass_over()
        elif not self._has_state:
            fetch_over(fetcher, fit.epoch_loop.batch_progress.current.ready)
        self._loop.release_random()

    def _note_position(self) -> None:
        """Of a loader without a length Lightning fetches one batch more than it trains on."""
        if self._has_state and self._trainer.fit_loop._data_fetcher.length is None:
            (loader,) = training_loaders(self._trainer)
            self._before_waiting = copy.deepcopy(loader.state_dict())

    def _resume_metric(self, update: Callable[..., None]) -> Callable[..., None]:
        """What is logged for an epoch goes on from what was accumulated before the resume."""
        results = self._trainer.fit_loop.epoch_loop._results

        def update_metrics(key: str, value: Any, batch_size: int) -> None:
            if key in self._accumulated:
                metric, accumulated = results[key], self._accumulated.pop(key)
                for name, saved in accumulated.items():
                    setattr(metric, name, saved.to(getattr(metric, name).device))
            update(key, value, batch_size)

        return update_metrics

    def _take(self, *, validating: bool = False, ended: bool = False) -> dict[str, Any]:
        """What a checkpoint has besides what is registered by itself."""
        trainer = self._trainer
        # By position: the argument asks for all of the state, and unpickles nothing.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
        for name in (*NOT_KEPT, type(trainer.strategy.precision_plugin).__qualname__):
            checkpoint.pop(name, None)
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        position = {name: loops.pop(name) for name in ("combined_loader",) if name in loops}
        if self._before_waiting is not None:
            position = {"combined_loader": [self._before_waiting]}
        module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results
        state = {
            "checkpoint": checkpoint,
            "position": position,
            "accumulated": {key: each for key, of in results.items() if (each := values_of(of))},
            "metrics": {name: metric_state(metric) for name, metric in metrics_of(module)},
            "plateaus": [each.state_dict() for each in self._plateaus()],
            "callback_metrics": dict(trainer._logger_connector._callback_metrics),
            "random": self._epoch_random,
            "order": None if self._order is None else self._order.state(),
            "samples": samples_of_batch(trainer),
            "should_stop": trainer.should_stop,
            "validating": validating,
            "ended": ended,
        }
        # What is on a device is taken for equal on all ranks.
        return cast(dict[str, Any], tree_map_only(torch.Tensor, torch.Tensor.cpu, state))

    def _plateaus(self) -> Iterator[ReduceLROnPlateau]:
        for each in self._trainer.lr_scheduler_configs:
            if isinstance(each.scheduler, ReduceLROnPlateau):
                yield each.scheduler


def _dropping(optimizer: Any, zero_grad: Callable[..., None]) -> Callable[..., None]:
    """In place of ``zero_grad``: what that takes beyond it makes up for what the run adds."""

    def drop(set_to_none: bool = True) -> None:
        if set_to_none:
            drop_gradients(optimizer)
        else:
            zero_grad(set_to_none=False)

    return drop
