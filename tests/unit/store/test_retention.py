from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.retention import Present, RetentionRules, wanted
from slurm_forge.store.room import FreeSpace, shortage
from slurm_forge.vocabulary.trust import Trust


def there(step: int, trust: Trust = Trust.WRITTEN, **more: float) -> Present:
    return Present(name=CheckpointName(step, 1, 1, f"{step:08x}"), trust=trust, **more)


def steps(present: list[Present], **rules: object) -> list[int]:
    found = wanted(present, RetentionRules(**{"last": 1, **rules}))  # type: ignore[arg-type]
    return sorted(name.step for name in found)


def test_the_last_ones_the_newest_good_one_and_the_newest_suspect_one() -> None:
    present = [
        there(10, Trust.GOOD),
        there(20, Trust.GOOD),
        there(30),
        there(40),
        there(50, Trust.SUSPECT),
        there(60, Trust.SUSPECT),
    ]
    assert steps(present) == [20, 40, 60]
    assert steps(present, last=2) == [20, 30, 40, 60]


def test_the_best_one_by_a_metric_smaller_or_larger() -> None:
    present = [there(10, metric=3.0), there(20, metric=1.0), there(30, metric=2.0), there(40)]
    assert steps(present) == [40]
    assert steps(present, smaller_is_better=True) == [20, 40]
    assert steps(present, smaller_is_better=False) == [10, 40]
    suspect = [replace(present[1], trust=Trust.SUSPECT), *present[2:]]
    assert steps(suspect, smaller_is_better=True) == [20, 30, 40], "20 as the newest suspect one"


def test_of_equally_good_ones_the_newest() -> None:
    present = [there(10, metric=1.0), there(20, metric=1.0), there(30)]
    assert steps(present, smaller_is_better=True) == [20, 30]


def test_the_first_of_every_so_many_steps_or_minutes() -> None:
    present = [there(step, time=60.0 * step) for step in range(5, 40, 5)]
    assert steps(present, every_steps=10) == [5, 10, 20, 30, 35]
    assert steps(present, every=timedelta(minutes=10)) == [5, 10, 20, 30, 35]
    assert steps([there(5), *present[1:]], every=timedelta(minutes=20)) == [10, 20, 35]


def test_the_first_of_every_so_many_epochs() -> None:
    present = [there(step, epoch=step // 10) for step in range(5, 40, 5)]
    assert steps(present, every_epochs=1) == [5, 10, 20, 30, 35]
    assert steps(present, every_epochs=2) == [5, 20, 35]
    assert steps([*present, there(40)], every_epochs=3) == [5, 30, 40], "whose epoch is unknown"


@st.composite
def shelves(draw: st.DrawFn) -> list[Present]:
    numbers = draw(st.lists(st.integers(0, 60), unique=True, max_size=12))
    metric = st.none() | st.floats(-10, 10)
    return [
        Present(
            name=CheckpointName(step, 1, 1, f"{step:08x}"),
            trust=draw(st.sampled_from(Trust)),
            time=float(step),
            metric=draw(metric),
            epoch=draw(st.none() | st.just(step // 7)),
        )
        for step in numbers
    ]


RULES = st.builds(
    RetentionRules,
    last=st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 20),
    every_epochs=st.none() | st.integers(1, 4),
    every=st.none() | st.builds(timedelta, seconds=st.integers(1, 20)),
    smaller_is_better=st.none() | st.booleans(),
)


@given(shelves(), RULES)
def test_what_is_kept_in_any_case(present: list[Present], rules: RetentionRules) -> None:
    kept = wanted(present, rules)
    usable = sorted((p for p in present if p.trust is not Trust.SUSPECT), key=lambda p: p.name)
    assert {p.name for p in usable[-rules.last :]} <= kept
    good = [p.name for p in usable if p.trust is Trust.GOOD]
    assert not good or good[-1] in kept
    assert kept <= {p.name for p in present}


@given(shelves(), RULES)
def test_deciding_again_after_deleting_deletes_nothing_more(
    present: list[Present], rules: RetentionRules
) -> None:
    kept = wanted(present, rules)
    assert wanted([p for p in present if p.name in kept], rules) == kept


def test_room_is_judged_with_something_to_spare() -> None:
    mib = 1 << 20
    assert shortage(FreeSpace(size=None, files=None), size=1 << 50, files=10**6) is None
    assert shortage(FreeSpace(size=200 * mib, files=None), size=100 * mib, files=4) is None
    assert "100M" in str(shortage(FreeSpace(size=120 * mib, files=None), size=100 * mib, files=4))
    assert "inodes" in str(shortage(FreeSpace(size=None, files=8), size=1, files=4))


def test_a_shortage_names_what_is_kept_free() -> None:
    text = str(
        shortage(FreeSpace(size=980 << 10, files=None), size=70 << 10, files=4, use_spare=True)
    )
    assert "70K and 1M kept free" in text
    assert ": 980K free" in text


def test_the_last_save_is_tried_wherever_it_can_fit() -> None:
    mib = 1 << 20
    free = FreeSpace(size=67 * mib, files=40)
    assert shortage(free, size=4 * mib, files=4) is None, "a small one leaves little spare"
    assert shortage(free, size=60 * mib, files=4) is not None
    assert shortage(free, size=60 * mib, files=4, use_spare=True) is None
    assert "no room" in str(shortage(free, size=67 * mib, files=4, use_spare=True))
    assert shortage(free, size=mib, files=30) is not None
    assert shortage(free, size=mib, files=30, use_spare=True) is None
