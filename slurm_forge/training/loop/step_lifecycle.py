"""From the beginning of an optimizer step to its count: one object per launch and rank.

A step is *open* from its first update until it is counted.  ``run.step`` opens and counts it in one
block; ``run.train_step(optimizer=…)`` and ``run.apply`` may add several updates before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from slurm_forge.control import Member
from slurm_forge.device.accelerator import is_accelerator
from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.training.checkpointing.resume_check import FirstSteps
from slurm_forge.training.core.host_generators import (
    Generators,
    HostGenerators,
    HostStates,
)
from slurm_forge.training.core.instability import ActivePlan
from slurm_forge.training.core.loss import BatchLoss, LossHistory
from slurm_forge.training.core.rank_layout import ActiveLayout
from slurm_forge.training.core.run_state import (
    Registry,
    TrainingProgress,
)
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.faults.injector import FaultInjector
from slurm_forge.training.instability.skip_tracker import SkipTracker
from slurm_forge.training.instability.step_record import StepRecord
from slurm_forge.training.loop.batch_faults import BatchFaults
from slurm_forge.training.loop.loss_calls import LOOK_EVERY, LossCalls, LossFunction
from slurm_forge.training.loop.step import Step
from slurm_forge.training.monitor.step_timer import StepTimer
from slurm_forge.training.step.buffer_snapshot import BufferSnapshot
from slurm_forge.training.step.gradient_guard import (
    GuardedUpdate,
    drop_gradients,
    update,
)
from slurm_forge.training.step.update_report import UpdateReport
from slurm_forge.vocabulary.plan import SampleWindow

ADVANCE = "Call run.advance(loss=…, grad_norm=…) once, as the last thing of the loop's body."
ONE_EACH = (
    "Where models have losses of their own, name the optimizer in each call: "
    "run.train_step(batch, compute_loss, optimizer=…)."
)
#: The most uncounted updates in one step: more mean a loop that forgets to count.
_MOST_UPDATES = 100


@dataclass(slots=True, eq=False)
class OpenStep:
    """Updates that belong to a step that is not counted yet."""

    #: The batch that ``run.batches`` handed out for it; None if the data are the program's own.
    batch: Batch | None = None
    #: Parts whose forward and backward went through ``run.step`` or ``run.train_step``.
    parts: list[Step] = field(default_factory=list)
    updates: list[GuardedUpdate] = field(default_factory=list)
    #: This rank's samples by the id of the optimizer that stepped on them.
    samples: dict[int, int] = field(default_factory=dict)
    unprotected: tuple[str, ...] = ()
    generators: Generators | None = None
    #: Computes the loss of a micro-batch, if known.
    compute_loss: Callable[[Any], Any] | None = None


@dataclass(slots=True, eq=False)
class Turn:
    """A context in which the program computes ``part`` of a step."""

    lifecycle: StepLifecycle
    part: Step
    others_follow: bool

    def __enter__(self) -> Step:
        self.lifecycle.in_step = True
        return self.part

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.lifecycle.in_step = False
        if kind is None:
            self.lifecycle.end_turn(self.part, others_follow=self.others_follow)


class StepLifecycle:
    """``turn`` for each part of a step, or ``add_update``; then ``close`` counts it.

    ``on_counted`` runs after a counted step: its hooks and events.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        progress: TrainingProgress,
        skip_tracker: SkipTracker,
        loss_history: LossHistory,
        member: Member,
        device: torch.device,
        layout: ActiveLayout,
        active_plan: ActivePlan,
        first_steps: FirstSteps | None,
        fault_injector: FaultInjector,
        step_timer: StepTimer | None,
        on_counted: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._progress = progress
        self._skip_tracker = skip_tracker
        self._loss_history = loss_history
        self._member = member
        self._device = device
        self._layout = layout
        self._active_plan = active_plan
        self._first_steps = first_steps
        self._fault_injector = fault_injector
        self._step_timer = step_timer
        self._on_counted = on_counted
        #: None if no model has buffers.
        self._buffers: BufferSnapshot | None = None
        #: The step before which the buffers were remembered.
        self._buffers_at = -1
        self._generators: Generators | None = None
        #: Of the host when the step began, where a step may be computed anew.
        self._host_states: HostStates | None = None
        self._started = self._timed = False
        self._begun_at = 0.0
        #: The duration of the last step, from its forward on.
        self.step_s = 0.0
        self._host = HostGenerators()
        self._loss_calls = LossCalls(registry.models, device, self._host)
        #: The function that computed the last step's losses; None if they were passed one by one.
        self._loss_function: LossFunction | None = None
        #: Batches of ``run.batches`` in this launch, and whether the last one's step is observed.
        self._batches, self._looks = 0, False
        #: Samples per step of ``run.batches`` over all ranks, for display; 0 if unknown.
        self.global_batch = 0
        #: Samples in the program's own micro-batches, if recovery may reduce them; else 0.
        self.own_micro_batch = 0
        #: Whether a step was counted in this launch, and since the last rollback.
        self.counted = self.stepped = False
        #: Position in the stream of ``run.batches`` where the last step began; None outside it.
        self.stream_before: int | None = None
        #: The step with uncounted updates; for ``_only`` it is created on demand.
        self._open: OpenStep | None = None
        #: The only update since the last counted step, with its norm, if the host judged it at
        #: once: the usual case in a loop of the program's own.
        self._only: tuple[Optimizer, float] | None = None
        #: Whether a step may consist of one update only: no buffers to restore, no scaler.
        self._is_plain = False
        #: Whether the program is inside a block of ``run.step``.
        self.in_step = False
        #: The batch of ``run.batches`` that the program works on.
        self.handed_out: Batch | None = None
        #: Whether the program fetches the data, instead of ``run.batches``.
        self.own_data = False
        #: The step that the body of ``run.steps`` is in; None outside it.
        self.iteration: int | None = None

    def start(self, *, timed: bool = True) -> None:
        """Another step begins; ``timed`` if it begins now, and not somewhere before.

        An untimed step is reported as begun when it ends.
        """
        step = self._progress.step
        self._started, self._timed = True, timed
        if timed and self._step_timer is not None:
            self._step_timer.begin()
        if self._fault_injector.active:
            self._fault_injector.boundary(step, self._registry)
        if timed:
            self._member.begin(step + 1)

    def hand_out(self, batch: Batch | None) -> None:
        """Mark ``batch`` as the program's until its step is over; None in between."""
        self.handed_out = batch
        if batch is not None:
            self._batches += 1
            self._looks = self._batches % LOOK_EVERY == 0 or self._batches <= 2
        if self._looks:
            self._loss_calls.handed_out(batch)

    def note_buffers(self) -> None:
        """The checkpoint is loaded: buffers that change from here on can be named."""
        models = self._registry.models.values()
        if any(part._buffers for model in models for part in model.modules()):
            self._buffers = BufferSnapshot(models)
        self._is_plain = self._buffers is None and self._registry.scaler is None

    def remember_buffers(self) -> None:
        """Before the forward of a step: remember what a skipped update has to restore."""
        if self._buffers is not None:
            self._buffers.take()
        self._buffers_at = self._progress.step

    def remember_buffers_again(self) -> None:
        """Something else ran before this step's forward, and its effect is to stay."""
        if self._buffers_at == self._progress.step:
            self.remember_buffers()

    def continues(self, what: str, optimizer: Optimizer | None) -> bool:
        """Whether the call ``what`` adds an update to a step that is open already.

        Raises ``UnsupportedError`` if it can't.
        """
        if self.in_step:
            raise UnsupportedError(
                f"{what} inside a block of run.step()",
                next_step="Call s.backward(loss) and s.apply() in the block, or end it first.",
            )
        step = self.open
        if step is None or not step.updates:
            return False
        self._require_parts(step)
        if optimizer is None:
            raise UnsupportedError(
                f"{what} steps every registered optimizer, and a call with optimizer= has begun "
                "the step already",
                next_step=ONE_EACH,
            )
        return True

    def turn(
        self,
        batch: Any,
        compute_loss: LossFunction | None,
        optimizer: Optimizer | None,
        *,
        in_stream: bool,
    ) -> Turn:
        """A part of a step, or all of it; ``in_stream``: ``batch`` has samples of ``run.batches``.

        Without ``compute_loss`` losses are passed one by one; with ``optimizer`` others may follow.
        """
        if optimizer is not None:
            self._renew_scale(optimizer)
        part = self._begin(_as_batch(batch), compute_loss, in_stream=in_stream)
        return Turn(self, part, others_follow=optimizer is not None)

    def end_turn(self, part: Step, *, others_follow: bool) -> None:
        """Record the part, and count the step with its last one."""
        if self._add(part) and not (others_follow and self.not_applied):
            self.close()

    def settle(self) -> None:
        """Count a step that ``train_step(optimizer=…)`` has left open."""
        step = self.open
        if step is not None and step.updates:
            self._require_parts(step)
            self.close()

    def _begin(
        self,
        batch: Batch,
        compute_loss: LossFunction | None,
        *,
        in_stream: bool,
    ) -> Step:
        """Clear the gradients and remember the buffers, for a step or another part of it."""
        plan, layout = self._active_plan.plan, self._layout.now
        given, faults = compute_loss, None
        if self._fault_injector.active:
            faults = BatchFaults(
                self._fault_injector,
                batch,
                step=self._progress.step,
                rank=layout.data_rank,
                skipped=plan.skipped,
                in_stream=in_stream,
            )
            if compute_loss is not None:
                compute_loss, faults = faults.wrap(compute_loss), None
        if not self._started:
            self.start()
        for optimizer in self._registry.optimizers.values():
            drop_gradients(optimizer)
        self.remember_buffers()
        # In case this step has to be recomputed.
        if is_accelerator(self._device):
            self._host_states = self._host.states()
        self._generators = Generators.now(self._device, self._host.torch_state())
        step = self.open
        if step is None or not step.updates:
            self._open = OpenStep(self.handed_out, generators=self._generators)
            self._begun_at = time.monotonic()
            if self._looks:
                self._loss_calls.step_begins(batch, given, self._generators)
            # Kept only if it may be used: it may hold a batch.
            self._loss_function = given if self._loss_calls.alike else None
        return self._part(batch, compute_loss, in_stream=in_stream, faults=faults)

    def _part(
        self,
        batch: Batch,
        compute_loss: LossFunction | None,
        *,
        in_stream: bool,
        faults: BatchFaults | None = None,
    ) -> Step:
        layout, timer = self._layout.now, self._step_timer
        plan = self._active_plan.plan
        return Step(
            batch,
            registry=self._registry,
            loss=BatchLoss(
                global_batch=(in_stream and batch.global_size) or batch.size * layout.data_ranks,
                ranks=layout.data_ranks,
                averaging_ranks=layout.averaging_ranks,
                group=layout.averaging_group,
                device=self._device,
            ),
            norm_group=layout.pipeline_group,
            lr_scale=1.0 if plan.lr_factor == 1.0 else plan.lr_scale(self._progress.step),
            limit=self._active_plan.limit,
            buffers=self._buffers,
            compute_loss=compute_loss,
            handing_over=_nothing if timer is None else timer.handing_over,
            faults=faults,
            look_back=self._look_back,
        )

    def _look_back(self, part: Step) -> bool:
        """Before its update: judge the step before; whether ``part`` is to be computed anew."""
        if not self._skip_tracker.look_back(partial(self.abandon, part)):
            return False
        self.remember_buffers()
        return True

    @property
    def next_loss_function(self) -> LossFunction | None:
        """Between two steps: the function that will compute the next losses, if known."""
        return self._loss_calls.next_function(self._loss_function)

    def first_loss_of(self, batch: Batch, compute_loss: LossFunction) -> torch.Tensor:
        """The first micro-batch's loss as the next step would compute it; begins no step."""
        for optimizer in self._registry.optimizers.values():
            drop_gradients(optimizer)
        return self._part(batch, compute_loss, in_stream=True).compute_first_loss()

    def _renew_scale(self, optimizer: Optimizer) -> None:
        """Before another update of an optimizer in one step: a scaler takes one per ``update``."""
        scaler, step = self._registry.scaler, self.open
        if scaler is None or step is None or not scaler.is_enabled():
            return
        if id(optimizer) in step.samples:
            scaler.update()

    def abandon(self, step: Step) -> bool:
        """Restore the state from before the step; False if a buffer can't be restored."""
        step.abandon()
        if self._host_states is not None:
            self._host.put_back(self._host_states)
        if self._generators is not None:
            self._generators.put_back()
        return not step.unprotected

    def _add(self, part: Step) -> bool:
        """Record a part's updates; False if it only measured something."""
        step = self.open
        if step is None or not part.applied:
            if step is None or not step.updates:
                self._open, self._started = None, False
            return False
        # With two losses there is no single one to recompute.
        step.compute_loss = None if step.parts else part.compute_loss
        step.parts.append(part)
        step.updates += part.applied
        size = part.batch.size
        for each in part.optimizers:
            step.samples[id(each)] = step.samples.get(id(each), 0) + size
        step.unprotected = (*step.unprotected, *part.unprotected)
        self._require_few(step)
        return True

    @property
    def open(self) -> OpenStep | None:
        """The step that has uncounted updates."""
        if self._only is not None:
            (optimizer, norm), self._only = self._only, None
            update = GuardedUpdate.made(norm)
            self._open = OpenStep(updates=[update], samples={id(optimizer): 0})
        return self._open

    def update_alone(self, optimizer: Optimizer, norm: float, keep_gradients: bool) -> bool:
        """Make an update that is judged good, if it is the only one of its step so far."""
        if not self._is_plain or self._open is not None or self._only is not None:
            return False
        update(optimizer, keep_gradients=keep_gradients)
        self._only = optimizer, norm
        return True

    def count_alone(self, loss: float | None, samples: int) -> bool:
        """Count a step of ``update_alone``, quickly; False if there is none."""
        progress = self._progress
        before, first = progress.step, progress.consumed
        stop = first + samples
        only, tracker = self._only, self._skip_tracker
        if only is None or not tracker.updated(before + 1, first, stop, only[1], loss):
            return False
        self._only = None
        progress.step, progress.consumed, progress.sample_ids = before + 1, stop, ()
        if self._started:
            self._started = False
            if self._timed and self._step_timer is not None:
                self._step_timer.end(before + 1)
        self.counted, self.stepped, self.stream_before = True, True, None
        if loss is not None:
            self._loss_history.note(loss)
            self._note_first_loss(loss, self.own_micro_batch)
        self._on_counted()
        return True

    def begin_update(self, optimizer: Optimizer) -> OpenStep:
        """The program computed gradients itself: the step that their update belongs to."""
        if not self._started:
            self.start(timed=False)
        step = self.open
        if step is None:
            self._open = step = OpenStep()
        else:
            self._renew_scale(optimizer)
        return step

    def add_update(self, step: OpenStep, optimizer: Optimizer, update: GuardedUpdate) -> None:
        """Record the outcome of these updates."""
        buffers = self._buffers
        step.updates.append(update)
        step.samples.setdefault(id(optimizer), 0)  # ``advance`` gives the number
        if buffers is not None:
            if self._buffers_at == self._progress.step:
                buffers.restore_where(update.left_out)
                step.unprotected = (*step.unprotected, *buffers.unprotected)
            else:
                step.unprotected = (*step.unprotected, *buffers.changed())
        self._require_few(step)

    def close(self, report: UpdateReport | None = None, *, samples: int | None = None) -> None:
        """Count the step and pass its verdicts on.

        ``samples`` are those of the step over all ranks, if the program gives them.
        """
        step, self._open = self.open, None
        updated = step is not None and bool(step.updates)
        if not self._started:
            self.start(timed=False)
        progress, self._started = self._progress, False
        progress.step += 1
        self.step_s = time.monotonic() - self._begun_at
        if self._timed and self._step_timer is not None:
            self._step_timer.end(progress.step)
        self.counted = self.stepped = True
        if step is not None and updated:
            if step.parts or report is None or not self._took_update(step, report, samples):
                self._take_over(step, report, samples)
        elif report is not None:
            first = self._took_report(report, samples)
            self._skip_tracker.reported(progress.step, first, progress.consumed, report)
        self._on_counted()

    def _took_report(self, report: UpdateReport, samples: int | None) -> int:
        """Count the samples of a step of the program's own; the first of them."""
        progress, loss = self._progress, report.loss
        self.stream_before, first = None, progress.consumed
        progress.consumed = first + (samples or 0)
        if loss is not None:
            self._loss_history.note(loss)
            self._note_first_loss(loss, self.own_micro_batch)
        return first

    def _took_update(self, step: OpenStep, report: UpdateReport, samples: int | None) -> bool:
        """Record one applied update of ``apply``, the usual case: quickly."""
        if len(step.updates) != 1 or self._buffers is not None:
            return False
        reading, values = step.updates[0].verdict.known_reading, report.values
        if reading is None or not reading.applied or values is None:
            return False
        progress, scaler = self._progress, self._registry.scaler
        first = progress.consumed
        if (scaler is not None and scaler.is_enabled()) or not self._skip_tracker.updated(
            progress.step, first, first + (samples or 0), reading.norm, values.loss
        ):
            return False
        self._took_report(report, samples)
        progress.sample_ids = ()
        return True

    def _take_over(self, step: OpenStep, report: UpdateReport | None, samples: int | None) -> None:
        """Record the updates of a counted step."""
        progress, window = self._progress, self._window(step, samples)
        self.stream_before = None if step.batch is None else progress.consumed
        progress.consumed = window.stop
        progress.sample_ids = step.parts[0].batch.sample_ids if step.parts else ()
        if step.parts:
            for scheduler in self._registry.schedulers:
                scheduler.step()  # a skipped step counts: its samples are used up, its schedule too
        scaler = self._registry.scaler
        if scaler is not None and scaler.is_enabled():
            scaler.update()
        # The first loss of a step: the second optimizer's may be less frequent.
        part = next((each for each in step.parts if each.has_loss), None)
        loss: torch.Tensor | float | None = None
        own_loss: Callable[[], float | None] = _unknown
        if part is not None:
            loss, own_loss = part.mean_loss(), part.own_loss
        elif report is not None:
            loss, own_loss = report.loss, report.own_loss
        if loss is not None:
            self._loss_history.note(loss)
        size = self.own_micro_batch
        if step.batch is not None:
            size = step.parts[0].batch.micro_sizes[0]
        self._note_first_loss(step.parts[0].first_loss if step.parts else loss, size)
        self._skip_tracker.record(
            StepRecord(
                applied=step.updates,
                step=progress.step,
                samples=window,
                batch=step.parts[0].batch if len(step.parts) == 1 else None,
                compute_loss=step.compute_loss,
                generators=step.generators,
                own_loss=own_loss,
                has_loss=loss is not None,
                from_stream=step.batch is not None,
                unprotected=step.unprotected,
                report=report,
            )
        )

    @property
    def not_applied(self) -> tuple[str, ...]:
        """The registered optimizers that the open step has not applied yet."""
        step = self.open
        done = {} if step is None else step.samples
        return tuple(
            name for name, each in self._registry.optimizers.items() if id(each) not in done
        )

    def _require_parts(self, step: OpenStep) -> None:
        if not step.parts:
            raise UnsupportedError(
                "run.apply() made an update that no run.advance() counts", next_step=ADVANCE
            )

    def _require_few(self, step: OpenStep) -> None:
        if len(step.updates) > _MOST_UPDATES * max(1, len(self._registry.optimizers)):
            raise UnsupportedError(
                f"{len(step.updates)} updates were made since the last step was counted: the run "
                "could neither save nor stop meanwhile",
                next_step="Call run.advance() at the end of every optimizer step.",
            )

    def _window(self, step: OpenStep, samples: int | None) -> SampleWindow:
        """The samples of the step in the stream, or their number after the end of the last ones."""
        batch, begin = step.batch, self._progress.consumed
        if batch is not None:  # it knows its end: windows of the stream may be skipped
            return SampleWindow(batch.first, batch.consumed)
        if samples is None:
            samples = max(step.samples.values(), default=0) * self._layout.now.data_ranks
        return SampleWindow(begin, begin + samples)

    def _note_first_loss(self, loss: torch.Tensor | float | None, samples: int) -> None:
        """If this is the first step after a checkpoint, record its loss to check a resume."""
        first_steps, before = self._first_steps, self._progress.step - 1
        if first_steps is None or loss is None:
            return
        if before in (first_steps.saved_at, first_steps.resumed_at):
            first_steps.note(before, loss, samples)


def _as_batch(batch: Any) -> Batch:
    """The program's own batch as one micro-batch."""
    if batch is None:
        raise UsageError(
            "run.step(None): there is no batch",
            next_step="Give it what your loop has fetched: a tensor, a tuple, a dict, a "
            "forge.Batch.",
        )
    return batch if isinstance(batch, Batch) else Batch(micro_batches=(batch,))


def _nothing() -> None:
    """Used without a step timer."""


def _unknown() -> None:
    """The loss of a step that reported none."""
