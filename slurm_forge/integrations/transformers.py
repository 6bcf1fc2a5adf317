"""Hugging Face's Trainer as a run: saved, stopped and resumed between two of its steps.

    with slurm_forge.attach("my-run") as run:
        trainer = Trainer(...)                # of transformers, or a subclass of it, such as TRL's
        ForgeCallback(run).train(trainer)     # in place of trainer.train()

The Trainer keeps its loop, its data and its schedule.  While it trains, some of its methods are
wrapped, on the objects alone; the update itself is skipped on all ranks where the gradient is not
finite.  Checkpoints are those of the run.  What the Trainer counts (``TrainerState``) is in
``run.extra``, and is handed to it as the ``trainer_state.json`` of a folder from which it resumes;
weights, optimizer, schedule and random states are restored by the run, before the first step.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from slurm_forge.errors import CheckpointError, UnsupportedError
from slurm_forge.integrations.accelerate import guarded_step, noted_norm, own_optimizer
from slurm_forge.integrations.external_loop import (
    ExternalLoop,
    nothing,
    replaced,
    require_same_samples,
    shield_workers,
)
from slurm_forge.training.loop.run import Run

#: Under which ``run.extra`` has what the Trainer counts.
_EXTRA = "trainer"
#: Besides: whether the batch of the next step was fetched, whether an evaluation was going on, and
#: whether the Trainer was to write a folder of its own behind that; the samples of a step.
_FETCHED, _PENDING, _SAVES, _SAMPLES = "fetched", "evaluating", "saves", "samples"
#: The name of the Trainer's own file for it.
_STATE_FILE = "trainer_state.json"
#: What of it is this process's own.
_OF_THE_PROCESS = frozenset({"is_local_process_zero", "is_world_process_zero"})
_NAMES = tuple(each.name for each in fields(TrainerState) if each.name not in _OF_THE_PROCESS)
#: Ends of the names of figures that every rank measures for itself.
_MEASURED = ("_runtime", "_per_second")
#: What loads the Trainer's own checkpoint: the run has restored more than that.
_LOADERS = ("_load_from_checkpoint", "_load_rng_state")


class ForgeCallback(TrainerCallback):
    """Trains a ``transformers.Trainer`` as a run.

    A stop loses no step: it is saved between two of them.  An update whose gradient is not finite,
    or whose norm is far beyond the usual, is skipped on all ranks; the recovery plan's scale of
    the learning rate is applied.  Figures that the Trainer logs are in ``status``.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loop = ExternalLoop(run, keeps_gradients=True)
        self._trainer: Any = None
        self._samples = 0
        #: Whether the batch of the next step is fetched, and the evaluation that goes on, if one
        #: does: whether the Trainer is to write a folder of its own behind it.
        self._fetched = False
        self._evaluation: bool | None = None
        #: What the Trainer has logged, without the figures that each rank measures for itself.
        self._log: list[dict[str, Any]] = []
        #: Whether no step is left since the last one was made, or stopped early, before a resume.
        self._over = False
        #: Whether batches are passed over, and no step was made since the resume.
        self._passes_over = False

    def train(self, trainer: Trainer, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train, in place of ``trainer.train()``: from the run's checkpoint if it has one.

        Args:
            trainer: Its model and its arguments are final; it has not trained yet.
            resume_from_checkpoint: As for ``trainer.train``, where the run has no checkpoint.

        Returns:
            What ``trainer.train()`` returns.

        Raises:
            UnsupportedError: The Trainer uses DeepSpeed, or this version of transformers lacks a
                method that has to be replaced while it resumes.  The steps that are done had
                another number of samples.  An ``IterableDataset`` ended before their position.
            CheckpointError: The newest checkpoint turned out to be damaged.
        """
        _require_supported(trainer)
        _fit_memory(trainer, self._run)
        self._trainer = trainer
        trainer.add_callback(self)
        point = self._run.resume_point()
        with ExitStack() as stack:
            stack.callback(trainer.remove_callback, self)
            for name, wrap in (
                ("training_step", self._note_loss),
                ("evaluate", self._in_a_phase),
                ("_load_best_model", self._save_first),
            ):
                stack.enter_context(replaced(trainer, name, wrap))
            for loader in ("get_train_dataloader", "get_eval_dataloader"):
                stack.enter_context(replaced(trainer, loader, _shielded))
            stack.enter_context(
                replaced(trainer.accelerator, "clip_grad_norm_", partial(noted_norm, self._loop))
            )
            if point is not None and _EXTRA in point.extra:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trainer-"))
                saved = point.extra[_EXTRA]
                _require_same_samples(trainer.args, saved)
                self._log = list(saved["log_history"])
                resume_from_checkpoint = _resume_folder(Path(folder), saved)
                stack.enter_context(replaced(trainer, "get_batch_samples", self._none_when_over))
                for loader in _LOADERS:
                    stack.enter_context(replaced(trainer, loader, nothing))
            try:
                return trainer.train(resume_from_checkpoint=resume_from_checkpoint)
            finally:
                getattr(trainer.optimizer, "__dict__", {}).pop("step", None)

    # -- what the Trainer calls ----------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Register and restore; the Trainer knows already which step it is at."""
        run, trainer = self._run, self._trainer
        self._samples = _samples(args)
        scaler = getattr(trainer.accelerator, "scaler", None)
        run.register(
            model=trainer.model_wrapped,
            optimizer=own_optimizer(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            scaler=scaler,
        )
        resumed = run.restore()
        if resumed and run.step_number != state.global_step:
            raise CheckpointError(
                f"the Trainer was to resume at step {state.global_step}, and the newest checkpoint "
                f"that could be read is that of step {run.step_number}",
                next_step="Where it is damaged: nothing, the next start of the ranks resumes from "
                "the older one.  Where another program wrote it: start a run of another name.",
            )
        if scaler is None:  # one that has a scaler leaves such updates out by itself
            trainer.optimizer.step = guarded_step(self._loop, trainer.optimizer)
        if resumed and _EXTRA in run.extra:  # not where an evaluation before step 1 was broken off
            self._restore_state(args, state, control)
        run.extra[_EXTRA] = self._counted

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The place where the run may save and stop; its logs and evaluations lie behind the step.

        The next batch is fetched by now, as it will be when training resumes here.
        """
        del args, state, control
        self._passes_over = False
        self._loop.release_random()
        if self._loop.counted:
            self._fetched = True
            self._loop.boundary()
            self._fetched = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Count the step."""
        del args, state, control
        self._loop.count(self._samples)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The end of the data, which must not come while it is passed over."""
        del args
        if self._over:  # what an epoch's end is followed by was done before
            control.should_log = control.should_evaluate = control.should_save = False
        elif self._passes_over:
            raise UnsupportedError(
                "the dataset came to its end before the position of the checkpoint (step "
                f"{state.global_step}): with max_steps, the Trainer does not know how long it is",
                next_step="Give the IterableDataset a __len__, or let it repeat without an end.",
            )

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Another batch of an evaluation, which may be broken off here and is done again then."""
        del args, state, control
        self._loop.poll()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Hand the figures on to the run."""
        del args, control
        if state.log_history:
            last = state.log_history[-1]
            self._log.append({k: v for k, v in last.items() if not k.endswith(_MEASURED)})
        self._loop.log(logs or {})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The last state is part of the last checkpoint."""
        del args, state, control
        self._run.extra[_EXTRA] = self._counted()

    # -- what is wrapped -----------------------------------------------------------------------

    def _note_loss(self, training_step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = training_step(*args, **kwargs)
            self._loop.add_loss(loss)
            return loss

        return step

    def _in_a_phase(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate_in_a_phase(*args: Any, **kwargs: Any) -> Any:
            if self._loop.evaluating:  # one of several datasets
                return evaluate(*args, **kwargs)
            self._evaluation = self._trainer.control.should_save
            self._run.extra[_EXTRA] = self._counted()  # a place to stop, too
            with self._loop.evaluation():
                metrics = evaluate(*args, **kwargs)
            self._evaluation = None
            self._run.extra[_EXTRA] = self._counted
            return metrics

        return evaluate_in_a_phase

    def _none_when_over(self, get_batch_samples: Callable[..., Any]) -> Callable[..., Any]:
        def get(*args: Any, **kwargs: Any) -> Any:
            return ([], None) if self._over else get_batch_samples(*args, **kwargs)

        return get

    def _save_first(self, load_best_model: Callable[..., Any]) -> Callable[..., Any]:
        """Other weights are loaded before the run is over: those of now belong to the step."""

        def save_and_load(*args: Any, **kwargs: Any) -> Any:
            self._run.save()
            return load_best_model(*args, **kwargs)

        return save_and_load

    # -- the state -----------------------------------------------------------------------------

    def _counted(self) -> dict[str, Any]:
        """What the Trainer counts, equal on all ranks."""
        values = vars(self._trainer.state)
        body = {name: values[name] for name in _NAMES}
        pending = self._evaluation is not None
        body.update({"log_history": self._log, _FETCHED: self._fetched, _PENDING: pending})
        body.update({_SAMPLES: self._samples, _SAVES: bool(self._evaluation)})
        stateful = [*self._stateful_callbacks(), self._trainer.control]
        body["stateful_callbacks"] = {type(each).__name__: each.state() for each in stateful}
        return body

    def _stateful_callbacks(self) -> Iterator[Any]:
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                yield each

    def _restore_state(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        saved = self._run.extra[_EXTRA]
        callbacks = saved["stateful_callbacks"]
        args.eval_on_start = False  # it was done
        # An early stop counts on, where the program has the same callbacks.
        for each in self._stateful_callbacks():
            for name, value in callbacks.get(type(each).__name__, {}).get("attributes", {}).items():
                setattr(each, name, value)
        early = saved["global_step"] < saved["max_steps"]
        stopped = callbacks["TrainerControl"]["args"]["should_training_stop"]
        control.should_training_stop = early and stopped
        if saved[_PENDING]:
            self._repeat_evaluation(state, control, saves=saved[_SAVES])
        self._over = control.should_training_stop or state.global_step >= state.max_steps
        control.should_training_stop = self._over
        at_epoch_end = float(state.epoch).is_integer()
        self._passes_over = not at_epoch_end
        if saved[_FETCHED] or not at_epoch_end:
            self._loop.hold_random()

    def _repeat_evaluation(
        self, state: TrainerState, control: TrainerControl, *, saves: bool
    ) -> None:
        """Do again what was broken off: it comes before the next step, and what follows it."""
        trainer = self._trainer
        control.should_evaluate, control.should_save = True, saves
        loss = torch.zeros((), device=trainer.args.device)
        trainer._maybe_log_save_evaluate(
            loss, None, trainer.model_wrapped, None, state.epoch, None, time.time()
        )
        control.should_evaluate = control.should_save = False


def _require_supported(trainer: Trainer) -> None:
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError(
            "a Trainer with DeepSpeed: its engine makes the updates and keeps the state",
            next_step="Start the script with slurm-forge exec (docs/how-to/exec.md).",
        )
    if trainer.args.auto_find_batch_size:
        raise UnsupportedError(
            "auto_find_batch_size begins training a second time, with everything registered",
            next_step="Set per_device_train_batch_size, and auto_find_batch_size=False.",
        )
    strategy = getattr(trainer.args, "train_sampling_strategy", "random")
    seedable = trainer.accelerator.dataloader_config.use_seedable_sampler
    if strategy == "group_by_length" or (strategy == "random" and not seedable):
        raise UnsupportedError(
            "the order of the samples is drawn from a generator that no checkpoint holds "
            f"(train_sampling_strategy={strategy!r}, use_seedable_sampler={seedable}): a resume "
            "within an epoch would continue in another order",
            next_step='Use train_sampling_strategy="random" with use_seedable_sampler=True (the '
            'defaults), "batch_rebalance" or "sequential".',
        )
    missing = [name for name in _LOADERS if not callable(getattr(trainer, name, None))]
    if missing:
        raise UnsupportedError(
            f"this version of transformers has no Trainer.{missing[0]}: what the run restores "
            "would be overwritten",
            next_step="Use transformers 5.24, or start the script with slurm-forge exec.",
        )


def _fit_memory(trainer: Trainer, run: Run) -> None:
    """Use the micro-batch of the recovery plan, and tell of the own one where it can be cut.

    Then a step has the same samples in more micro-batches, on all ranks together.  Of a Trainer
    that makes its own loader or order nobody knows what a smaller micro-batch changes.
    """
    for name in ("get_train_dataloader", "_get_train_sampler"):
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            return
    args, dataset = trainer.args, trainer.train_dataset
    strategy = getattr(args, "train_sampling_strategy", "random")
    config = trainer.accelerator.dataloader_config
    if (
        args.n_gpu > 1
        or strategy not in ("random", "sequential")
        or config.split_batches
        or config.dispatch_batches
        or not hasattr(dataset, "__len__")
        or len(dataset) % _samples(args)  # else the last step of an epoch would have others
    ):
        return
    size, most = args.per_device_train_batch_size, run.recovery.micro_batch
    if most is not None and most < size:
        smaller = max(each for each in range(1, most + 1) if size % each == 0)
        args.gradient_accumulation_steps *= size // smaller
        args.per_device_train_batch_size = trainer._train_batch_size = smaller
    run.micro_batch = args.per_device_train_batch_size


def _samples(args: TrainingArguments) -> int:
    """The samples of a step, over all ranks."""
    count: int = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return count


def _require_same_samples(args: TrainingArguments, saved: dict[str, Any]) -> None:
    """``UnsupportedError`` where the Trainer would take other samples for those that are done."""
    if not args.ignore_data_skip:
        require_same_samples(
            saved[_SAMPLES], _samples(args), each="step", step=saved["global_step"],
            how=f"per_device_train_batch_size {args.train_batch_size}, "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps}, "
            f"{args.world_size} ranks",
            otherwise="; or pass over no sample: ignore_data_skip=True",
        )  # fmt: skip


def _shielded(get_dataloader: Callable[..., Any]) -> Callable[..., Any]:
    def get(*args: Any, **kwargs: Any) -> Any:
        loader = get_dataloader(*args, **kwargs)
        shield_workers(getattr(loader, "base_dataloader", loader))  # accelerate's holds torch's
        return loader

    return get


def _resume_folder(folder: Path, state: dict[str, Any]) -> str:
    """A checkpoint folder of the Trainer with nothing in it but what it counts."""
    counted = {name: value for name, value in state.items() if name in _NAMES}
    path = folder / f"checkpoint-{state['global_step']}"
    path.mkdir()
    (path / _STATE_FILE).write_text(json.dumps(counted), encoding="utf-8")
    return str(path)
