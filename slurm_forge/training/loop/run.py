"""The object that a training function is given: register, batches, step, phase, save, log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.control import Member
from slurm_forge.control.messages.rank import FunctionReturned, RankFinished
from slurm_forge.device.accelerator import is_accelerator
from slurm_forge.device.memory import allocator_counters
from slurm_forge.errors import CheckpointError, UnsupportedError
from slurm_forge.journal import JournalWriter
from slurm_forge.training.checkpointing.saver import ResumePoint
from slurm_forge.training.checkpointing.supported_state import require_supported_wrapper
from slurm_forge.training.core import rng
from slurm_forge.training.core.duration import (
    Epochs,
    Steps,
)
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.core.memory_report import (
    Pressure,
)
from slurm_forge.training.core.process_group import ProcessGroups
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.data.dataset_fingerprint import DataVersion
from slurm_forge.training.loop.assembly import assemble
from slurm_forge.training.loop.batch_loop import BatchLoop
from slurm_forge.training.loop.batches_request import BatchesRequest
from slurm_forge.training.loop.custom_loop import CustomLoop, checked_steps
from slurm_forge.training.loop.resume import Resumer
from slurm_forge.training.loop.step import Step
from slurm_forge.vocabulary.plan import RecoveryPlan

_F = TypeVar("_F", bound=Callable[..., Any])


class Run:
    """One rank's view of the run; every rank calls the same methods in the same order.

    A training function gets it as its first argument; ``attach`` returns it in a script.

    Attributes:
        name (str): The name of the run.
        directory (pathlib.Path): The run directory, on storage that all nodes see.
        args (dict[str, Any]): The job's ``args``, for a training function that takes the run alone.
        device (torch.device): The device of this rank: its GPU, else the CPU.
        rank (int): The rank of this process, from 0.
        local_rank (int): The rank among those on the same node, from 0.
        world_size (int): The number of ranks.
        attempt (int): Which start of the Slurm job this is, from 1.
        launch (int): Which start of the ranks within the attempt this is, from 1.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        device: torch.device,
        groups: ProcessGroups,
        member: Member,
        journal: JournalWriter | None,
        timings: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        self.device = device
        self.rank = context.rank
        self.local_rank = context.local_rank
        self.world_size = context.world_size
        self.directory = context.directory.path
        self.name = context.spec.name
        self.args: dict[str, Any] = dict(context.spec.args)
        self.attempt = context.brief.attempt
        self.launch = context.brief.launch
        self._context = context
        self._groups = groups
        self._member = member
        self._journal = journal
        parts = assemble(
            context,
            device=device,
            groups=groups,
            member=member,
            journal=journal,
            on_counted=self._on_counted,
        )
        self._layout = parts.layout
        self._registry = parts.registry
        self._hooks = parts.hooks
        self._progress = parts.progress
        self._compatibility = parts.compatibility
        self._saver = parts.saver
        self._save_schedule = parts.save_schedule
        self._first_steps = parts.first_steps
        self._step_lifecycle = parts.step_lifecycle
        self._boundaries = parts.boundaries
        self._progress_log = parts.progress_log
        self._probe = parts.probe
        self._requests = parts.requests
        self._active_plan = parts.active_plan
        self._instability = parts.instability
        self._skip_tracker = parts.skip_tracker
        self._pressure = Pressure()
        self._resumer = Resumer(
            context, parts, groups=groups, member=member, journal=journal, timings=timings
        )
        self._batch_loop = BatchLoop(
            context, parts, self._resumer, groups=groups, device=device, boundary=self._boundary
        )
        self._custom_loop = CustomLoop(
            context, parts, self._resumer, groups=groups, boundary=self._boundary
        )

    # -- what the program says ---------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Register everything that has a state, before ``batches`` or ``restore``.

        ``run.step`` and ``run.train_step`` step learning-rate schedulers, once per step.  In a loop
        that calls ``run.advance`` the program steps them.  What differs between ranks, such as the
        position of an iterator, is saved for each rank.

        Args:
            **objects: Objects with ``state_dict`` and ``load_state_dict``, or lists of them:
                models, optimizers, schedulers, a ``GradScaler``, an EMA.  The names are the keys in
                every checkpoint of the run; None is ignored.

        Raises:
            UnsupportedError: The checkpoint is loaded already, a name is registered twice, an
                object has no ``state_dict`` and ``load_state_dict``, or a model is wrapped by
                FSDP1.  What else can't be saved (a parameter on the meta device, a Partial
                placement, an optimizer of a model that is not registered) is refused by
                ``batches`` and ``restore``, before the first step.
        """
        if self._resumer.restored:
            raise UnsupportedError(
                "run.register() after training has begun: the checkpoint was loaded without it",
                next_step="Register everything before run.batches() or run.restore().",
            )
        for name, value in objects.items():
            require_supported_wrapper(name, value)
            self._registry.add(name, value)
        self._custom_loop.positions.registered()

    @property
    def step_number(self) -> int:
        """Optimizer steps done, skipped ones included; a rollback decreases it."""
        return self._progress.step

    @property
    def restored(self) -> bool:
        """Whether the checkpoint, if any, is loaded; from then on ``step_number`` is right."""
        return self._resumer.restored

    def data(
        self,
        name: str,
        *,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        version: str | None = None,
        contents: bool = False,
    ) -> None:
        """Declare what the run trains on, so that a resume notices when the data changed.

        Call it before ``batches`` or ``restore``.  What a difference does is ``environment: {data:
        …}`` in the job file.

        Args:
            name: What the data set is called in messages, such as ``train``.
            files: Files and folders, compared by name, size and modification time.
            version: A version of your own instead of files.
            contents: Compare what is in the files, too.

        Raises:
            UnsupportedError: The checkpoint is loaded already.
        """
        if self._resumer.restored:
            raise UnsupportedError(
                "run.data() after training has begun: nothing was compared with it",
                next_step="Call it before run.batches() or run.restore().",
            )
        if self.rank == 0:
            self._compatibility.data(
                name, DataVersion.of(files, version=version, contents=contents)
            )

    @property
    def recovery(self) -> RecoveryPlan:
        """The recovery plan in force: every parameter that recovery has changed."""
        return self._active_plan.plan

    @property
    def extra(self) -> dict[str, Any]:
        """Your own plain values (JSON), part of every checkpoint; change the dict in place.

        A function without arguments is called for its value when a checkpoint is made.
        """
        return self._progress.extra

    def on(self, name: str, *, all_ranks: bool = False) -> Callable[[_F], _F]:
        """Register a hook: ``@run.on("on_save")``.

        Hooks run on rank 0.  A hook that raises ends the launch, as any error of the program does.
        An ``on_resume`` hook that raises ``RefuseResume`` has the run held instead.

        Args:
            name: One of the names below [Hooks](#hooks).
            all_ranks: Call it on every rank, so that it may use collectives (an evaluation of a
                sharded model); for ``on_train_begin``, ``on_resume`` and ``on_train_end``.

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            ValueError: There is no hook of that name, or it runs on rank 0 only.
        """
        return lambda hook: self._hooks.add(name, hook, all_ranks=all_ranks)

    def restore(
        self,
        *,
        mesh: DeviceMesh | None = None,
        data_parallel: Sequence[str] | None = None,
    ) -> bool:
        """Load the newest checkpoint that may be resumed from.  Collective.

        ``batches`` and ``steps`` call it.  Any other loop calls it once: after ``register``, and
        before it fetches its first batch.

        Args:
            mesh: The device mesh of all ranks, as for ``batches``.
            data_parallel: The dimensions that divide the samples, as for ``batches``.

        Returns:
            Whether there was a checkpoint.

        Raises:
            UsageError: The mesh does not tell which ranks are given different samples, or some
                ranks compute one model together and no mesh is given.
            UnsupportedError: A registered iterator was iterated over already.
            CheckpointMissingError: The run has saved before, and no checkpoint can be used.
            MismatchError: The run is resumed with something that the job file says to refuse.
        """
        self._layout.give(mesh, data_parallel, restored=self._resumer.restored)
        if not self._resumer.restored:
            self._custom_loop.positions.require_untouched()
            self._resumer.restore()
            self._custom_loop.restored()
            self._member.enter("train", started=False)
        return self._resumer.restore()

    def resume_point(self) -> ResumePoint | None:
        """Look up where ``restore`` will continue, before anything is registered.  Collective.

        For trainers of other libraries, which count their epochs and pass over samples before they
        have a model and an optimizer to restore.

        Returns:
            The step and the ``extra`` of the newest checkpoint that may be resumed from; None where
            there is none.
        """
        return self._saver.resume_point()

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        until: Steps | Epochs,
        micro_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        mesh: DeviceMesh | None = None,
        data_parallel: Sequence[str] | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        accumulate: int = 1,
        sample_ids: Callable[[Any], Any] | None = None,
    ) -> Iterator[Batch]:
        """Restore, then yield the batches that are left, one per optimizer step.

        Of a dataset with an index, or a ``DataLoader`` over one, the order of the samples depends
        on the seed of the job (or the sampler) and on the samples consumed alone: it is the same
        after any interruption, for any number of ranks and loader workers.  Python's, numpy's and
        torch's generators are seeded before each ``dataset[index]``.  Of anything else that is
        iterated over, each data-parallel rank's own state is part of every checkpoint.

        Args:
            dataset: A map-style dataset (``__len__`` and ``__getitem__``), a ``DataLoader`` over
                one, or an iterable with ``state_dict`` and ``load_state_dict``, such as
                torchdata's ``StatefulDataLoader``.
            global_batch_size: Samples of one optimizer step over all ranks; divisible by the number
                of data-parallel ranks.  A dataset needs it.  With an iterable it says that the
                items are samples; without it, every item is a micro-batch.
            until: When training is over: ``Steps(n)`` or ``Epochs(n)``.
            micro_batch_size: Samples per rank and forward pass; None is the rank's whole share.
                The recovery plan may decrease it, never the global batch.
            num_workers: Data-loader worker processes per rank; 0 loads in this process.
            collate_fn: Makes a micro-batch of a list of samples; None is torch's
                ``default_collate``.
            sampler: Yields the indices of the whole run, epoch by epoch; the ranks share them out.
            batch_sampler: Yields lists of indices, each of which is a micro-batch of one rank.
            accumulate: Micro-batches of each rank in one step, where the source or the batch
                sampler makes them.
            sample_ids: Returns the ids of the samples in an item of an iterable: they are recorded,
                and one that comes twice in an epoch is an error.
            mesh: The device mesh of all ranks, where some of them compute one model together.  Its
                dimensions go by their names: ``dp``, ``dp_replicate``, ``dp_shard``, ``fsdp`` and
                their like divide the samples; ranks along ``tp``, ``cp`` and ``pp`` get the same
                samples.  None: every rank is a data-parallel rank.
            data_parallel: The names of the dimensions that divide the samples, where their names do
                not tell (``ep``).

        Yields:
            This rank's share of the batch; its tensors are on ``device``.

        Raises:
            UsageError: The source can't be resumed exactly, it yields nothing, the sizes do not
                fit, or it can't be told which ranks are given different samples.
            UnsupportedError: The loop body applied no step to a batch, or samplers differ between
                ranks.
            CheckpointMissingError: As ``restore``, on the first batch.
            MismatchError: As ``restore``, on the first batch; the source does not take back its
                state, or a sampler yields another order.
        """
        return self._batch_loop.batches(
            BatchesRequest(
                source=dataset,
                global_batch_size=global_batch_size,
                until=until,
                micro_batch_size=micro_batch_size,
                num_workers=num_workers,
                collate_fn=collate_fn,
                sampler=sampler,
                batch_sampler=batch_sampler,
                accumulate=accumulate,
                sample_ids=sample_ids,
                mesh=mesh,
                data_parallel=data_parallel,
            )
        )

    def steps(self, *, until: Steps) -> Iterator[int]:
        """Restore, then yield the number of each step that is left: for a loop of your own.

        The body fetches its data from wherever it likes, computes, updates, and calls ``advance``
        once, as the last thing.  An iterator with a position is registered, or built from the
        number of the step.

        Args:
            until: When training is over: ``Steps(n)``.

        Yields:
            Steps done before this one: 0 for the first step of the run.

        Raises:
            UsageError: ``until`` is not a number of steps.
            UnsupportedError: The body did not count its step, or a registered iterator was iterated
                over before the checkpoint is loaded.
            CheckpointMissingError: As ``restore``, on the first step.
            MismatchError: As ``restore``, on the first step.
        """
        return self._custom_loop.steps(checked_steps(until))

    def advance(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        grad_norm: torch.Tensor | float | None = None,
        samples: int | None = None,
    ) -> None:
        """Count one optimizer step of a loop of your own.  Every rank calls it.

        It is the last thing of the loop's body, and the step boundary: the run saves, stops and
        probes here and nowhere else.  What belongs to the step comes before it: an EMA, a
        learning-rate scheduler (none is stepped for you).

        Where the step was made without ``run.apply``, a loss or norm that is not finite has reached
        the weights: training is resumed from a checkpoint before it.  Values on a device are read
        one step late.

        Args:
            loss: This rank's mean loss: a number or a tensor of one element.
            grad_norm: The gradient norm over all ranks, before clipping, of an update that the loop
                has made itself.
            samples: The samples of the step, over all ranks; counted in the progress of the run.

        Raises:
            UnsupportedError: The checkpoint is not loaded, the step is counted already, or the call
                is inside ``batches``, ``step`` or a phase.
            UsageError: A value is not one number.
        """
        self._custom_loop.advance(loss, grad_norm, samples)

    def count_step(
        self,
        loss: torch.Tensor | float | None = None,
        *,
        grad_norm: torch.Tensor | float | None = None,
        samples: int | None = None,
    ) -> None:
        """Count one optimizer step, and neither save nor stop: ``boundary`` does.

        For training loops that evaluate, log or write files between the update and the place where
        the run may stop.  Everything else calls ``advance``.

        Args:
            loss: As for ``advance``.
            grad_norm: As for ``advance``.
            samples: As for ``advance``.

        Raises:
            UnsupportedError: As ``advance``.
            UsageError: A value is not one number.
        """
        self._custom_loop.count("run.count_step", loss, grad_norm, samples)

    def boundary(self) -> None:
        """Save or stop here, if that is due: behind a step that ``count_step`` has counted.

        Collective: every rank calls it behind the same steps.
        """
        self._custom_loop.boundary()

    def apply(
        self,
        optimizer: Optimizer | None = None,
        *,
        max_norm: float | None = None,
        grad_norm: torch.Tensor | float | None = None,
        keep_gradients: bool = False,
    ) -> None:
        """Clip, check and update, in a loop of your own: in place of ``optimizer.step()``.

        A norm that is not finite, or exceeds the limit, leaves weights, moments and buffers
        unchanged on every rank.  Gradients are cleared, and the recovery plan scales the learning
        rate.  ``advance`` counts the step, however many updates it has.

        Args:
            optimizer: A registered optimizer; None updates every registered one.
            max_norm: The gradient norm (2-norm over all parameters and ranks) to clip to; None does
                not clip.
            grad_norm: The norm over all ranks, where the program has clipped already.
            keep_gradients: Leave it to the program to clear the gradients.

        Raises:
            UnsupportedError: The optimizer is not registered, the checkpoint is not loaded, or the
                call is inside ``batches``, ``step`` or a phase.
        """
        self._custom_loop.apply(optimizer, max_norm, grad_norm, keep_gradients=keep_gradients)

    @contextmanager
    def step(self, batch: Any) -> Iterator[Step]:
        """Run one optimizer step, spelled out: ``with run.step(batch) as s:``.

        With a batch of your own (a tuple of tensors, a dict, a ``forge.Batch`` of several
        micro-batches) the end of the block is the step boundary: requests to save or stop take
        effect there.  What belongs to the step, such as the update of an EMA, goes inside the
        block.  Call ``restore`` before the loop.

        Args:
            batch: From ``batches``, or one of your own: one micro-batch, of as many samples as the
                leading dimension of its first tensor says.

        Yields:
            The step: ``s.micro_batches()``, ``s.backward(loss)``, ``s.apply()``.

        Raises:
            UnsupportedError: The batch is your own and the checkpoint is not loaded, or the step of
                this batch is counted already.
        """
        with self._turn(batch, None, None) as step:
            yield step

    def train_step(
        self,
        batch: Any,
        compute_loss: Callable[[Any], torch.Tensor | Loss],
        *,
        optimizer: Optimizer | None = None,
        max_norm: float | None = None,
    ) -> torch.Tensor:
        """Accumulate over micro-batches, clip, check, and update on all ranks or on none.

        Collective, as the backward of DDP and FSDP is.  On one rank a CUDA out-of-memory error
        halves the micro-batch and tries again.

        Models with losses of their own (a generator and a discriminator) take one call for each,
        with ``optimizer=``: gradients of all registered optimizers are cleared first, and one is
        stepped.  The calls for one batch count as one step.

        Args:
            batch: From ``batches``, or one of your own as for ``step``.
            compute_loss: Called with each micro-batch; returns the mean loss over its samples (a
                scalar tensor, shape ``()``), or ``Loss(sum, count)``.  After the save of a stop it
                is called with the next one, too.
            optimizer: The registered optimizer to step; None steps every registered one.
            max_norm: The gradient norm (2-norm over all parameters and ranks) to clip to; None does
                not clip.

        Returns:
            This rank's mean loss: a scalar tensor (shape ``()``) on ``device``, detached.  The
            host does not wait for it.

        Raises:
            UnsupportedError: No optimizer is registered, one step has losses of both forms, or the
                step of this batch is counted already.
        """
        if optimizer is not None:
            self._custom_loop.require_registered(optimizer, "run.train_step()")
        begun: Step | None = None
        while True:
            try:
                with self._turn(batch, compute_loss, optimizer) as begun:
                    return begun.run(max_norm=max_norm, optimizer=optimizer)
            except Exception as error:
                smaller = self._batch_loop.cut_smaller(batch, begun, error)
                if smaller is None:
                    raise
            batch = smaller  # once the error is gone, which holds on to the memory

    def _turn(
        self,
        batch: Any,
        compute_loss: Callable[[Any], torch.Tensor | Loss] | None,
        optimizer: Optimizer | None,
    ) -> AbstractContextManager[Step]:
        """A part of a step, or all of it: of a batch of ``batches``, or of the program's own."""
        handed_out = self._step_lifecycle.handed_out
        if handed_out is None:
            return self._custom_loop.turn(batch, compute_loss, optimizer)
        return self._batch_loop.turn(batch, handed_out, compute_loss, optimizer)

    def _on_counted(self) -> None:
        """After a step was counted: its hooks and events, and what is done now and then."""
        before = self._step_lifecycle.stream_before
        if before is not None:
            self._progress_log.epochs(self._batch_loop.length, before)
        self._hooks.call("on_step_end", step=self._progress.step)
        if self._progress_log.write():
            self._now_and_then()

    def _now_and_then(self) -> None:
        """On rank 0, every few seconds: what may wait for the device or write a small file."""
        if self._first_steps is not None:
            self._first_steps.check()
        self._batch_loop.going_well()
        if is_accelerator(self.device):
            full = self._pressure.check(allocator_counters(self.device))
            if full is not None and self._saver.catalog is not None:
                self._saver.catalog.say(full)

    @contextmanager
    def phase(self, name: str, *, stops: bool = True) -> Iterator[None]:
        """Do other work than training, such as evaluation: ``with run.phase("eval"):``.

        Ranks may do different work inside, and can be stopped at ``run.poll()``.  The random state
        of the training is restored at the end, so that a phase that runs again after a resume
        changes nothing.

        Args:
            name: The name of the phase.  ``eval`` calls ``on_eval_end``, and ``keep_best`` reads
                what is logged in it.
            stops: Whether the run may save and stop in it: not while gradients are accumulated.

        Raises:
            RuntimeError: One phase is inside another.
        """
        self._step_lifecycle.settle()
        with self._custom_loop.ahead(again=stops) as is_known:
            may_save = stops and is_known
            self._save_schedule.random = random = rng.capture()
            try:
                with self._boundaries.phase(name, self._requests.stop_here, acts=may_save):
                    yield
                self._progress.phases[name] = self._progress.step
            finally:
                rng.restore(random)
                self._save_schedule.random = None
            self._step_lifecycle.remember_buffers_again()
            if name == "eval":
                self._hooks.call("on_eval_end", step=self._progress.step)
                if may_save:
                    self._save_schedule.evaluated(self._progress_log.of_this_step())

    def due(self, name: str, *, every: int) -> bool:
        """Tell whether a phase is due: every so many steps, and again if it was cut off.

        Call it at the top of the loop body: a run that stopped inside the phase resumes there.

        Args:
            name: The name of the phase.
            every: Optimizer steps from one to the next; 1 or more.

        Returns:
            True if the phase is due before this step and has not run yet; never at step 0.
        """
        self._custom_loop.positions.wanted_every(every)
        step = self._progress.step
        return step > 0 and step % every == 0 and self._progress.phases.get(name) != step

    def poll(self) -> None:
        """Let the run stop here, inside a phase.

        Where the phase has collectives, every rank calls it equally often.  Outside a phase nothing
        happens: the boundaries of ``batches``, ``steps`` and ``advance`` are the places to stop.

        Raises:
            UnsupportedError: A loop calls it outside a phase and never ``advance``.
        """
        if self._boundaries.inside is not None:
            self._boundaries.poll()
        else:
            self._custom_loop.poll()

    def save(self) -> None:
        """Save now, and wait until the checkpoint is on disk.  Collective, between two steps.

        In a loop of your own that is right after ``advance``, before the next batch is fetched.  A
        save that fails is recorded in the journal and tried again later; training continues.
        """
        self._step_lifecycle.settle()
        self._custom_loop.require_counted()
        with self._custom_loop.ahead():
            self._save_schedule.save("asked by the program", wait=True)

    def log(self, **values: Any) -> None:
        """Log figures; rank 0 writes the latest into the journal every few seconds.

        Args:
            **values: Numbers, or tensors of one element, which are detached and read later.
        """
        self._progress_log.remember(values)

    # -- what happens at a boundary ----------------------------------------------------------

    def _boundary(self) -> None:
        self._recover()  # from what the last step came to
        if not self._boundaries.boundary(self._progress.step):
            return
        if self._recover():  # from what was announced for here
            self._boundaries.boundary(self._progress.step)
        self._save_schedule.boundary(stepped=self._step_lifecycle.stepped)

    def _recover(self) -> bool:
        """Act on what all ranks know of the last steps, if anything; whether it was a rewind."""
        if self._skip_tracker.trouble is None and not self._instability.unfinished_rollbacks:
            return False
        return self._instability.boundary()

    # -- for the worker ----------------------------------------------------------------------

    @property
    def micro_batch(self) -> int:
        """Samples per forward pass in force; 0 before ``batches``."""
        return self._resumer.micro_batch

    @micro_batch.setter
    def micro_batch(self, samples: int) -> None:
        self._resumer.micro_batch = self._step_lifecycle.own_micro_batch = samples

    @property
    def registry(self) -> Registry:
        """What was registered: for the account of a rank that ran out of memory."""
        return self._registry

    def leave(self) -> None:
        """The launch is over for this rank: nothing of ours goes on beside the next one."""
        self._resumer.leave()
        if self._probe is not None:
            self._probe.close()

    def wait_for_save(self) -> None:
        """Something was raised: a save that is being written may be what is resumed from."""
        self._saver.wait_for_save()

    def finish(self) -> int:
        """The program is through: last save, last words.  Collective.  Returns the last step."""
        self._resumer.restore()
        self._step_lifecycle.settle()
        self._custom_loop.require_counted()
        self._batch_loop.over()  # also where the program left the loop and kept it
        # Before anything collective: a rank that is still at it would be waited for without end.
        reported = self._progress.step
        self._member.send(FunctionReturned(step=reported))
        self._instability.final_check()
        step = self._progress.step
        if step != reported:
            self._member.send(FunctionReturned(step=step))
        self._boundaries.leave()
        with self._custom_loop.ahead():
            saved = self._save_schedule.have("final")
        if not saved:
            raise CheckpointError(
                f"all {step} steps are done, and their result could not be saved",
                next_step="The journal says why.  The run continues from its last checkpoint, or "
                "from the start if it has none.",
            )
        # Nobody leaves the channel while another may still have to be told where everybody is.
        Ranks(self._groups.cpu).agree(None, None, lambda _: None, doing="Ending the run")
        self._progress_log.write(now=True)
        self._now_and_then()
        self._hooks.call("on_train_end", step=step)
        self._member.send(RankFinished(step=step))
        return step
