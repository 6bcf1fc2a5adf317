"""Who stays to be ended by Slurm: only whom it requeues then, and for whom nobody else is asked."""

from __future__ import annotations

from datetime import timedelta

import pytest

from slurm_forge.launch.attempt.job_attempt import slurm_kill_patience
from slurm_forge.launch.requeue.requeue import RequeueOutcome
from slurm_forge.vocabulary.cause import Cause


@pytest.mark.parametrize("taken", RequeueOutcome)
@pytest.mark.parametrize("cause", Cause)
def test_only_a_preempted_job_of_which_nobody_could_be_told(
    taken: RequeueOutcome, cause: Cause
) -> None:
    stays = slurm_kill_patience(taken, cause) > timedelta(0)
    assert stays is (taken is RequeueOutcome.PENDING and cause is Cause.PREEMPTED)


def test_a_guess_that_was_wrong_does_not_cost_nodes_for_long() -> None:
    assert slurm_kill_patience(RequeueOutcome.PENDING, Cause.PREEMPTED) <= timedelta(minutes=5)
