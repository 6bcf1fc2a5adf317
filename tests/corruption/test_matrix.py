"""Thousands of damages to real checkpoints: each is noticed, and the newest intact one is taken.

All kinds with their counts, beside plain DCP and torch.save: ``scripts/corruption-matrix``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slurm_forge.checkpoint.read import shard_reader as shardread
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.errors import CheckpointRejectedError
from slurm_forge.store.identity import CheckpointName
from tests.corruption.bench import NEWEST, OLDER, Bench, Shape, Verdict, catalogue
from tests.corruption.contents import (
    Contents,
    Wrapping,
    fill_store,
    memory_directory,
    open_store,
)
from tests.corruption.damage import BLOCK, Damage
from tests.distributed.ranks import run_ranks
from tests.unit.checkpoint.helpers import save, weights

TINY = Shape(1, 6_000)
DDP = Shape(2, 6_000, Wrapping.DDP)
FSDP2 = Shape(2, 6_000, Wrapping.FSDP2)
#: Three blocks a file.
LARGE = Shape(1, 700_000)
LARGE_FSDP2 = Shape(2, 1_400_000, Wrapping.FSDP2)
#: Three tensors of three blocks each: half of one is less than what it lies in.
PARTS = 3_000_000


@pytest.fixture
def bench(request, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = memory_directory(tmp_path)
    try:
        yield Bench(folder, request.param)
    finally:
        torch.set_num_threads(before)
        if folder != tmp_path:
            shutil.rmtree(folder)


def spelled_otherwise(damage: Damage) -> bool:
    """White space at the end of the manifest, or a number in it that is spelled otherwise."""
    text = damage.changes.get("manifest.json")
    if set(damage.changes) != {"manifest.json"} or text is None:
        return False
    return json.loads(text)["body"] is not None and damage.kind in (
        "flipped bit", "truncated", "extended",
    )  # fmt: skip


@pytest.mark.parametrize(("bench", "flips", "texts", "least"), [
    (TINY, 450, True, 850),
    (DDP, 400, True, 850),
    (FSDP2, 200, False, 350),
    (LARGE, 25, False, 100),
    (LARGE_FSDP2, 20, False, 100),
], indirect=["bench"], ids=str)  # fmt: skip
def test_every_damage_is_noticed(bench, flips, texts, least):
    found = Counter()
    for damage in catalogue(bench, seed=20, flips=flips, texts=texts):
        verdict = bench.examine(damage)
        found[verdict] += 1
        if verdict is Verdict.SAME:
            assert spelled_otherwise(damage), (damage.kind, damage.what)
    assert found[Verdict.SILENT] == 0
    assert found[Verdict.DETECTED] >= least
    assert found[Verdict.SAME] <= 5, "almost nothing may change and pass"
    assert bench.resume() == (bench.newest, []), "the bench itself is not what it was"
    assert max(map(len, bench.files[bench.newest].values())) > 2 * BLOCK or bench.shape.floats < 1e5


@pytest.mark.parametrize("bench", [DDP], indirect=True, ids=str)
def test_where_both_are_damaged_nothing_is_loaded_and_nothing_begun_anew(bench):
    kinds = {}
    for damage in catalogue(bench, seed=21, flips=10):
        if bench.examine(damage) is Verdict.DETECTED and "manifest.json" in damage.changes:
            kinds[damage.kind] = damage
    assert len(kinds) >= 12
    for damage in kinds.values():
        with bench.damaged(bench.newest, damage), bench.damaged(bench.older, damage):
            found, rejected = bench.resume()
            # What one holds instead of its own file may be the very file of the other.
            if found is None:
                assert rejected == [bench.newest, bench.older], damage.kind
            else:
                assert (found, rejected) == (bench.older, [bench.newest]), damage.kind
                assert damage.kind == "swapped, of two checkpoints"


@pytest.mark.parametrize("bench", [DDP], indirect=True, ids=str)
def test_files_that_nobody_listed_are_never_opened(bench, monkeypatch):
    opened = []
    real = os.open

    def watched(path, *args, **options):
        opened.append(Path(path).name)
        return real(path, *args, **options)

    folder = bench.store.path(bench.newest)
    strange = ["rank-00002.data", ".metadata", "index.json~", "core", ".nfs000000001", "latest"]
    for name in strange:
        (folder / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    monkeypatch.setattr(os, "open", watched)
    assert bench.resume() == (bench.newest, [])
    assert bench.is_whole(bench.newest)
    assert "rank-00000.data" in opened and not set(opened) & set(strange)


def moved(bench, name, **changes):
    fields = {field: getattr(name, field) for field in ("step", "attempt", "launch", "nonce")}
    target = CheckpointName(**(fields | changes))
    bench.store.path(name).rename(bench.store.path(target))
    return target


def copied(bench, name, **changes):
    """As somebody would do it who wants to go back: a good copy of a good checkpoint."""
    shutil.copytree(bench.store.path(name), bench.store.directory / "copy")
    target = moved(bench, name, **changes)
    (bench.store.directory / "copy").rename(bench.store.path(name))
    return target


def exchanged(bench):
    first, second = bench.store.path(bench.older), bench.store.path(bench.newest)
    first.rename(bench.store.directory / "x")
    second.rename(first)
    (bench.store.directory / "x").rename(second)


def half_copied(bench):
    folder = bench.store.path(bench.newest)
    (folder / "rank-00001.data").unlink()
    (folder / "manifest.json").unlink()


def of_another_run(bench):
    foreign = open_store(bench.store.directory.parent / "foreign")
    foreign.run_id = "another"
    name = save(foreign, weights(), step=9).name
    foreign.path(name).rename(bench.store.path(name))
    return name


#: What is done to whole directories: what is rejected, what is taken in the end.
PLACES = {
    "the older one copied back under a higher step": (
        lambda b: copied(b, b.older, step=9), "copy", "newest"),
    "the older one copied back under the newest's step": (
        lambda b: copied(b, b.older, step=NEWEST, attempt=5), "copy", "newest"),
    "the older one copied back under a higher attempt": (
        lambda b: copied(b, b.older, step=NEWEST, attempt=2), "copy", "newest"),
    "the newest renamed to a higher step": (lambda b: moved(b, b.newest, step=9), "copy", "older"),
    "the newest renamed to another launch": (
        lambda b: moved(b, b.newest, launch=3), "copy", "older"),
    "the newest with another nonce": (
        lambda b: moved(b, b.newest, nonce="0" * 8), "copy", "older"),
    "the two exchanged": (exchanged, "both", None),
    "half copied": (half_copied, "newest", "older"),
    "of another run": (of_another_run, "copy", "newest"),
    "a link instead": (
        lambda b: b.store.path(b.newest).symlink_to(moved_away(b)), "newest", "older"),
    "a file instead": (
        lambda b: moved_away(b) and b.store.path(b.newest).touch(), "newest", "older"),
    "gone": (lambda b: moved_away(b) and None, "nothing", "older"),
    "an empty one of a higher step": (
        lambda b: (b.store.directory / "step-00000009.a1.l1-00000000").mkdir(), "copy", "newest"),
}  # fmt: skip


def moved_away(bench):
    elsewhere = bench.store.directory.parent / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    bench.store.path(bench.newest).rename(elsewhere)
    return elsewhere


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("bench", [DDP], indirect=True, ids=str)
def test_a_checkpoint_counts_only_under_its_own_name_in_its_own_run(bench, case):
    change, passed_over, taken = PLACES[case]
    before = {bench.newest, bench.older}
    with bench.rearranged(change):
        found, rejected = bench.resume()
        for name in rejected:
            with pytest.raises(CheckpointRejectedError):
                bench.store.verify_manifest(name)
    assert found == {"newest": bench.newest, "older": bench.older, None: None}[taken]
    if passed_over == "copy":
        assert len(rejected) == 1 and rejected[0] not in before
    else:
        expected = {"newest": [bench.newest], "nothing": [], "both": [bench.newest, bench.older]}
        assert rejected == expected[passed_over]


def reading_parts(rank, directory, cases):
    """Each rank reads its shards of what was saved otherwise; what came of each damage."""
    reads = []
    real = shardread.ShardReader.read_data

    def watched(self, plan, planner):
        try:
            done = real(self, plan, planner)
        except CheckpointRejectedError:
            reads.append(True)
            raise
        reads.append(False)
        return done

    shardread.ShardReader.read_data = watched
    store, report = open_store(directory), []
    newest = max(store.candidates())
    target = Contents(-1, PARTS, Wrapping.FSDP2)
    wholes = {step: Contents(step, PARTS, Wrapping.FSDP2) for step in (OLDER, NEWEST)}
    for file, at, bit in cases:
        path = store.path(newest) / file
        if rank == 0:
            flip(path, at, bit)
        dist.barrier()
        target.fill(-1)
        reads.clear()
        rejected = []
        loaded = resume(
            store, target.state(-1, rank), group=dist.group.WORLD,
            on_reject=lambda name, why, told=rejected: told.append((name.step, why)),
        )  # fmt: skip
        assert target.holds(wholes[loaded.manifest.step])
        report.append((loaded.manifest.step, rejected, reads[0]))
        dist.barrier()
        if rank == 0:
            flip(path, at, bit)
    return report


def flip(path, at, bit):
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.distributed
@pytest.mark.parametrize("saved_by", [1, 2])
def test_of_ranks_that_read_parts_one_notices_and_all_take_the_older(tmp_path, saved_by):
    folder = memory_directory(tmp_path) / "checkpoints"
    try:
        if saved_by == 1:
            fill_store(0, folder, PARTS, Wrapping.PLAIN, (OLDER, NEWEST))
        else:
            run_ranks(2, fill_store, folder, PARTS, Wrapping.FSDP2, (OLDER, NEWEST))
        newest = max(folder.glob("step-*"))
        sizes = {path.name: path.stat().st_size for path in newest.glob("rank-*")}
        cases = [
            (name, at, at % 8)
            for name, size in sizes.items()
            for block in range(0, size, BLOCK)
            for at in (block, min(block + BLOCK, size) - 1)
        ]
        first, second = run_ranks(2, reading_parts, folder, cases, timeout=90)
    finally:
        shutil.rmtree(folder.parent if folder.parent != tmp_path else folder)
    assert len(cases) >= 15
    noticed = Counter()
    for case, (step, rejected, saw), (other_step, nothing, other_saw) in zip(
        cases, first, second, strict=True
    ):
        assert (step, other_step) == (OLDER, OLDER), case
        ((rejected_step, why),) = rejected
        assert rejected_step == NEWEST and f"block {case[1] // BLOCK} " in why and nothing == []
        assert saw or other_saw, case
        noticed[saw, other_saw] += 1
    # They read parts: some damage is seen by the one and not by the other.
    assert noticed[True, False], noticed
    assert noticed[False, True] or saved_by == 1, noticed
