"""What the controller's clock shows, from the one place where it tells."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from slurm_forge.slurm.clock import slurm_clock
from slurm_forge.slurm.records import ConfigRecord

SHOWN = datetime(2026, 11, 23, 8, 0, 0, tzinfo=timezone.utc)
#: The same second on this node's clock, were it right.
RIGHT = SHOWN.timestamp()


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0, 40.0, -40.0])
def test_a_clock_that_differs_is_known_by_the_controllers(ahead_s: float) -> None:
    before, after = RIGHT + 0.2 + ahead_s, RIGHT + 0.4 + ahead_s
    clock = slurm_clock(
        ConfigRecord(controller_time=SHOWN), asked_at=100.0, before=before, after=after
    )
    assert clock is not None and clock.differs
    assert abs(clock.ahead.total_seconds() - ahead_s) <= 1.0
    shows = clock.now(100.2)  # when it was answered; a little later rather than earlier
    assert timedelta(0) <= shows - SHOWN <= timedelta(seconds=2)
    assert clock.now(3700.2) - shows == timedelta(hours=1)


@pytest.mark.parametrize("ahead_s", [0.0, 2.0, -20.0, 25.0])
def test_clocks_that_differ_by_seconds_are_taken_for_the_same(ahead_s: float) -> None:
    at = RIGHT + ahead_s
    config = ConfigRecord(controller_time=SHOWN)
    clock = slurm_clock(config, asked_at=1.0, before=at, after=at + 1)
    assert clock is not None and not clock.differs


def test_an_answer_that_took_its_time_says_less() -> None:
    """It may have been given at any moment of it."""
    config = ConfigRecord(controller_time=SHOWN)
    clock = slurm_clock(config, asked_at=1.0, before=RIGHT - 60, after=RIGHT + 60)
    assert clock is not None and clock.ahead == timedelta(0)


def test_a_controller_that_does_not_tell_its_time_changes_nothing() -> None:
    config = ConfigRecord(controller_time=None)
    assert slurm_clock(config, asked_at=1.0, before=RIGHT, after=RIGHT + 9999) is None
