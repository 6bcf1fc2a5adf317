from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.clock_page import ClockReader, FinishedPhase, ProgressClock, new_page
from slurm_forge.vocabulary.position import LAST, Position


class Shared:
    """A page with its writer and a reader; ``now`` is the clock of the writer."""

    def __init__(self) -> None:
        self.descriptor = new_page()
        self.now = 100.0
        self.clock = ProgressClock(self.descriptor, lambda: self.now)
        self.reader = ClockReader(self.descriptor)

    def after(self, seconds: float) -> ProgressClock:
        self.now += seconds
        return self.clock

    def kind(self) -> str:
        moved = self.reader.moved()
        assert moved is not None
        return moved.kind


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    os.close(made.descriptor)


def step(shared: Shared, number: int, seconds: float = 0.0) -> None:
    """One turn of the loop, as boundary, feeding and stepping write it."""
    shared.clock.advance(Position(number), "train")
    shared.clock.advance(Position(number, 1), "data")
    shared.clock.advance(Position(number, 1, LAST), "train")
    shared.clock.begin(number + 1)
    shared.now += seconds


def test_an_untouched_page_says_nothing() -> None:
    assert ClockReader(new_page()).moved() is None


def test_where_it_is_and_since_when(shared: Shared) -> None:
    shared.after(2.0).enter("eval")
    shared.after(1.0).advance(Position(7, 2, 3, rollbacks=1))
    moved = shared.reader.moved()
    assert moved is not None
    assert (moved.position, moved.at, moved.phase) == (Position(7, 2, 3, 1), 103.0, "eval")


def test_looking_around_while_waiting_for_data_is_no_progress(shared: Shared) -> None:
    shared.clock.enter("data")
    shared.after(1.0).advance(Position(3, 1))
    shared.after(5.0).advance(Position(3, 1, 4))
    moved = shared.reader.moved()
    assert moved is not None and moved.at == 101.0
    shared.after(1.0).advance(Position(3, 1, LAST))
    moved = shared.reader.moved()
    assert moved is not None and moved.at == 107.0


def test_steps_are_of_another_kind_behind_a_start_a_phase_and_a_rollback(shared: Shared) -> None:
    kinds = []
    for number in range(4):
        step(shared, number)
        kinds.append(shared.kind())
    assert kinds == ["first train", "first train", "train", "train"]
    shared.clock.enter("eval")
    assert shared.kind() == "eval"
    step(shared, 4)
    assert shared.kind() == "next train"
    step(shared, 5)
    step(shared, 6)
    assert shared.kind() == "train"
    shared.clock.enter("load")
    shared.clock.rewound(Position(2, rollbacks=1))
    step(shared, 2)
    assert shared.kind() == "first train"


def test_what_took_long_is_told_once_and_what_is_short_only_at_first(shared: Shared) -> None:
    for number in range(9):
        step(shared, number, 0.01)
    shared.reader.lasted()
    step(shared, 9, 3.0)
    step(shared, 10, 0.01)
    assert shared.reader.lasted() == [FinishedPhase("train", pytest.approx(3.0))]
    assert shared.reader.lasted() == []


def test_the_ways_into_and_out_of_a_phase_are_no_stretches_of_it(shared: Shared) -> None:
    """Else a phase would count as seen, and as short, before it was over for the first time."""
    for number in range(2):
        shared.clock.enter("report")
        shared.clock.advance(Position(4, 1))
        shared.reader.lasted()
        shared.after(0.1).advance(Position(4, 1, LAST))
        shared.clock.enter("train")
        told = [each for each in shared.reader.lasted() if each.kind == "report"]
        assert told == [FinishedPhase("report", pytest.approx(0.1))], number


def test_a_step_is_not_known_before_steps_were_done(shared: Shared) -> None:
    for number in range(3):
        step(shared, number, 0.1)
    assert shared.kind() == "train"
    assert not [each for each in shared.reader.lasted() if each.kind == "train"]
    step(shared, 3)
    assert [each.seconds for each in shared.reader.lasted() if each.kind == "train"] == [
        pytest.approx(0.1)
    ]


def test_more_than_fit_leave_the_last_ones(shared: Shared) -> None:
    for number in range(500):
        shared.after(1.0 + number).advance(Position(number))
    told = shared.reader.lasted()
    assert len(told) == 64
    assert [each.seconds for each in told] == [1.0 + number for number in range(436, 500)]


NAMES = st.text(min_size=1, max_size=40)


@given(st.lists(st.tuples(NAMES, st.integers(0, 2**40), st.integers(0, LAST)), max_size=20))
def test_the_last_word_is_what_is_read(words: list[tuple[str, int, int]]) -> None:
    shared = Shared()
    for name, number, poll in words:
        shared.clock.enter(name)
        shared.clock.advance(Position(number, 1, poll))
        moved = shared.reader.moved()
        assert moved is not None
        assert moved.position.step == number or name == "data"
        assert name.encode(errors="replace").startswith(moved.phase.encode(errors="ignore")[:20])
    os.close(shared.descriptor)


def test_a_phase_can_be_told_with_its_first_position_and_its_end_with_its_last() -> None:
    together, apart = Shared(), Shared()
    for number in range(6):
        for shared in (together, apart):
            shared.now += 0.01
        together.clock.advance(Position(number), "train")
        apart.clock.enter("train")
        apart.clock.advance(Position(number))
        for shared in (together, apart):
            shared.now += 0.02
        together.clock.advance(Position(number, 1), "data")
        apart.clock.enter("data")
        apart.clock.advance(Position(number, 1))
        for shared in (together, apart):
            shared.now += 0.3
        together.clock.advance(Position(number, 1, LAST), "train")
        apart.clock.advance(Position(number, 1, LAST))
        apart.clock.enter("train")
        assert together.reader.moved() == apart.reader.moved()
        assert together.reader.lasted() == apart.reader.lasted()
        together.clock.begin(number + 1), apart.clock.begin(number + 1)
        assert together.reader.moved() == apart.reader.moved()


def test_a_reader_never_sees_half_of_a_record() -> None:
    """Another process writes as fast as it can; every record has one number in all of its parts."""
    descriptor = new_page()
    clock = ProgressClock(descriptor, lambda: 0.0)
    pid = os.fork()
    if pid == 0:
        number = 0
        while os.getppid() != 1:
            number += 1
            clock._begun = number
            clock.advance(Position(number, number, number, number))
        os._exit(0)
    try:
        reader, seen = ClockReader(descriptor), set()
        deadline = time.monotonic() + 30
        while len(seen) < 2_000 and time.monotonic() < deadline:
            moved = reader.moved()
            if moved is None or moved.position.step == 0:
                continue
            place = moved.position
            assert {place.rollbacks, place.step, place.phase, place.poll} == {moved.begun}
            seen.add(moved.begun)
        assert len(seen) >= 2_000, "the two hardly met"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)
