"""Training loops that are the program's own: ``run.steps``, ``run.apply``, ``run.advance``.

A checkpoint is taken only in ``advance`` and at the top of ``run.steps``.  There the number of
consumed batches equals the number of counted steps, wherever in the loop the program fetches them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.errors import UnsupportedError, UsageError
from slurm_forge.training.core.duration import Steps
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.core.process_group import ProcessGroups
from slurm_forge.training.core.rank_consistency import require_identical
from slurm_forge.training.core.rank_info import RankContext
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.data.sample_count import first_tensor
from slurm_forge.training.faults.own_loop import require_injectable
from slurm_forge.training.loop.accumulation import AccumulationCheck
from slurm_forge.training.loop.assembly import Parts
from slurm_forge.training.loop.positions import Positions
from slurm_forge.training.loop.resume import Resumer
from slurm_forge.training.loop.step import Step
from slurm_forge.training.loop.step_lifecycle import ADVANCE, ONE_EACH
from slurm_forge.training.step.gradient_guard import LARGEST, apply_gradients, norm_on_host
from slurm_forge.training.step.update_report import UpdateReport, reported

#: Calls of ``poll`` allowed outside a phase before the first step is counted.
_POLLS = 10


class CustomLoop:
    """One object per rank.

    ``boundary`` passes a step boundary.  With the program's own batches, that is where the step is
    counted: its batch has been fetched by then, and the next one has not.
    """

    def __init__(
        self,
        context: RankContext,
        parts: Parts,
        resumer: Resumer,
        *,
        groups: ProcessGroups,
        boundary: Callable[[], None],
    ) -> None:
        self._context = context
        self._parts = parts
        self._lifecycle = parts.step_lifecycle
        self._progress = parts.progress
        self._boundaries = parts.boundaries
        self._resumer = resumer
        self._groups = groups
        self._boundary = boundary
        #: Whether the next step is likely to be guarded by ``apply``, which restores buffers.
        self._guards = True
        self._until: int | None = None
        self._checked: set[bool] = set()
        #: How many updates registered optimizers had made when the last step was counted.
        self._updates = 0
        self._accumulation = AccumulationCheck()
        self._first_step = True
        self._polls = 0
        self._weights: list[tuple[torch.Tensor, int]] = []
        #: The last batch and loss function of a program with several optimizers.
        self._last: tuple[torch.Tensor | None, object] = (None, None)
        self.positions = Positions(parts.registry, parts.progress)

    # -- the loop ----------------------------------------------------------------------------

    def steps(self, until: Steps) -> Iterator[int]:
        """The numbers of the remaining steps, each with one ``advance`` in its body."""
        self._refuse_inside("run.steps()")
        if self._lifecycle.iteration is not None:
            raise UnsupportedError(
                "run.steps() inside run.steps()",
                next_step="Loop over what makes up one step without it: run.advance() counts one.",
            )
        progress, total = self._progress, until.count
        self._resumer.until = lambda: total
        if not self._resumer.restored:
            self.positions.require_untouched()
            self._resumer.restore()
            self.positions.at_boundary(wanted=True)
            self.positions.watch()
        self._lifecycle.own_data = True
        require_identical(
            Ranks(self._groups.cpu),
            {"until": total},
            next_step="Give run.steps() the same arguments on every rank.",
        )
        try:
            self._until = total
            self.positions.loop_begins()
            with self.ahead():  # the first batch may have been fetched since ``restore``
                self._boundary()
            while True:
                self._boundary()
                if progress.step >= total:
                    if self._parts.instability.final_check():
                        return
                    continue
                self._lifecycle.iteration = before = progress.step
                self._lifecycle.start()
                if self._guards:
                    self._lifecycle.remember_buffers()
                yield before
                self._require_counted_once(before)
                self._lifecycle.iteration = None
        finally:
            self._lifecycle.iteration = self._until = None

    def advance(
        self,
        loss: torch.Tensor | float | None,
        grad_norm: torch.Tensor | float | None,
        samples: int | None,
    ) -> None:
        """Count one step, and pass the boundary after it."""
        self.count("run.advance", loss, grad_norm, samples)
        self.boundary()

    def count(
        self,
        what: str,
        loss: torch.Tensor | float | None,
        grad_norm: torch.Tensor | float | None,
        samples: int | None,
    ) -> None:
        """Count one step; ``what`` names the method of the run that does."""
        lifecycle = self._lifecycle
        self._require_between_steps(f"{what}()")
        loss = reported("loss", loss)
        if samples is not None and (type(samples) is not int or samples < 0):
            samples = _whole(what, "samples", samples, least=0)
        if (
            grad_norm is None
            and not isinstance(loss, torch.Tensor)
            and lifecycle.count_alone(loss, samples or 0)
        ):
            self._guards = True
            return
        report = UpdateReport(loss, grad_norm)
        step = lifecycle.open
        self._guards = guarded = step is not None and bool(step.updates)
        updates, self._updates = self._updates, self._resumer.own_updates
        if not (guarded or (True not in self._checked and self._updates != updates)):
            self._accumulation.without_update(self._progress.step + 1)
        if guarded not in self._checked and not (step is not None and step.parts):
            self._first_of_its_kind(guarded)
        lifecycle.close(report, samples=samples)

    def boundary(self) -> None:
        """Pass the boundary after a counted step."""
        self._pass_boundary()
        if self._guards and self._lifecycle.iteration is None:
            self._lifecycle.remember_buffers()

    def apply(
        self,
        optimizer: Optimizer | None,
        max_norm: float | None,
        grad_norm: torch.Tensor | float | None,
        *,
        keep_gradients: bool = False,
    ) -> None:
        """Judge gradients that the program computed: updates that ``advance`` will count."""
        self._require_between_steps("run.apply()")
        if optimizer is not None:
            self.require_registered(optimizer, "run.apply()")
            optimizers = [optimizer]
        else:
            optimizers = list(self._parts.registry.optimizers.values())
        if not optimizers:
            raise UnsupportedError(
                "run.apply() without an optimizer: none is registered",
                next_step="run.register(model=…, optimizer=…) before run.restore().",
            )
        if True not in self._checked:
            self._first_of_its_kind(True)
        plan, faults = self._parts.active_plan, self._parts.fault_injector
        norm = norm_on_host(grad_norm)
        plain = plan.plan.lr_factor == 1.0 and not faults.active and len(optimizers) == 1
        if (
            norm is not None
            and norm <= LARGEST
            and norm <= plan.limit
            and plain
            and self._lifecycle.update_alone(optimizers[0], norm, keep_gradients)
        ):
            return
        number, layout = self._progress.step, self._parts.layout.now
        for each in optimizers:
            step = self._lifecycle.begin_update(each)
            reported_norm = grad_norm
            if faults.active:
                parameters = (p for group in each.param_groups for p in group["params"])
                reported_norm = faults.gradients(parameters, step=number, norm=grad_norm)
            update = apply_gradients(
                each,
                max_norm=max_norm,
                grad_norm=reported_norm,
                lr_scale=plan.plan.lr_scale(number),
                limit=plan.limit,
                scaler=self._parts.registry.scaler,
                update_scaler=False,  # once per step, for all optimizers: when it is counted
                norm_group=layout.pipeline_group,
                keep_gradients=keep_gradients,
            )
            self._lifecycle.add_update(step, each, update)

    @contextmanager
    def turn(
        self,
        batch: Any,
        compute_loss: Callable[[Any], torch.Tensor | Loss] | None,
        optimizer: Optimizer | None,
    ) -> Iterator[Step]:
        """A call of ``run.step`` or ``run.train_step`` with the program's own batch."""
        what = "run.step()" if compute_loss is None else "run.train_step()"
        if not self._lifecycle.continues(what, optimizer):
            self._require_new_step(what)
            if compute_loss is not None and optimizer is None:
                self._require_one_loss(batch, compute_loss)
        before = self._progress.step
        with self._lifecycle.turn(batch, compute_loss, optimizer, in_stream=False) as step:
            yield step
        if self._progress.step != before:
            self._guards = False
            self._pass_boundary()

    def _require_one_loss(self, batch: Any, compute_loss: Callable[..., Any]) -> None:
        """Refuse two losses of one batch with several optimizers: a GAN that names no optimizer."""
        if len(self._parts.registry.optimizers) < 2:
            return
        tensor = first_tensor(batch.micro_batches if isinstance(batch, Batch) else batch)
        code = getattr(compute_loss, "__code__", compute_loss)
        last_tensor, last_code = self._last
        if tensor is not None and tensor is last_tensor and code is not last_code:
            raise UnsupportedError(
                "run.train_step() with another loss of the same batch: each call without "
                "optimizer= steps every registered optimizer, and counts a step",
                next_step=ONE_EACH,
            )
        self._last = (tensor, code)

    def poll(self) -> None:
        """Outside a phase it does nothing; an error in a loop that never advances."""
        lifecycle = self._lifecycle
        in_loop = lifecycle.handed_out is not None or lifecycle.iteration is not None
        if in_loop or lifecycle.counted:
            return
        self._polls += 1
        if self._polls > _POLLS:
            raise UnsupportedError(
                f"run.poll() was called {self._polls} times outside a phase, and no step was "
                "counted: the run could neither save nor stop",
                next_step=f"{ADVANCE}  run.poll() is for phases: with run.phase(…).",
            )

    def _require_counted_once(self, before: int) -> None:
        """At the end of the body of ``steps``: counting twice was refused when it was tried."""
        step, left_out = self._lifecycle.open, self._lifecycle.not_applied
        if step is not None and step.updates:
            names = f" ({', '.join(left_out)} not stepped)" if step.parts else ""
            raise UnsupportedError(
                f"the body of run.steps() made an update that no run.advance() counts{names}",
                next_step=ADVANCE,
            )
        if self._progress.step == before:
            raise UnsupportedError(
                f"the body of run.steps() came to its end without run.advance(), in step {before}: "
                "the loop would never end",
                next_step=ADVANCE,
            )

    # -- what the other ways to take a step need ----------------------------------------------

    def _require_between_steps(self, what: str) -> None:
        """Raise ``UnsupportedError`` if no update can be made or counted by ``what``."""
        self._refuse_inside(what)
        self._require_new_step(what)

    def _require_new_step(self, what: str) -> None:
        """Raise ``UnsupportedError`` if no checkpoint is loaded, or the step is counted already."""
        if not self._resumer.restored:
            raise UnsupportedError(
                f"{what} before the checkpoint is loaded: a batch that was fetched before is not "
                "the one that comes next",
                next_step="Call run.restore() after run.register(), before the loop.",
            )
        iteration = self._lifecycle.iteration
        if iteration is not None and self._progress.step != iteration:
            raise UnsupportedError(
                f"{what} in an iteration of run.steps() whose step is counted already",
                next_step="Call run.advance() once in the body, as the last thing; run.step() and "
                "run.train_step() count a step by themselves.",
            )

    def require_registered(self, optimizer: Optimizer, what: str) -> None:
        """Raise ``UnsupportedError`` for an optimizer that is not in the checkpoints."""
        registered = self._parts.registry.optimizers
        if optimizer not in registered.values():
            names = ", ".join(registered) or "none"
            raise UnsupportedError(
                f"{what} was given an optimizer ({type(optimizer).__name__}) that is not "
                f"registered (registered: {names}): its state would be in no checkpoint",
                next_step="Register it before training: run.register(my_optimizer=…).",
            )

    def _pass_boundary(self) -> None:
        """Pass the boundary after a step on the program's own data."""
        if self._first_step:
            self._first_step = False
            self._resumer.note_missing_position()
        self.positions.require_not_ahead()
        self._boundary()
        self._lifecycle.own_data = True
        last = self._progress.step == self._until
        if last or self.positions.wanted:
            self.positions.at_boundary(wanted=last)

    @contextmanager
    def ahead(self, *, again: bool = False) -> Iterator[bool]:
        """Prepare a save that holds the positions of the last boundary; False if unknown.

        ``again``: more such places will follow, so positions are kept at every boundary from then.
        """
        ahead = self.positions.ahead() if self._lifecycle.own_data else {}
        if again and ahead is None:
            self.positions.always = True
        schedule = self._parts.save_schedule
        schedule.ahead = ahead or {}
        try:
            yield ahead is not None
        finally:
            schedule.ahead = {}

    def restored(self) -> None:
        """The checkpoint is loaded; a loop of the program's own may follow."""
        self._lifecycle.own_data = True
        self.positions.at_boundary(wanted=True)
        self.positions.watch()
        self._weights = [
            (parameter, parameter._version)
            for optimizer in self._parts.registry.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def require_counted(self) -> None:
        """Raise ``UnsupportedError`` for training without any counted step: it would be step 0."""
        if self._lifecycle.counted or self._progress.step:
            return
        most = max((p._version - version for p, version in self._weights), default=0)
        if most > _POLLS:
            raise UnsupportedError(
                "the weights were updated many times, and no step was counted: the "
                "checkpoint would hold them as those of step 0",
                next_step=ADVANCE,
            )

    def _refuse_inside(self, what: str) -> None:
        lifecycle, inside = self._lifecycle, self._boundaries.inside
        if not (lifecycle.in_step or lifecycle.handed_out is not None or inside is not None):
            return
        if lifecycle.in_step:
            place, instead = "a block of run.step()", "s.apply(…) is the update there, and the end "
            instead += "of the block counts the step."
        elif inside is not None:
            place, instead = f"the phase {inside!r}", "Call it after the phase, or before."
        else:
            place = "a loop over run.batches()"
            instead = "Take the step there with run.train_step(), or with run.step(batch) as s: …"
        raise UnsupportedError(f"{what} in {place}", next_step=instead)

    def _first_of_its_kind(self, guarded: bool) -> None:
        """Check the first step with, or without, guarded updates for unsupported combinations."""
        self._checked.add(guarded)
        require_injectable(
            (fault for fault in self._context.spec.inject if not fault.of_start),
            world_size=self._context.world_size,
            guarded=guarded,
        )
        catalog, plan = self._parts.saver.catalog, self._parts.active_plan.plan
        if not guarded and catalog is not None and plan.lr_factor != 1.0:
            catalog.say(
                f"the recovery plan scales the learning rate by {plan.lr_factor:g} from step "
                f"{plan.lr_from_step} on, and this loop steps its optimizer itself: call "
                "run.apply(optimizer) in place of optimizer.step(), or multiply the learning rate "
                "by run.recovery.lr_scale(run.step_number)"
            )


def checked_steps(until: Any) -> Steps:
    """Raise ``UsageError`` for anything but a number of steps."""
    if not isinstance(until, Steps):
        raise UsageError(
            f"run.steps(until={until!r}) does not say how many steps are meant",
            next_step="Write until=forge.Steps(1000); a custom loop counts its own epochs.",
        )
    return Steps(_whole("run.steps", "until=forge.Steps", until.count, least=1))


def _whole(what: str, name: str, value: object, *, least: int) -> int:
    count = None
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        count = operator.index(value)
    if count is None or count < least:
        raise UsageError(
            f"{what}({name}={value!r}) is not a whole number of {least} or more",
            next_step=f"Give {name} as a whole number of {least} or more.",
        )
    return count
