"""Loops that count micro-batches as steps: accumulated gradients are not in any checkpoint."""

from __future__ import annotations

from slurm_forge.errors import UnsupportedError

#: This many updates, each after the same number of steps without one, are no coincidence.
_PERIODS = 3


class AccumulationCheck:
    """Detects gradient accumulation by counted steps without an update; single ones are fine."""

    def __init__(self) -> None:
        self._last = 0
        #: Consecutive steps without an update, up to the last one.
        self._row = 0
        #: The lengths of earlier such rows, each followed by one update.
        self._rows: list[int] = []

    def without_update(self, step: int) -> None:
        """The ``step``th step, counted from 1, made no update.

        Raises:
            UnsupportedError: Only every n-th of the last steps did.
        """
        behind = step - self._last
        if behind == 1:
            self._row += 1
        else:
            self._rows = [*self._rows, self._row][-_PERIODS:] if behind == 2 and self._row else []
            self._row = 1
        self._last = step
        if len(self._rows) == _PERIODS and len(set(self._rows)) == 1:
            every = self._rows[0] + 1
            raise UnsupportedError(
                f"run.advance() counts a step, and only every {every}. step has an update: "
                "gradients are accumulated in between, and no checkpoint has them",
                next_step="Call run.advance() once per update, with the samples of all its "
                "micro-batches; with accelerate: if accelerator.sync_gradients: run.advance(…).",
            )
