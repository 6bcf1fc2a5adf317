"""What became of each listener, from what was told."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.messages.live import ListenerEvent, format_event
from slurm_forge.launch.diagnose.live_rounds import parse_event, sightings
from slurm_forge.recovery.live_observations import (
    Fate,
    Receiver,
    Sighting,
)

SENT = 100.0


def told(
    way: Receiver, what: Any, at: float = 100.5, signal: str = "SIGUSR2", host: str = "n1"
) -> ListenerEvent:
    return ListenerEvent(way=way.value, host=host, what=what, at=at, signal=signal)


def ended(way: Receiver, at: float) -> ListenerEvent:
    return told(way, "ended", at, signal="", host="")


def fates(*events: ListenerEvent, absent: tuple[Receiver, ...] = ()) -> dict[Receiver, Sighting]:
    expected = {(way, "n1") for way in Receiver}
    found = sightings(
        {pair for pair in expected if pair[0] not in absent},
        events,
        expected=expected,
        signal="SIGUSR2",
        sent_at=SENT,
    )
    return {each.way: each for each in found}


def test_a_handler_that_ran_is_heard_and_timed() -> None:
    found = fates(told(Receiver.TASK, "saw", 100.25), told(Receiver.TASK, "saw", 100.5))[
        Receiver.TASK
    ]
    assert (found.fate, found.signals, found.after_s) == (Fate.HEARD, ("SIGUSR2",), 0.25)


def test_a_task_that_ends_without_a_word_has_died_of_it() -> None:
    found = fates(ended(Receiver.TASK_PLAIN, 101.0))
    assert (found[Receiver.TASK_PLAIN].fate, found[Receiver.TASK_PLAIN].after_s) == (
        Fate.DIED,
        1.0,
    )
    assert found[Receiver.SHELL].fate is Fate.NOTHING


def test_a_rank_below_something_that_ends_goes_with_it() -> None:
    found = fates(ended(Receiver.SHELL, 101.0))[Receiver.SHELL]
    assert (found.fate, found.signals) == (Fate.CARRIED_OFF, ())


def test_a_rank_below_a_shell_that_heard_it_first_is_not_called_deaf() -> None:
    assert (
        fates(told(Receiver.SHELL, "saw"), ended(Receiver.SHELL, 101.0))[Receiver.SHELL].fate
        is Fate.HEARD
    )


def test_workers_go_with_their_task_and_not_with_a_shell() -> None:
    found = fates(ended(Receiver.TASK, 101.0), told(Receiver.WORKER_PLAIN, "died"))
    assert found[Receiver.WORKER].fate is Fate.CARRIED_OFF
    assert found[Receiver.WORKER_PLAIN].fate is Fate.DIED
    assert fates(ended(Receiver.SHELL, 101.0))[Receiver.WORKER].fate is Fate.NOTHING


def test_who_was_not_there_is_not_said_to_have_missed_it() -> None:
    assert (
        fates(ended(Receiver.TORCHRUN, 101.0), absent=(Receiver.TORCHRUN,))[Receiver.TORCHRUN].fate
        is Fate.ABSENT
    )


def test_a_clock_that_went_back_is_no_negative_time() -> None:
    assert fates(told(Receiver.TASK, "saw", 99.0))[Receiver.TASK].after_s == 0.0


@given(
    st.sampled_from(list(Receiver)),
    st.sampled_from(["here", "saw", "died"]),
    st.text(max_size=20),
)
def test_what_is_said_is_what_is_heard(way: Receiver, what: Any, host: str) -> None:
    said = ListenerEvent(way=way.value, host=host, what=what, at=1.5, signal="SIGTERM")
    line = format_event(said)
    assert line.count(b"\n") == 1
    assert parse_event(line.decode()) == said
    assert parse_event(f"[default0]:{line.decode()}") == said  # as torchrun marks lines


@given(st.text())
def test_other_peoples_lines_are_nobodys_words(line: str) -> None:
    assert parse_event(line) is None or "forge-live " in line
    assert parse_event("forge-live " + line) is None
