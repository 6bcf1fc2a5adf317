"""How far ahead a requeued job may start: past its own end, and not at all where nobody knows."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal.events import RequeueDone
from slurm_forge.journal.state import AttemptState
from slurm_forge.recovery.policy.requeue_delay import shortened_begin_times
from slurm_forge.slurm.records import ConfigRecord

PLAIN = ConfigRecord(kill_wait=timedelta(seconds=30), has_epilog=False)


def attempts(*waited: float) -> list[AttemptState]:
    """One after the other, each requeued and started again after so many seconds."""
    found, now = [], 0.0
    done = RequeueDone(job="42", method="scontrol requeue")
    for number, seconds in enumerate((*waited, 0.0), start=1):
        end = now + 1000
        found.append(
            AttemptState(
                number=number,
                job="42",
                nodes=(),
                via="sbatch",
                started=now,
                requeues=((end, done),),
            )
        )
        now = end + seconds
    return found


def test_at_the_default_delay_a_few_seconds_are_enough() -> None:
    soon = shortened_begin_times(PLAIN, ())
    assert soon is not None
    assert soon.at_exit == timedelta(seconds=6)
    assert soon.if_killed > timedelta(seconds=30), "our ranks may live until KillWait is over"


def test_where_nodes_are_cleaned_up_it_is_further_ahead() -> None:
    soon = shortened_begin_times(ConfigRecord(has_epilog=True), ())
    assert soon is not None and soon.at_exit > timedelta(seconds=10)


def test_a_short_delay_or_an_unknown_one_is_left_alone() -> None:
    assert shortened_begin_times(None, ()) is None
    assert shortened_begin_times(ConfigRecord(auth_info=("cred_expire=5",)), ()) is None
    assert (
        shortened_begin_times(ConfigRecord(scheduler_parameters=("requeue_delay=10",)), ()) is None
    )


def test_an_end_that_took_longer_is_learned_from_and_given_up_in_the_end() -> None:
    once = shortened_begin_times(PLAIN, attempts(122.0))
    assert once is not None and once.at_exit == timedelta(seconds=18)
    assert shortened_begin_times(PLAIN, attempts(122.0, 125.0, 123.0, 124.0)) is None
    queue = shortened_begin_times(PLAIN, attempts(20.0, 4000.0))
    assert queue is not None and queue.at_exit == timedelta(seconds=6), "the queue's doing"


def test_a_slow_end_is_seen_late() -> None:
    """A node whose job lives on for 12 s looks after 11 and after 21 s."""
    soon = shortened_begin_times(PLAIN, ())
    assert soon is not None
    assert soon.at_exit_after(timedelta(seconds=2)) == soon.at_exit
    for since in range(10, 31):
        looks = next(each for each in (11, 21, 30, 40) if each >= since)
        assert since + soon.at_exit_after(timedelta(seconds=since)).total_seconds() >= looks + 2


@given(
    st.integers(0, 400),
    st.integers(0, 200),
    st.booleans(),
    st.lists(st.floats(0, 500), max_size=6),
)
def test_never_later_than_slurm_itself(
    cred: int, kill_wait: int, epilog: bool, waited: list[float]
) -> None:
    config = ConfigRecord(
        auth_info=(f"cred_expire={cred}",),
        kill_wait=timedelta(seconds=kill_wait),
        has_epilog=epilog,
    )
    soon = shortened_begin_times(config, attempts(*waited))
    if soon is not None:
        assert timedelta(seconds=2) < soon.at_exit < soon.if_killed < config.requeue_delay
        assert soon.if_killed > timedelta(seconds=kill_wait)
