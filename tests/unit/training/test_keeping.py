"""Rank 0's book of checkpoints, without a training around it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.control.messages import protocol as p
from slurm_forge.errors import CheckpointError, StorageFullError
from slurm_forge.journal import JournalWriter, RunState, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.checkpointing.catalog import (
    Keeping,
    PeopleHeard,
)
from slurm_forge.vocabulary.trust import Trust
from tests.unit.checkpoint.helpers import save, weights

SECOND = timedelta(seconds=1)


class Book:
    """A keeping with real checkpoints under it; one launch after the other."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory.at(folder / "run")
        self.run.create(b"")
        self.launch = 0
        self.said: list[p.Message] = []
        self.left: float | None = None
        self.doubtful = False

    def begin(self, **checkpoint: Any) -> Keeping:
        self.launch += 1
        job = job_from_mapping({"name": "run", "entry": "a.b:c", "checkpoint": checkpoint})
        self.store = CheckpointStore(self.run.checkpoints, "run")
        self.journal = JournalWriter(self.run, attempt=1, writer="rank0", launch=self.launch)
        keeping = Keeping(
            self.store,
            job.checkpoint,
            journal=self.journal,
            current=(1, self.launch),
            fence=lambda: None,
            seconds_left=lambda: self.left,
            tell=self.said.append,
            losses_doubtful=lambda: self.doubtful,
            people=PeopleHeard(self.run).known,
        )
        keeping.recall(self.state)
        return keeping

    @property
    def state(self) -> RunState:
        return fold(read_journal(self.run)[0])

    def commit(self, keeping: Keeping, step: int, *findings: str) -> CheckpointName:
        name = save(self.store, weights(float(step)), step=step, launch=self.launch).name
        keeping.committed(
            name, reason="", size=100, lasted=SECOND, blocked=SECOND, findings=findings, time=1.0
        )
        return name

    def trusts(self) -> dict[int, str]:
        return {each.name.step: each.trust.value for each in self.state.known}

    def events(self, kind: type) -> list[Any]:
        return [r.event for r in read_journal(self.run)[0] if isinstance(r.event, kind)]


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def steps(keeping: Keeping, first: int, last: int, each: Callable[[int], None]) -> None:
    for step in range(first, last + 1):
        keeping.stepped(step, healthy=True)
        each(step)


def test_where_saves_are_frequent_some_live_for_long_enough_to_become_good(book: Book) -> None:
    keeping = book.begin(keep_last=2, good_after_steps=10)
    steps(keeping, 1, 60, lambda step: book.commit(keeping, step))
    assert "good" in book.trusts().values()
    assert len(book.store.candidates()) <= 6


def test_a_loss_that_is_off_puts_the_promotion_off(book: Book) -> None:
    keeping = book.begin(good_after_steps=2)
    book.commit(keeping, 1)
    book.doubtful = True
    steps(keeping, 2, 9, lambda _: None)
    assert book.trusts() == {1: "written"}
    book.doubtful = False
    steps(keeping, 10, 12, lambda _: None)
    assert book.trusts() == {1: "good"}


def test_a_witness_that_comes_before_the_commit_is_not_lost(book: Book) -> None:
    keeping = book.begin()
    keeping.witnessed(5, 1.5, 8)
    name = book.commit(keeping, 5)
    assert keeping.witness_of(name, 8) == 1.5
    assert keeping.witness_of(name, 4) is None, "another micro-batch holds other samples"
    assert [each.witness for each in book.state.known] == [1.5]


def test_what_a_launch_wrote_on_a_doubted_checkpoint_is_doubted_with_it(book: Book) -> None:
    keeping = book.begin()
    book.commit(keeping, 10)
    second = book.commit(keeping, 20)
    keeping = book.begin()
    keeping.resumed(second)
    book.commit(keeping, 25)
    assert keeping.doubt("the loss is off")
    assert book.trusts() == {10: "written", 20: "suspect", 25: "suspect"}
    book.commit(keeping, 30)
    assert book.trusts()[30] == "suspect"


def test_the_only_one_and_one_that_a_person_has_judged_are_not_doubted(book: Book) -> None:
    keeping = book.begin()
    first = book.commit(keeping, 10)
    keeping.resumed(first)
    assert not keeping.doubt("the loss is off")
    second = book.commit(keeping, 20)
    cli = JournalWriter(book.run, attempt=1, writer="cli")
    cli.write(ev.CheckpointJudged(name=str(second), trust=Trust.GOOD, reason="looked at"))
    keeping = book.begin()
    keeping.resumed(second)
    assert not keeping.doubt("the loss is off")
    assert book.trusts() == {10: "verified", 20: "good"}


