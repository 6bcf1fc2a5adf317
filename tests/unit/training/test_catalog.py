"""Rank 0's catalog of checkpoints, without a training around it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.control.messages.message import Message
from slurm_forge.errors import CheckpointError, StorageFullError
from slurm_forge.journal import JournalWriter, RunState, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.checkpointing.catalog import (
    CheckpointCatalog,
    CliJudgements,
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
        self.said: list[Message] = []
        self.left: float | None = None
        self.doubtful = False

    def begin(self, **checkpoint: Any) -> CheckpointCatalog:
        self.launch += 1
        job = job_from_mapping({"name": "run", "entry": "a.b:c", "checkpoint": checkpoint})
        self.store = CheckpointStore(self.run.checkpoints, "run")
        self.journal = JournalWriter(self.run, attempt=1, writer="rank0", launch=self.launch)
        catalog = CheckpointCatalog(
            self.store,
            job.checkpoint,
            journal=self.journal,
            current=(1, self.launch),
            fence=lambda: None,
            seconds_left=lambda: self.left,
            tell=self.said.append,
            losses_doubtful=lambda: self.doubtful,
            people=CliJudgements(self.run).known,
        )
        catalog.recall(self.state)
        return catalog

    @property
    def state(self) -> RunState:
        return fold(read_journal(self.run)[0])

    def commit(self, catalog: CheckpointCatalog, step: int, *findings: str) -> CheckpointName:
        name = save(self.store, weights(float(step)), step=step, launch=self.launch).name
        catalog.committed(
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


def steps(catalog: CheckpointCatalog, first: int, last: int, each: Callable[[int], None]) -> None:
    for step in range(first, last + 1):
        catalog.stepped(step, healthy=True)
        each(step)


def test_where_saves_are_frequent_some_live_for_long_enough_to_become_good(book: Book) -> None:
    catalog = book.begin(keep_last=2, good_after_steps=10)
    steps(catalog, 1, 60, lambda step: book.commit(catalog, step))
    assert "good" in book.trusts().values()
    assert len(book.store.candidates()) <= 6


def test_a_loss_that_is_off_puts_the_promotion_off(book: Book) -> None:
    catalog = book.begin(good_after_steps=2)
    book.commit(catalog, 1)
    book.doubtful = True
    steps(catalog, 2, 9, lambda _: None)
    assert book.trusts() == {1: "written"}
    book.doubtful = False
    steps(catalog, 10, 12, lambda _: None)
    assert book.trusts() == {1: "good"}


def test_a_witness_that_comes_before_the_commit_is_not_lost(book: Book) -> None:
    catalog = book.begin()
    catalog.note_reference_loss(5, 1.5, 8)
    name = book.commit(catalog, 5)
    assert catalog.reference_loss(name) == (1.5, 8)
    assert [each.reference_loss for each in book.state.known] == [1.5]


def test_what_a_launch_wrote_on_a_doubted_checkpoint_is_doubted_with_it(book: Book) -> None:
    catalog = book.begin()
    book.commit(catalog, 10)
    second = book.commit(catalog, 20)
    catalog = book.begin()
    catalog.resumed(second)
    book.commit(catalog, 25)
    assert catalog.doubt("the loss is off")
    assert book.trusts() == {10: "written", 20: "suspect", 25: "suspect"}
    book.commit(catalog, 30)
    assert book.trusts()[30] == "suspect"


def test_the_only_one_and_one_that_a_person_has_judged_are_not_doubted(book: Book) -> None:
    catalog = book.begin()
    first = book.commit(catalog, 10)
    catalog.resumed(first)
    assert not catalog.doubt("the loss is off")
    second = book.commit(catalog, 20)
    cli = JournalWriter(book.run, attempt=1, writer="cli")
    cli.write(ev.CheckpointJudged(name=str(second), trust=Trust.GOOD, reason="looked at"))
    catalog = book.begin()
    catalog.resumed(second)
    assert not catalog.doubt("the loss is off")
    assert book.trusts() == {10: "verified", 20: "good"}


def test_what_a_person_promotes_meanwhile_is_not_deleted(book: Book) -> None:
    catalog = book.begin(keep_last=2, good_after_steps=10**6)
    first = book.commit(catalog, 1)
    book.commit(catalog, 2)
    cli = JournalWriter(book.run, attempt=1, writer="cli")
    cli.write(ev.CheckpointJudged(name=str(first), trust=Trust.GOOD, reason="looked at"))
    for step in range(3, 9):
        book.commit(catalog, step)
    assert first in book.store.candidates()


def test_suspect_ones_do_not_fill_the_disk(book: Book) -> None:
    catalog = book.begin()
    for step in range(1, 20):
        book.commit(catalog, step, "NaN in models/m/w")
    assert [name.step for name in book.store.candidates()] == [19]


def test_what_a_checkpoint_says_of_itself_counts_where_the_journal_knows_nothing(
    book: Book,
) -> None:
    catalog = book.begin()
    name = save(book.store, weights(float("nan")), step=7, launch=1).name
    manifest = book.store.verify_manifest(name)
    assert "NaN" in str(catalog.eligible(manifest))
    catalog.rejected(name, "NaN")
    book.commit(catalog, 8)
    assert {n.step for n in book.store.candidates()} == {7, 8}


def test_an_evaluation_that_is_run_again_after_a_resume_counts(book: Book) -> None:
    best = {"keep_best": {"metric": "acc", "mode": "max"}}
    catalog = book.begin(**best)
    name = book.commit(catalog, 50)
    catalog = book.begin(**best)
    catalog.resumed(name)
    assert not catalog.evaluated(50, {"acc": 0.9}), "it is there already"
    assert catalog.best == 0.9
    assert not catalog.evaluated(60, {"acc": 0.5})


def test_figures_of_another_metric_are_not_compared(book: Book) -> None:
    catalog = book.begin(keep_best={"metric": "loss", "mode": "min"})
    book.commit(catalog, 10)
    catalog.evaluated(10, {"loss": 2.3})
    catalog = book.begin(keep_best={"metric": "acc", "mode": "max"})
    assert catalog.best is None
    assert catalog.evaluated(20, {"acc": 0.4})


@pytest.mark.parametrize("value", ["n/a", None, [1, 2]])
def test_a_metric_that_is_no_number_is_told_and_no_more(book: Book, value: Any) -> None:
    catalog = book.begin(keep_best={"metric": "acc", "mode": "max"})
    assert not catalog.evaluated(20, {"acc": value})
    (note,) = book.events(ev.Note)
    assert "'acc' is not a number" in note.text


def test_what_found_no_room_makes_old_ones_go(book: Book) -> None:
    catalog = book.begin(keep_last=3, good_after_steps=1)
    steps(catalog, 1, 3, lambda step: book.commit(catalog, step))
    oldest, *others = sorted(book.store.candidates())
    assert catalog.failed(4, StorageFullError("no quota left"))
    (pruned,) = book.events(ev.CheckpointsPruned)
    assert pruned.names == (str(oldest),)
    assert "to make room" in pruned.reason
    assert sorted(book.store.candidates()) == others
    assert not catalog.failed(5, StorageFullError("no quota left")), "two stay, whatever comes"
    assert sorted(book.store.candidates()) == others
    assert [event.step for event in book.events(ev.CheckpointFailed)] == [4, 5]


def test_what_failed_for_another_reason_deletes_nothing(book: Book) -> None:
    catalog = book.begin(keep_last=3, good_after_steps=1)
    steps(catalog, 1, 3, lambda step: book.commit(catalog, step))
    assert not catalog.failed(4, CheckpointError("an error of the device"))
    assert len(book.store.candidates()) == 3


def test_on_the_way_out_nothing_is_deleted(book: Book) -> None:
    catalog = book.begin(keep_last=1, good_after_steps=0)
    book.left = 10.0
    for step in range(1, 6):
        catalog.stepped(step, healthy=True)
        book.commit(catalog, step)
    assert len(book.store.candidates()) == 5
