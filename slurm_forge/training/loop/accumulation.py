"""Own loops that count micro-batches: accumulated gradients are in no checkpoint."""

from __future__ import annotations

from slurm_forge.errors import UnsupportedError

#: So many updates, each behind as many steps without one, are no coincidence.
_PERIODS = 3


class AccumulationCheck:
    """Is told of each counted step that has made no update; such steps may come now and then."""

    def __init__(self) -> None:
        self._last = 0
        #: The steps without an update that came one after the other, up to the last one.
        self._row = 0
        #: The lengths of the rows before, each with one update behind it.
        self._rows: list[int] = []

    def without_update(self, step: int) -> None:
        """The ``step``th step, counted from 1, has made none.

        Raises:
            UnsupportedError: Only every n-th of the last steps has.
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
