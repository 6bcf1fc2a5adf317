"""An order of samples that can be drawn once more, without what was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.core import rng


class RandomStates:
    """The states of the global generators, and of some of the program's own.

    Args:
        generators: Those that an order of samples is drawn from, besides the global ones.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators

    def capture(self) -> dict[str, Any]:
        """The states of now."""
        return {"global": rng.capture(), "own": [each.get_state() for each in self._generators]}

    def put_back(self, states: dict[str, Any]) -> None:
        """Have all generators go on from there.

        Raises:
            UnsupportedError: The program had another number of its own.
        """
        if len(states["own"]) != len(self._generators):
            raise UnsupportedError(
                f"the order of the samples was drawn from {len(states['own'])} generators of the "
                f"program, and now there are {len(self._generators)}",
                next_step="Resume with the loader and the sampler that the run began with.",
            )
        for each, own in zip(self._generators, states["own"], strict=True):
            each.set_state(own)
        rng.restore(states["global"])


class IndexOrder:
    """A sampler whose order can be repeated: it knows the random states it was drawn from.

    Some samplers draw when they are iterated over, some with their first index.
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self._sampler, self._random = sampler, RandomStates(generators)
        self._indices: Iterator[Any] = iter(())
        self._begun: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None
        #: Indices to leave out; they were trained on.
        self._done: int | None = None
        self._is_first = False

    def state(self) -> list[Any]:
        """What the order of this epoch was drawn from."""
        return [self._begun, self._first]

    def resume(self, state: list[Any], done: int) -> None:
        """Repeat that order next time, without its first indices."""
        (self._begun, self._first), self._done = state, done

    def __iter__(self) -> Iterator[Any]:
        if self._done is None:
            self._begun, self._first = self._random.capture(), None
        elif self._begun is not None:
            self._random.put_back(self._begun)
        self._indices, self._is_first = iter(self._sampler), True
        return self

    def __next__(self) -> Any:
        if self._is_first:
            self._draw()
        return next(self._indices)

    def pass_over(self) -> None:
        """Leave out now what was trained on: whatever draws has drawn then."""
        if self._is_first and (self._first is not None or self._done):
            self._draw()

    def _draw(self) -> None:
        self._is_first, done, self._done = False, self._done, None
        if self._first is None:
            self._first = self._random.capture()
        elif done is not None:
            self._random.put_back(self._first)
        for _ in range(done or 0):
            next(self._indices, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
