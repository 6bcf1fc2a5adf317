"""How the training function is called."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.training.core.entry import call_entry

RUN = object()


def test_a_function_of_the_run_alone_is_called_with_it_alone() -> None:
    seen: list[Any] = []
    call_entry(lambda run: seen.append((run,)), RUN, {"max_steps": 4})
    assert seen == [(RUN,)]


def test_other_parameters_are_the_job_s_arguments() -> None:
    seen: list[Any] = []

    def train(run: Any, max_steps: int, lr: float = 0.1, **more: int) -> None:
        seen.append((run, max_steps, lr, more))

    call_entry(train, RUN, {"max_steps": 4, "width": 2})
    assert seen == [(RUN, 4, 0.1, {"width": 2})]


@pytest.mark.parametrize(
    ("args", "message"), [({"maxsteps": 4}, "did you mean"), ({}, "'max_steps' is not given")]
)
def test_arguments_that_do_not_fit_are_an_error(args: dict[str, int], message: str) -> None:
    def train(run: Any, max_steps: int) -> None:
        raise AssertionError("called")

    with pytest.raises(ConfigError, match=message):
        call_entry(train, RUN, args)
