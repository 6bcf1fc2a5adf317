"""Lightning's Trainer as a run: saved, stopped and resumed between two of its batches.

    with slurm_forge.attach("my-run") as run:
        trainer = Trainer(..., plugins=[ForgeEnvironment(run)], callbacks=[ForgeCallback(run)])
        trainer.fit(model, loader)

The Trainer keeps its loops, its data and its schedules.  While it fits, some of its methods are
wrapped, on the objects alone.  Checkpoints are those of the run; what a checkpoint of Lightning has
besides weights and optimizers (loops, callbacks, the data module) is part of them.

``lightning`` or ``pytorch_lightning``: the one that the program has imported.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map_only

from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.integrations.external_loop import (
    ExternalLoop,
    nothing,
    replaced,
    require_same_samples,
    shield_workers,
)
from slurm_forge.integrations.lightning_data import (
    IndexOrder,
    fetch_over,
    has_state,
    repeatable,
    samples_of_batch,
    set_epoch,
    training_loaders,
)
from slurm_forge.training.core import rng
from slurm_forge.training.loop.positions import KeptState
from slurm_forge.training.loop.run import Run

if "lightning.pytorch" not in sys.modules and (
    "pytorch_lightning" in sys.modules or find_spec("lightning") is None
):
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from pytorch_lightning import Callback
else:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch import Callback

#: Strategies of which every rank has the whole model, and whose optimizers are torch's.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
#: What of a checkpoint of Lightning is registered with the run, or made by the program.
_NOT_KEPT = (
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


class ForgeEnvironment(ClusterEnvironment):
    """The ranks of a run, for ``Trainer(plugins=[ForgeEnvironment(run)])``.

    Lightning takes them as they are: it starts no processes, and requeues no job.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        for fabric in ("lightning.fabric", "lightning_fabric"):  # a program may use both
            module = sys.modules.get(f"{fabric}.plugins.environments")
            if module is not None:
                module.ClusterEnvironment.register(ForgeEnvironment)

    @property
    def creates_processes_externally(self) -> bool:
        """The ranks run already."""
        return True

    @property
    def main_address(self) -> str:
        """Where a single rank meets itself; several have met before."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Any port that is free."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Never by itself: a run is given."""
        return False

    def world_size(self) -> int:
        """The ranks of the run."""
        return self._run.world_size

    def set_world_size(self, size: int) -> None:
        """The run has its ranks."""

    def global_rank(self) -> int:
        """The rank in the run."""
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """The rank has its number."""

    def local_rank(self) -> int:
        """The place of this rank's device among those that Lightning sees."""
        index = self._run.device.index
        return self._run.local_rank if index is None else index

    def node_rank(self) -> int:
        """The node, as far as its ranks are numbered one after the other."""
        return 0 if self._run.rank == self._run.local_rank else 1

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what the Trainer was given with the ranks there are.

        Raises:
            UsageError: They do not fit.
        """
        _require_ranks(num_devices * num_nodes, self._run)


class ForgeCallback(Callback):
    """Trains a model of Lightning as a run: ``Trainer(callbacks=[ForgeCallback(run)])``.

    A stop loses no step: it is saved between two batches.  An update whose gradient is not finite,
    or whose norm is far beyond the usual, is skipped on all ranks; the recovery plan's scale of the
    learning rate is applied.  Figures that the Trainer logs are in ``status``.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
    """

    # Lightning calls each hook within a context for its profiler, which takes longer than most.
    on_train_batch_start = on_before_zero_grad = on_before_backward = None
    on_after_backward = on_before_optimizer_step = None

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loop = ExternalLoop(run)
        self._state = _TrainerState(self._take)
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
        self._updates = 0

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
        _require_supported(trainer, pl_module, self._run)
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
            (epoch, "_broadcast_sigterm_tensor", nothing),
            (epoch.val_loop, "run", self._evaluate),
            (epoch.val_loop, "setup_data", self._shield_evaluation),
            (plugin, "optimizer_step", self._guard),
            (plugin, "clip_grad_by_norm", self._clip_by_norm),
            (plugin, "clip_grad_by_value", self._clip_by_value),
            (epoch._results, "update_metrics", self._resume_metric),
        ):
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

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, if the batch has made an update."""
        self._loop.add_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        updates = trainer.fit_loop.epoch_loop.global_step
        if updates != self._updates:
            self._updates = updates
            self._loop.count(samples_of_batch(trainer) * trainer.accumulate_grad_batches)

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
            parameters = plugin.main_params(optimizer)
            self._loop.note_norm(torch.nn.utils.clip_grad_norm_(parameters, clip_val))

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
        if run.restore():
            self._resume_trainer(self._state.state or {})
        self._state.state = None
        self._updates = trainer.fit_loop.epoch_loop.global_step

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
        for name, metric in _metrics(trainer.lightning_module):
            _restore_metric(metric, saved["metrics"].get(name))
        self._epoch_random = saved["random"]
        if saved["ended"]:
            _end_restart(trainer.fit_loop)  # whoever trains on begins with another epoch
        else:
            self._resumed = saved
            self._loop.hold_random()

    def _continue(self, fetcher: Any) -> None:
        """Everything is as it was when the checkpoint was saved, but for the random states."""
        fit = self._trainer.fit_loop
        _end_restart(fit)
        (loader,) = training_loaders(self._trainer)
        if self._order is not None:
            self._order.pass_over()
        elif not has_state(loader):
            fetch_over(fetcher, fit.epoch_loop.batch_progress.current.ready)
        self._loop.release_random()

    def _note_position(self) -> None:
        """Of a loader without a length Lightning fetches one batch more than it trains on."""
        fit = self._trainer.fit_loop
        (loader,) = training_loaders(self._trainer)
        if has_state(loader) and fit._data_fetcher.length is None:
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
        for name in (*_NOT_KEPT, type(trainer.strategy.precision_plugin).__qualname__):
            checkpoint.pop(name, None)
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        position = {name: loops.pop(name) for name in ("combined_loader",) if name in loops}
        if self._before_waiting is not None:
            position = {"combined_loader": [self._before_waiting]}
        module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results
        state = {
            "checkpoint": checkpoint,
            "position": position,
            "accumulated": {key: each for key, of in results.items() if (each := _values(of))},
            "metrics": {name: _metric_state(metric) for name, metric in _metrics(module)},
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


class _TrainerState:
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

    def __init__(self, whole: _TrainerState, *, own: bool) -> None:
        super().__init__(None)
        self._whole, self._own = whole, own

    def state_dict(self) -> Any:
        """The part of the state that is kept, or that of now."""
        return self._whole.of(own=self._own)

    def load_state_dict(self, state: Any) -> None:
        """The part of a checkpoint."""
        self._whole.state = {**(self._whole.state or {}), **state}


def _require_ranks(count: int, run: Run) -> None:
    if count != run.world_size:
        raise UsageError(
            f"the Trainer has {count} ranks (devices x num_nodes), and the run has "
            f"{run.world_size}",
            next_step="Trainer(devices=…, num_nodes=…, plugins=[ForgeEnvironment(run)]): devices "
            "is the number of ranks per node, and their product is the number of ranks.",
        )


def _require_supported(trainer: Any, model: Any, run: Run) -> None:
    _require_ranks(trainer.world_size, run)
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        raise UnsupportedError(
            f"a Trainer with {strategy}: its checkpoints, or its updates, are its own",
            next_step='Use strategy="ddp", or start the script with slurm-forge exec '
            "(docs/how-to/exec.md).",
        )
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        raise UnsupportedError(
            "training_step(dataloader_iter) fetches as many batches as it likes: there is no "
            "position to resume at",
            next_step="Use training_step(batch, batch_idx).",
        )


def _values(metric: Any) -> dict[str, torch.Tensor]:
    """What has come together of a figure that is logged for the epoch; of its mean two sums."""
    if metric.has_reset or not (metric.is_tensor and metric.meta.on_epoch):
        return {}
    names = ("value", "cumulated_batch_size")
    return {name: getattr(metric, name) for name in names if hasattr(metric, name)}


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """The objects of torchmetrics; no state_dict has what they have accumulated."""
    for name, part in module.named_modules():
        if hasattr(part, "metric_state") and hasattr(part, "_update_count"):
            yield name, part


def _metric_state(metric: Any) -> dict[str, Any]:
    return {"values": dict(metric.metric_state), "updates": metric._update_count}


def _restore_metric(metric: Any, saved: dict[str, Any] | None) -> None:
    if saved is not None:
        for name, value in saved["values"].items():
            setattr(metric, name, copy.deepcopy(value))
        metric.to(metric.device)
        metric._update_count, metric._computed = saved["updates"], None


def _end_restart(loop: Any) -> None:
    """No loop makes up for what Lightning's own checkpoints lack."""
    loop._restarting = False
    for part in vars(loop).values():
        if hasattr(part, "_restarting"):
            _end_restart(part)
