"""Signals are kept back until Slurm has said whether they are more than a warning."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from slurm_forge.journal.events import Event, Note
from slurm_forge.launch.conductor.warning_signals import WarningSignals
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.slurm.records import JobRecord
from tests.unit.recovery.test_warning_signal import NOW, record

SECOND = timedelta(seconds=1)
NEAR = record(left=80 * SECOND)


@dataclass
class Watch:
    """As ``JobPoller``: answers when the test says so."""

    latest: JobRecord | None = NEAR
    latest_query: int = 1
    begun: int = 1

    def ask(self) -> int:
        self.begun += 1
        return self.begun

    def answer(self, one: JobRecord, number: int | None = None) -> None:
        self.latest, self.latest_query = one, self.begun if number is None else number


@dataclass
class Lab:
    watch: Watch = field(default_factory=Watch)
    notes: list[Event] = field(default_factory=list)
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.signals = WarningSignals(
            self.watch,  # type: ignore[arg-type]
            Timing(lead=36 * SECOND, save_every=None, probe_every=None, probe_deadline=SECOND),
            note=self.notes.append,
            clock=lambda: self.clock,
            now=lambda: NOW + self.clock * SECOND,
        )


def test_slurms_warning_is_told_once_and_nothing_else_happens() -> None:
    lab = Lab()
    assert lab.signals.keep("SIGUSR1", "rank 0")
    assert lab.signals.keep("SIGUSR1", "rank 1")
    assert lab.signals.due() == (), "Slurm has not answered yet"
    lab.watch.answer(NEAR)
    assert lab.signals.due() == ()
    assert lab.signals.warnings == [("SIGUSR1", "rank 0"), ("SIGUSR1", "rank 1")]
    (note,) = lab.notes
    assert isinstance(note, Note)
    assert note.text == (
        "SIGUSR1: Slurm's warning of the time limit; training continues until 36 s before it "
        "(EndTime=12:01:20)"
    )
    lab.clock = 30.0
    assert lab.signals.due() == () and len(lab.notes) == 1


def test_an_answer_from_before_the_signal_decides_nothing() -> None:
    lab = Lab()
    lab.signals.keep("SIGUSR1", "rank 0")
    lab.watch.answer(NEAR, number=1)
    assert lab.signals.due() == () and lab.notes == []
    moved = replace(NEAR, preempt_time=NOW, end_time=NOW + 20 * SECOND)
    lab.watch.answer(moved)
    assert lab.signals.due() == (("SIGUSR1", "rank 0"),), "a preemption was waited out"
    assert lab.signals.due() == (), "twice"
    assert lab.notes == []


def test_where_slurm_does_not_answer_the_stop_comes_early() -> None:
    lab = Lab()
    lab.signals.keep("SIGUSR1", "batch step")
    lab.clock = 4.9
    assert lab.signals.due() == ()
    lab.clock = 5.0
    assert lab.signals.due() == (("SIGUSR1", "batch step"),)


def test_any_other_signal_is_not_kept_back() -> None:
    lab = Lab()
    assert not lab.signals.keep("SIGTERM", "rank 0")
    lab.watch.latest = record(left=timedelta(hours=9), limit=timedelta(hours=10))
    assert not lab.signals.keep("SIGUSR1", "rank 0")
    lab.watch.latest = None
    assert not lab.signals.keep("SIGUSR1", "rank 0")


def test_a_launch_that_is_over_has_heard_what_was_not_judged() -> None:
    lab = Lab()
    lab.signals.keep("SIGUSR2", "rank 0")
    assert lab.signals.close() == (("SIGUSR2", "rank 0"),)
    assert not lab.signals.keep("SIGUSR2", "rank 1"), "nobody would look at it any more"
