"""Faults on purpose in one's own loss function: for tests, and for seeing a recovery happen.

Where the loop is that of ``run.train_step`` or ``run.step``, nothing is to be written: ``inject:``
in the job file, or ``slurm-forge run job.yaml --inject nan@120``, does it all.  ``Faults`` is for
everything else, and for faults that the program's own arguments say:

    faults = Faults(["nan@120", "oom@200:rank1", "exception@300:always"])

    def compute_loss(micro):
        return faults.loss(model(micro), run, samples=len(micro))

docs/how-to/rehearsing.md has the language.  A fault strikes once in the life of the run, unless it
says ``always``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from slurm_forge.errors import ConfigError
from slurm_forge.spec.faults import Fault, FaultKind
from slurm_forge.spec.faults import FaultTarget as Target
from slurm_forge.training.faults.injector import FaultInjector

__all__ = ["Fault", "FaultKind", "Faults", "Target"]


class Faults:
    """The faults of a run; ``loss`` is called with every micro-batch's loss and its samples.

    Weights, moments and buffers, and windows of the sample stream, are out of a loss function's
    reach: ConfigError, those belong under ``inject:`` of the job file.
    """

    def __init__(self, texts: Iterable[str | Fault] | str = ()) -> None:
        items = [texts] if isinstance(texts, str) else texts
        self._faults = tuple(f if isinstance(f, Fault) else Fault.parse(f) for f in items)
        for fault in self._faults:
            if fault.of_state or fault.samples is not None:
                raise ConfigError(
                    f"{fault} can't be done from within a loss function",
                    next_step="Write it under inject: of the job file, or give it to "
                    "slurm-forge run --inject.",
                )
        self._fault_injector: FaultInjector | None = None
        self._step = -1

    def loss(self, loss: torch.Tensor, run: Any, *, samples: int = 0) -> torch.Tensor:
        """The loss, or what a fault makes of it (or of this process)."""
        if not self._faults:
            return loss
        if self._fault_injector is None:
            self._fault_injector = FaultInjector(
                self._faults,
                rank=run.rank,
                world_size=run.world_size,
                attempt=run.attempt,
                launch=run.launch,
                directory=run.directory,
            )
        step, again = run.step_number, run.step_number == self._step
        self._step = step
        if not again:
            self._fault_injector.boundary(step)
        return self._fault_injector.loss(
            loss, step=step, samples_first=0, samples=samples, micro_batch=int(again)
        )
