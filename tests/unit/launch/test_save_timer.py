from __future__ import annotations

from datetime import timedelta

import pytest

from slurm_forge.journal import KnownCheckpoint, RunState
from slurm_forge.launch.conductor.save_timer import SaveTimer
from slurm_forge.launch.render.save_times import lead_time
from slurm_forge.launch.render.schedule import Timing, timing
from slurm_forge.spec import job_from_mapping
from slurm_forge.store.identity import CheckpointName

SECOND = timedelta(seconds=1)


def pace(*, every: float | None, automatic: bool = False) -> SaveTimer:
    return SaveTimer(
        Timing(
            lead=60 * SECOND,
            save_every=None if every is None else every * SECOND,
            probe_every=None,
            probe_deadline=SECOND,
            between=timedelta(hours=24) if automatic else None,
        ),
        0.0,
    )


def first_due(made: SaveTimer, until: int = 100_000) -> int | None:
    return next((now for now in range(until) if made.is_due(float(now))), None)


def test_a_fixed_interval_stays_what_was_asked_for() -> None:
    made = pace(every=100)
    assert first_due(made) == 100
    made.restart(100.0)
    made.committed(130.0, blocked=9 * SECOND, durable=99 * SECOND)
    assert not made.is_due(199.0)
    assert made.is_due(200.0)
    assert first_due(pace(every=None)) is None


def test_an_automatic_interval_follows_what_a_save_costs() -> None:
    cheap, dear = pace(every=600, automatic=True), pace(every=600, automatic=True)
    cheap.committed(0.0, blocked=0.1 * SECOND, durable=2 * SECOND)
    dear.committed(0.0, blocked=5 * SECOND, durable=60 * SECOND)
    assert first_due(cheap) == 132  # sqrt(2 * 0.1 s * 24 h)
    assert first_due(dear) == 930  # sqrt(2 * 5 s * 24 h)


def test_an_interruption_early_on_counts_for_less_the_longer_it_goes_well() -> None:
    """One after a minute: a save that costs 5 s comes every minute at first, and not for a day."""
    made = SaveTimer(
        Timing(
            lead=60 * SECOND,
            save_every=60 * SECOND,
            probe_every=None,
            probe_deadline=SECOND,
            between=60 * SECOND,
            interruptions=1,
        ),
        0.0,
    )
    waits = []
    for now in (0.0, 3600.0, 36000.0):
        made.committed(now, blocked=5 * SECOND, durable=5 * SECOND)
        waits.append(next(wait for wait in range(10_000) if made.is_due(now + wait)))
    assert waits == [60, 192, 601]  # sqrt(2 * 5 s * …) of 1 min, 61 min, 10 h


def test_a_failed_save_is_tried_again_soon_and_not_for_ever() -> None:
    made = pace(every=3600)
    now, waits = 0.0, []
    for _ in range(7):
        assert made.not_committed(now) is None
        waits.append(next(w for w in range(10_000) if made.is_due(now + w)))
        now += waits[-1]
        made.restart(now)
    assert waits == [30, 60, 120, 240, 480, 960, 1920]
    assert made.not_committed(now) == 8
    made.committed(now, blocked=SECOND, durable=SECOND)
    assert made.not_committed(now) is None


def test_saves_every_few_steps_on_a_full_disk_are_not_counted_one_by_one() -> None:
    made = pace(every=3600)
    assert [made.not_committed(now / 10) for now in range(300)] == [None] * 300


def job(**more: object):
    return job_from_mapping({"name": "x", "entry": "a.b:c", **more})


def known(seconds: float) -> RunState:
    name = CheckpointName(1, 1, 1, "0000abcd")
    return RunState(known=(KnownCheckpoint(name=name, seconds=seconds, blocked_s=0.5),))


@pytest.mark.parametrize(
    ("limit", "save", "lead"),
    [
        (None, 0, 120),
        (None, 100, 310),  # the last save may wait for another; and a half more, and ten seconds
        (3600, 1, 120),
        (3600, 100, 310),
        (60, 1, 13),
        (60, 100, 30),
        (600, 1, 120),
    ],
)
def test_the_last_save_begins_in_time_for_what_saves_were_seen_to_take(
    limit: int | None, save: float, lead: int
) -> None:
    found = lead_time(job(), None if limit is None else limit * SECOND, save * SECOND)
    assert found == lead * SECOND
    assert lead_time(job(lead="7s"), 3600 * SECOND, save * SECOND) == 7 * SECOND


def test_the_journal_tells_a_new_launch() -> None:
    found = timing(job(), state=known(100), now=0.0)
    assert found.lead == 310 * SECOND
    assert found.save_every is not None
    assert found.save_every.total_seconds() == pytest.approx(400)  # four times the save
    asked = timing(job(checkpoint={"every_minutes": 3}), state=known(100), now=0.0)
    assert (asked.save_every, asked.between) == (180 * SECOND, None)
