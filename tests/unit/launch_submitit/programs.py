"""Training functions as users write them; never called here."""

from __future__ import annotations

from typing import Any

from submitit.helpers import Checkpointable, DelayedSubmission


def train(run: Any) -> None:
    """At the top of a module: any later attempt finds it by name."""


class Trainer:
    def train(self, run: Any) -> None:
        """A method: no later attempt has the object."""


def learn(run: Any, lr: float, steps: int = 3) -> None:
    """With arguments of its own."""


def add(first: int, second: int) -> int:
    """Knows nothing of runs."""
    return first + second


class Countdown(Checkpointable):
    """As submitit documents it: what is left is saved with the object."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        return self.left

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        return DelayedSubmission(Countdown(self.left - 1), *args, **kwargs)
