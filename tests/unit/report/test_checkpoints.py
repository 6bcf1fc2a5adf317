"""``checkpoints list``: what is told of what lies there and what is known."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from slurm_forge.journal import KnownCheckpoint, RunState, RunStatus
from slurm_forge.report.checkpoints import (
    Leftover,
    StoredCheckpoint,
    list_checkpoints,
    resumed_next,
)
from slurm_forge.report.checkpoints_text import amount, checkpoints_text
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import INDEX_NAME, FileEntry, Manifest
from slurm_forge.vocabulary.trust import Trust
from tests.unit.report.journals import TUESDAY


def name(step: int, attempt: int = 1, launch: int = 1) -> CheckpointName:
    return CheckpointName(step, attempt, launch, f"{step:08x}")


def found(step: int, attempt: int = 1, *, problem: str = "") -> StoredCheckpoint:
    manifest = Manifest(
        run_id="r",
        name=name(step, attempt),
        sequence=1,
        world_size=8,
        files=(FileEntry(INDEX_NAME, 2_500_000, ("0" * 32,)),),
        state={},
        torch_version="2.13",
        created_at=datetime.fromtimestamp(TUESDAY + step, timezone.utc),
        reason="every_steps",
    )
    size = manifest.size
    return StoredCheckpoint(
        name=name(step, attempt), manifest=None if problem else manifest, problem=problem, size=size
    )


def known(step: int, trust: Trust = Trust.WRITTEN, why: str = "", attempt: int = 1):
    return KnownCheckpoint(
        name=name(step, attempt), trust=trust, why=why, time=TUESDAY + step, size=9, seconds=1.5
    )


def text(
    state: RunState, present: list[StoredCheckpoint], left: tuple[Leftover, ...] = ()
) -> list[str]:
    listed = list_checkpoints("gpt", "/runs/gpt/checkpoints", state, present, left)
    return checkpoints_text(listed, now=TUESDAY, reference="gpt", zone=timezone.utc).splitlines()


def test_a_line_says_how_old_how_trusted_how_large_and_what_is_next() -> None:
    state = RunState(known=(known(100, Trust.GOOD, "20 healthy steps followed"), known(200)))
    lines = text(state, [found(200), found(100)])
    assert lines == [
        "gpt   2 checkpoints   5.00 MB   /runs/gpt/checkpoints",
        "  step 200   written   Tue 11 Aug 09:03   2.50 MB in 1.5 s   every_steps   attempt 1   "
        "8 ranks   step-00000200.a1.l1-000000c8   <- next",
        "  step 100   good      Tue 11 Aug 09:01   2.50 MB in 1.5 s   every_steps   attempt 1   "
        "8 ranks   step-00000100.a1.l1-00000064",
    ]


def test_suspect_and_unreadable_ones_say_why_and_are_not_next() -> None:
    state = RunState(known=(known(100), known(200), known(300, Trust.SUSPECT, "NaN in head")))
    lines = text(state, [found(300), found(200, problem="index.json is missing"), found(100)])
    assert "   suspect " in lines[1]
    assert lines[2].strip() == "NaN in head"
    assert "   unreadable " in lines[3]
    assert lines[4].strip() == "index.json is missing"
    assert lines[5].endswith("<- next")
    assert sum("<- next" in line for line in lines) == 1


def test_nothing_to_resume_from_says_what_to_do() -> None:
    state = RunState(known=(known(300, Trust.SUSPECT, "x"),))
    assert "slurm-forge checkpoints promote gpt STEP" in text(state, [found(300)])[-1]


def test_what_is_gone_and_what_was_left_behind_is_told_in_a_line_each() -> None:
    state = RunState(known=tuple(known(step) for step in range(10, 210, 10)))
    left = (
        Leftover(name=".stage-x", kind="stage", size=10**9),
        Leftover(name=".trash-x", kind="trash", size=2000),
        Leftover(name=".trash-y", kind="trash", size=2000),
    )
    lines = text(state, [found(200)], left)
    assert lines[2:] == [
        "  missing on disk, though never deleted by the run: "
        "step 190, 180, 170, 160, 150, 140, 130, 120 and 11 more",
        "  1 folder of saves in progress or interrupted: 1.00 GB",
        "  2 folders of interrupted deletions: 4.00 kB",
    ]


def test_one_that_the_journal_does_not_know() -> None:
    listed = list_checkpoints("gpt", "/x", RunState(), [found(5)], ())
    (line,) = listed.checkpoints
    assert (line.trust, line.save_s, line.next) == ("unknown", None, True)
    assert line.time == TUESDAY + 5


@pytest.mark.parametrize(("unstable", "trust", "resumed"), [
    (None, Trust.GOOD, 9),
    ((2, 1), Trust.GOOD, 3),
    ((1, 4), Trust.GOOD, 9),  # it was written after the instability
    ((2, 1), Trust.VERIFIED, 9),  # there is nothing better yet
])  # fmt: skip
def test_after_an_instability_what_nobody_knows_is_not_resumed_from(
    unstable, trust, resumed
) -> None:
    state = RunState(known=(known(3, trust),), unstable=unstable)
    assert resumed_next(state, [found(9, 2), found(3)]) == name(resumed, 2 if resumed == 9 else 1)


def test_a_finished_run_is_not_resumed() -> None:
    state = RunState(status=RunStatus.FINISHED, known=(known(3),))
    assert not list_checkpoints("gpt", "/x", state, [found(3)], ()).checkpoints[0].next


def test_no_checkpoints() -> None:
    assert text(RunState(), []) == ["gpt   0 checkpoints   /runs/gpt/checkpoints"]


@pytest.mark.parametrize(("size", "shown"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (99_940, "99.9 kB"),
    (999_499, "999 kB"), (999_500, "1.00 MB"), (4_120_000, "4.12 MB"), (10**12, "1.00 TB"),
    (10**18, "1000 PB"),
])  # fmt: skip
def test_amounts(size, shown) -> None:
    assert amount(size) == shown