def test_what_a_person_promotes_meanwhile_is_not_deleted(book: Book) -> None:
    keeping = book.begin(keep_last=2, good_after_steps=10**6)
    first = book.commit(keeping, 1)
    book.commit(keeping, 2)
    cli = JournalWriter(book.run, attempt=1, writer="cli")
    cli.write(ev.CheckpointJudged(name=str(first), trust=Trust.GOOD, reason="looked at"))
    for step in range(3, 9):
        book.commit(keeping, step)
    assert first in book.store.candidates()


def test_suspect_ones_do_not_fill_the_disk(book: Book) -> None:
    keeping = book.begin()
    for step in range(1, 20):
        book.commit(keeping, step, "NaN in models/m/w")
    assert [name.step for name in book.store.candidates()] == [19]


def test_what_a_checkpoint_says_of_itself_counts_where_the_journal_knows_nothing(
    book: Book,
) -> None:
    keeping = book.begin()
    name = save(book.store, weights(float("nan")), step=7, launch=1).name
    manifest = book.store.verify_manifest(name)
    assert "NaN" in str(keeping.eligible(manifest))
    keeping.rejected(name, "NaN")
    book.commit(keeping, 8)
    assert {n.step for n in book.store.candidates()} == {7, 8}


def test_an_evaluation_that_is_run_again_after_a_resume_counts(book: Book) -> None:
    best = {"keep_best": {"metric": "acc", "mode": "max"}}
    keeping = book.begin(**best)
    name = book.commit(keeping, 50)
    keeping = book.begin(**best)
    keeping.resumed(name)
    assert not keeping.evaluated(50, {"acc": 0.9}), "it is there already"
    assert keeping.best == 0.9
    assert not keeping.evaluated(60, {"acc": 0.5})


def test_figures_of_another_metric_are_not_compared(book: Book) -> None:
    keeping = book.begin(keep_best={"metric": "loss", "mode": "min"})
    book.commit(keeping, 10)
    keeping.evaluated(10, {"loss": 2.3})
    keeping = book.begin(keep_best={"metric": "acc", "mode": "max"})
    assert keeping.best is None
    assert keeping.evaluated(20, {"acc": 0.4})


@pytest.mark.parametrize("value", ["n/a", None, [1, 2]])
def test_a_metric_that_is_no_number_is_told_and_no_more(book: Book, value: Any) -> None:
    keeping = book.begin(keep_best={"metric": "acc", "mode": "max"})
    assert not keeping.evaluated(20, {"acc": value})
    (note,) = book.events(ev.Note)
    assert "'acc' is not a number" in note.text


def test_what_found_no_room_makes_old_ones_go(book: Book) -> None:
    keeping = book.begin(keep_last=3, good_after_steps=1)
    steps(keeping, 1, 3, lambda step: book.commit(keeping, step))
    oldest, *others = sorted(book.store.candidates())
    assert keeping.failed(4, StorageFullError("no quota left"))
    (pruned,) = book.events(ev.CheckpointsPruned)
    assert pruned.names == (str(oldest),)
    assert "to make room" in pruned.reason
    assert sorted(book.store.candidates()) == others
    assert not keeping.failed(5, StorageFullError("no quota left")), "two stay, whatever comes"
    assert sorted(book.store.candidates()) == others
    assert [event.step for event in book.events(ev.CheckpointFailed)] == [4, 5]


def test_what_failed_for_another_reason_deletes_nothing(book: Book) -> None:
    keeping = book.begin(keep_last=3, good_after_steps=1)
    steps(keeping, 1, 3, lambda step: book.commit(keeping, step))
    assert not keeping.failed(4, CheckpointError("an error of the device"))
    assert len(book.store.candidates()) == 3


def test_on_the_way_out_nothing_is_deleted(book: Book) -> None:
    keeping = book.begin(keep_last=1, good_after_steps=0)
    book.left = 10.0
    for step in range(1, 6):
        keeping.stepped(step, healthy=True)
        book.commit(keeping, step)
    assert len(book.store.candidates()) == 5
