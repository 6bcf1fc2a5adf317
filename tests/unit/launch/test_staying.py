"""Who stays to be ended by Slurm: only whom it requeues then, and for whom nobody else is asked."""

from __future__ import annotations

from datetime import timedelta

import pytest

from slurm_forge.launch.attempt.requeuer import stays_on
from slurm_forge.launch.requeue.requeue import Taken
from slurm_forge.vocabulary.cause import Cause


@pytest.mark.parametrize("taken", Taken)
@pytest.mark.parametrize("cause", Cause)
def test_only_a_preempted_job_of_which_nobody_could_be_told(taken: Taken, cause: Cause) -> None:
    stays = stays_on(taken, cause) > timedelta(0)
    assert stays is (taken is Taken.OPEN and cause is Cause.PREEMPTED)


def test_a_guess_that_was_wrong_does_not_cost_nodes_for_long() -> None:
    assert stays_on(Taken.OPEN, Cause.PREEMPTED) <= timedelta(minutes=5)
