"""What doctor says of the folder of runs, and how often to save."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from slurm_forge.recovery.live_findings import Mark
from slurm_forge.recovery.policy.save_interval import (
    FIRST,
    Advice,
)
from slurm_forge.report.doctor.sections import ReportSection
from slurm_forge.report.doctor.storage_section import (
    StorageFacts,
    checkpoint_section,
    storage_section,
)
from slurm_forge.site.model import Storage
from slurm_forge.store.mounts import Mount
from slurm_forge.store.quota import Quota, QuotaAnswer
from slurm_forge.store.room import FreeSpace
from slurm_forge.store.trying import Locks, Tried

LUSTRE = Mount("/scratch", "lustre", "x:/scratch", ("rw",))
GIB = 1 << 30


def marks(section: ReportSection) -> dict[str, Mark]:
    return {told.text: told.mark for told in section.told}


def only(facts: StorageFacts) -> tuple[Mark, str]:
    (told,) = storage_section(facts).told[1:]
    return told.mark, told.text


@pytest.mark.parametrize(
    ("mount", "mark", "words"),
    [
        (LUSTRE, Mark.OK, "lustre, mounted at /scratch"),
        (Mount("/", "ext4", "sda1", ("rw",)), Mark.WARNING, "compute nodes do not see it"),
        (Mount("/x", "newfs", "y", ("rw",)), Mark.NOTE, "see it is unknown"),
        (Mount("/s", "lustre", "x", ("ro",)), Mark.PROBLEM, "read-only"),
        (None, Mark.NOTE, "could not be determined"),
    ],
)
def test_the_kind_of_file_system(mount: Mount | None, mark: Mark, words: str) -> None:
    (told,) = storage_section(StorageFacts(folder="/r", mount=mount)).told
    assert told.mark is mark and words in told.text
    assert bool(told.next_step) == (mark in (Mark.WARNING, Mark.PROBLEM))


@pytest.mark.parametrize(
    ("kind", "options", "mark", "words"),
    [
        ("nfs4", (), Mark.NOTE, "up to 60 s late"),
        ("nfs4", ("acdirmin=600", "acdirmax=600"), Mark.NOTE, "up to 600 s late"),
        ("nfs", ("nocto",), Mark.WARNING, "missed for 60 s"),
        ("nfs", ("noac", "soft"), Mark.WARNING, "mounted soft"),
        ("nfs", ("noac", "nolock", "local_lock=all"), Mark.NOTE, "locks hold on one host only"),
        ("nfs4", ("noac", "local_lock=flock"), Mark.NOTE, "locks hold on one host only"),
        ("lustre", ("localflock",), Mark.NOTE, "locks hold on one host only"),
    ],
)
def test_what_mount_options_change_is_told(
    kind: str, options: tuple[str, ...], mark: Mark, words: str
) -> None:
    (told,) = storage_section(
        StorageFacts(folder="/r", mount=Mount("/h", kind, "n", ("rw", *options)))
    ).told[1:]
    assert told.mark is mark and words in told.text
    assert bool(told.next_step) == (mark is Mark.WARNING)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lustre", ("flock",)), ("nfs4", ("noac", "hard", "local_lock=none")), ("gpfs", ("soft",))],
)
def test_options_that_change_nothing_are_not_told(kind: str, options: tuple[str, ...]) -> None:
    mount = Mount("/h", kind, "n", ("rw", *options))
    assert len(storage_section(StorageFacts(folder="/r", mount=mount)).told) == 1


@pytest.mark.parametrize(
    ("room", "checkpoint", "mark"),
    [
        (FreeSpace(900 * GIB, None), None, Mark.OK),
        (FreeSpace(5 * GIB, None), None, Mark.WARNING),
        (FreeSpace(30 * GIB, None), 20 * GIB, Mark.PROBLEM),
        (FreeSpace(None, 100), None, Mark.WARNING),
    ],
)
def test_room(room: FreeSpace, checkpoint: int | None, mark: Mark) -> None:
    found = only(StorageFacts(folder="/r", mount=LUSTRE, free_space=room, checkpoint=checkpoint))
    assert found[0] is mark, found


@pytest.mark.parametrize(
    ("quota", "mark", "words"),
    [
        (Quota(filesystem="/s", used=GIB), Mark.OK, "1.0 GiB used"),
        (Quota(filesystem="/s", used=GIB, hard=GIB), Mark.PROBLEM, "0 B left"),
        (Quota(filesystem="/s", used=GIB, soft=3 * GIB), Mark.WARNING, "2.0 GiB left"),
        (Quota(filesystem="/s", used=0, files=9, files_hard=9), Mark.PROBLEM, "0 more files"),
    ],
)
def test_quota(quota: Quota, mark: Mark, words: str) -> None:
    answer = QuotaAnswer("lfs quota", (quota,))
    found = only(StorageFacts(folder="/r", mount=LUSTRE, quota=answer))
    assert found[0] is mark and words in found[1]


def test_what_could_not_be_asked_is_told() -> None:
    answer = QuotaAnswer("lfs", problem="lfs is not installed here")
    found = only(StorageFacts(folder="/r", mount=LUSTRE, quota=answer))
    assert found == (Mark.NOTE, "quota: lfs: lfs is not installed here.")


@pytest.mark.parametrize(
    ("tried", "worst"),
    [
        (Tried(locks=Locks.WORK, publish_s=0.01), Mark.OK),
        (Tried(locks=Locks.WORK, publish_s=3.0), Mark.WARNING),
        (Tried(locks=Locks.NONE, publish_s=0.01), Mark.NOTE),
        (Tried(locks=Locks.DO_NOT_HOLD, publish_s=0.01), Mark.NOTE),
        (Tried(problem="/r: Disk quota exceeded"), Mark.PROBLEM),
    ],
)
def test_what_was_tried(tried: Tried, worst: Mark) -> None:
    section = storage_section(StorageFacts(folder="/r", mount=LUSTRE, tried=tried))
    assert max(marks(section).values(), key=list(Mark).index) is worst


def test_the_purge_rule_and_what_it_does_to_a_run() -> None:
    storage = Storage(role="scratch", purge_after=timedelta(days=60), purge_basis="not used")
    mark, text = only(StorageFacts(folder="/r", mount=LUSTRE, purge=storage))
    assert mark is Mark.NOTE and "60 d" in text and "loses its checkpoints" in text


def test_advice_says_what_it_rests_on() -> None:
    (nothing,) = checkpoint_section(Advice(every=FIRST), ()).told
    assert "every 10 min: nothing was measured (no runs here yet)" in nothing.text
    seen = Advice(
        every=timedelta(minutes=9), runs=3, saves=7, blocked=timedelta(seconds=0.3),
        durable=timedelta(seconds=6), running=timedelta(hours=58), interruptions=1,
    )  # fmt: skip
    (told,) = checkpoint_section(seen, ()).told
    assert "every 9 min: 7 saves in 3 runs here took 6.0 s at most" in told.text
    assert "; 1 interruption in 2 d 10 h, one in about 2 d 10 h. every_minutes" in told.text


def test_advice_mixes_nothing_assumed_into_what_was_seen() -> None:
    """31 interruptions in 75 min are one in 2.4 min, and no day is added to that."""
    seen = Advice(
        every=timedelta(minutes=1), runs=3, saves=7, blocked=timedelta(seconds=0.3),
        durable=timedelta(seconds=6), running=timedelta(minutes=75), interruptions=31,
    )  # fmt: skip
    (told,) = checkpoint_section(seen, ()).told
    assert "31 interruptions in 75 min, one in about 2 min 25 s." in told.text
    (quiet,) = checkpoint_section(replace(seen, interruptions=0), ()).told
    assert "no interruption in 75 min; one in 25 h 15 min is assumed, 24 h more" in quiet.text


def test_a_size_that_nobody_knows_is_not_told() -> None:
    mark, text = only(StorageFacts(folder="/r", free_space=FreeSpace(1 << 20, None)))
    assert mark is Mark.PROBLEM
    assert "1.0 MiB free" in text and "0 B" not in text


@pytest.mark.parametrize(
    ("ahead", "words"),
    [(3600.0, "ahead of the file system's"), (-90.0, "behind the file system's")],
)
def test_a_clock_that_differs_from_the_file_systems(ahead: float, words: str) -> None:
    facts = StorageFacts(folder="/r", mount=LUSTRE, tried=Tried(clock_ahead_s=ahead))
    (told,) = [each for each in storage_section(facts).told if "clock is" in each.text]
    assert told.mark is Mark.WARNING and words in told.text and told.next_step


@pytest.mark.parametrize("ahead", [None, 0.0, 2.0, -2.0])
def test_clocks_that_agree_are_not_told_of(ahead: float | None) -> None:
    facts = StorageFacts(folder="/r", mount=LUSTRE, tried=Tried(clock_ahead_s=ahead))
    assert not any("clock is" in each.text for each in storage_section(facts).told)
