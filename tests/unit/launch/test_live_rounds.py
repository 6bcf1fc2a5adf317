"""What became of each listener, from what was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.messages.live import (
    Told,
    hear,
    line_of,
)
from slurm_forge.launch.diagnose.live_rounds import (
    Ended,
    sightings,
)
from slurm_forge.recovery.live_observations import (
    Fate,
    Sighting,
    Way,
)

SENT = 100.0


def told(way: Way, what: str, at: float = 100.5, signal: str = "SIGUSR2", host: str = "n1") -> Told:
    return Told(way=way.value, host=host, what=what, at=at, signal=signal)


def fates(*events: Told | Ended, absent: tuple[Way, ...] = ()) -> dict[Way, Sighting]:
    wanted = {(way, "n1") for way in Way}
    found = sightings(
        {pair for pair in wanted if pair[0] not in absent},
        [each for each in events if isinstance(each, Told)],
        [each for each in events if isinstance(each, Ended)],
        wanted=wanted,
        workers_of=Way.TASK,
        signal="SIGUSR2",
        sent_at=SENT,
    )
    return {each.way: each for each in found}


def test_a_handler_that_ran_is_heard_and_timed() -> None:
    found = fates(told(Way.TASK, "saw", 100.25), told(Way.TASK, "saw", 100.5))[Way.TASK]
    assert (found.fate, found.signals, found.after_s) == (Fate.HEARD, ("SIGUSR2",), 0.25)


def test_a_task_that_ends_without_a_word_has_died_of_it() -> None:
    found = fates(Ended(Way.TASK_PLAIN, 101.0))
    assert (found[Way.TASK_PLAIN].fate, found[Way.TASK_PLAIN].after_s) == (Fate.DIED, 1.0)
    assert found[Way.SHELL].fate is Fate.NOTHING


def test_a_rank_below_something_that_ends_goes_with_it() -> None:
    found = fates(Ended(Way.SHELL, 101.0))[Way.SHELL]
    assert (found.fate, found.signals) == (Fate.CARRIED_OFF, ())


def test_a_rank_below_a_shell_that_heard_it_first_is_not_called_deaf() -> None:
    assert fates(told(Way.SHELL, "saw"), Ended(Way.SHELL, 101.0))[Way.SHELL].fate is Fate.HEARD


def test_workers_go_with_their_task_and_not_with_a_shell() -> None:
    found = fates(Ended(Way.TASK, 101.0), told(Way.WORKER_PLAIN, "died"))
    assert found[Way.WORKER].fate is Fate.CARRIED_OFF
    assert found[Way.WORKER_PLAIN].fate is Fate.DIED
    assert fates(Ended(Way.SHELL, 101.0))[Way.WORKER].fate is Fate.NOTHING


def test_who_was_not_there_is_not_said_to_have_missed_it() -> None:
    assert (
        fates(Ended(Way.TORCHRUN, 101.0), absent=(Way.TORCHRUN,))[Way.TORCHRUN].fate is Fate.ABSENT
    )


def test_a_clock_that_went_back_is_no_negative_time() -> None:
    assert fates(told(Way.TASK, "saw", 99.0))[Way.TASK].after_s == 0.0


@given(st.sampled_from(list(Way)), st.sampled_from(["here", "saw", "died"]), st.text(max_size=20))
def test_what_is_said_is_what_is_heard(way: Way, what: str, host: str) -> None:
    said = Told(way=way.value, host=host, what=what, at=1.5, signal="SIGTERM")
    line = line_of(said)
    assert line.count(b"\n") == 1
    assert hear(line.decode()) == said
    assert hear(f"[default0]:{line.decode()}") == said  # as torchrun marks lines


@given(st.text())
def test_other_peoples_lines_are_nobodys_words(line: str) -> None:
    assert hear(line) is None or "forge-live " in line
    assert hear("forge-live " + line) is None
