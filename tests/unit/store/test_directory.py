from __future__ import annotations

import errno
import json
import os
import random
import time
from pathlib import Path

import pytest

from slurm_forge.checkpoint.read.load import resume as resume_newest
from slurm_forge.checkpoint.read.shard_reader import ShardReader
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.errors import (
    CheckpointError,
    CheckpointMissingError,
    CheckpointRejectedError,
    FencedError,
    UnsafeFileError,
)
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.unit.checkpoint.helpers import no_fence, open_store, save, value_of, weights


def listing(store):
    return sorted(path.name for path in store.directory.iterdir())


def resume(store, **options):
    """The value that a restart would train on, and what it passed over, with reasons."""
    rejected = []
    state = weights(-1.0)
    loaded = resume_newest(
        store, state, group=None, on_reject=lambda name, why: rejected.append((name, why)),
        **options,
    )  # fmt: skip
    if loaded is None:
        return None, rejected
    assert loaded.extra["value"] == value_of(state)
    return value_of(state), rejected


def test_an_empty_store_has_nothing(tmp_path):
    assert resume(open_store(tmp_path)) == (None, [])


def test_the_newest_is_taken_whatever_the_clocks_say(tmp_path):
    store = open_store(tmp_path)
    places = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1)]
    order = places[:]
    random.Random(1).shuffle(order)
    saved = {p: save(store, weights(float(places.index(p))), *p) for p in order}
    for index, place in enumerate(reversed(places)):
        os.utime(saved[place].path, (index * 1e8, index * 1e8))
    assert store.candidates() == [saved[p].name for p in reversed(places)]
    assert resume(store) == (4.0, [])


def test_of_two_of_one_step_and_launch_the_later_save_counts(tmp_path):
    store = open_store(tmp_path)
    for value in range(8):
        save(store, weights(float(value)), step=5)
    assert resume(store)[0] == 7.0


def test_junk_stages_and_trash_are_not_looked_at(tmp_path):
    store = open_store(tmp_path)
    saved = save(store, weights(1.0), step=1)
    newer = str(CheckpointName.new(step=9, attempt=9, launch=9))
    for junk in (f".stage-{newer}", f".trash-{newer}-00", "latest", "step-9", "tmp", newer + "x"):
        (store.directory / junk).mkdir()
    (store.directory / "step-00000099").symlink_to(saved.path)
    assert store.candidates() == [saved.name]


@pytest.mark.parametrize("damage", [
    "flip a bit of a shard", "truncate a shard", "append to a shard", "delete a shard",
    "delete the manifest", "truncate the manifest", "delete the index", "flip a bit of the index",
    "empty", "swap a shard", "a shard that is a link", "a shard that others may write",
    "a directory that others may write", "a directory that is a link", "a copy with a higher step",
    "another run's", "a directory instead of a shard",
])  # fmt: skip
def test_a_damaged_one_is_passed_over_with_a_reason(tmp_path, damage):
    store = open_store(tmp_path)
    save(store, weights(1.0), step=1)
    good = save(store, weights(2.0), step=2)
    bad = save(store, weights(3.0), step=3)
    shard, manifest, meta = (
        bad.path / n for n in ("rank-00000.data", "manifest.json", "index.json")
    )  # fmt: skip
    expected = bad.name
    if damage.startswith("flip"):
        path = shard if "shard" in damage else meta
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif damage.startswith("truncate"):
        path = shard if "shard" in damage else manifest
        os.truncate(path, path.stat().st_size - 2)
    elif damage == "append to a shard":
        with shard.open("ab") as file:
            file.write(b"x")
    elif damage == "swap a shard":
        shard.write_bytes((good.path / shard.name).read_bytes())
    elif damage == "a shard that is a link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    elif damage == "a shard that others may write":
        shard.chmod(0o666)
    elif damage == "a directory that others may write":
        bad.path.chmod(0o707)
    elif damage == "a directory that is a link":
        bad.path.rename(tmp_path / "elsewhere")
        bad.path.symlink_to(tmp_path / "elsewhere")
    elif damage == "a copy with a higher step":
        expected = CheckpointName(9, 1, 1, bad.name.nonce)
        bad.path.rename(store.path(expected))
    elif damage == "another run's":
        other = CheckpointStore(tmp_path / "other", "another")
        foreign = save(other, weights(9.0), step=9)
        expected = foreign.name
        foreign.path.rename(store.path(foreign.name))
    elif damage == "a directory instead of a shard":
        shard.unlink()
        shard.mkdir()
    elif damage == "empty":
        for path in bad.path.iterdir():
            path.unlink()
    else:
        {"a shard": shard, "the manifest": manifest, "the index": meta}[
            damage.removeprefix("delete ")
        ].unlink()

    value, rejected = resume(store)
    assert value == (3.0 if damage == "another run's" else 2.0)
    assert [name for name, _ in rejected] == [expected]
    assert rejected[0][1]


def test_a_foreign_owner_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    store = open_store(tmp_path)
    for part in ("rank-00000.data", "manifest.json", ""):
        saved = save(store, weights(1.0))
        os.chown(saved.path / part, 65534, -1)
        with pytest.raises(CheckpointRejectedError, match="65534"):
            store.verify_manifest(saved.name)


def test_a_store_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir(mode=0o777)
    (tmp_path / "checkpoints").chmod(0o777)
    with pytest.raises(UnsafeFileError):
        open_store(tmp_path)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeFileError):
        CheckpointStore(tmp_path / "link", "run")


def test_what_is_written_is_private(tmp_path):
    before = os.umask(0)
    try:
        saved = save(open_store(tmp_path), weights())
    finally:
        os.umask(before)
    assert saved.path.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in saved.path.iterdir()} == {0o600}
    assert sorted(p.name for p in saved.path.iterdir()) == [
        "index.json", "manifest.json", "rank-00000.data",
    ]  # fmt: skip


def test_ineligible_ones_are_passed_over(tmp_path):
    store = open_store(tmp_path)
    for step in (1, 2, 3):
        save(store, weights(float(step)), step=step)
    value, rejected = resume(store, eligible=lambda n: "suspect" if n.step > 1 else None)
    assert value == 1.0
    assert [(name.step, why) for name, why in rejected] == [(3, "suspect"), (2, "suspect")]


def test_checkpoints_of_which_none_is_usable_are_not_the_same_as_none(tmp_path):
    """To start over there would throw away a history that a person may be able to repair."""
    store = open_store(tmp_path)
    names = [save(store, weights(float(step)), step=step).name for step in (1, 2)]
    rejected = []
    with pytest.raises(CheckpointMissingError) as caught:
        resume_newest(
            store, weights(), group=None, eligible=lambda name: "suspect",
            on_reject=lambda *what: rejected.append(what),
        )  # fmt: skip
    assert "checkpoints list" in caught.value.next_step
    assert rejected == [(names[1], "suspect"), (names[0], "suspect")]
    for name in names:
        (store.path(name) / "rank-00000.data").unlink()
    with pytest.raises(CheckpointMissingError):
        resume_newest(store, weights(), group=None, on_reject=lambda *_: None)


class StaleHandles:
    """The server does not know the handles of such files any more, for so many calls."""

    def __init__(self, monkeypatch, count, *names):
        self.left, self._real, self._names = count, os.open, names
        self.waited = 0.0
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.waited += seconds

    def open(self, path, *rest, **options):
        if self.left and Path(path).name in self._names:
            self.left -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return self._real(path, *rest, **options)


def test_a_checkpoint_with_a_stale_handle_is_looked_at_again(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    saved = save(store, weights())
    StaleHandles(monkeypatch, 1, "rank-00000.data")
    assert store.verify_manifest(saved.name).step == saved.name.step
    (saved.path / "manifest.json").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointRejectedError, match="missing"):
        store.verify_manifest(saved.name)


def test_a_restart_waits_for_a_manifest_that_can_not_be_read(tmp_path, monkeypatch):
    """Reading a file looks four times, and so does the store: 40 fails last into the third try."""
    store = open_store(tmp_path)
    for step in (1, 2):
        save(store, weights(float(step)), step=step)
    StaleHandles(monkeypatch, 40, "manifest.json", "rank-00000.data")
    assert resume(store) == (2.0, [])


def test_storage_that_is_away_is_no_lack_of_checkpoints(tmp_path, monkeypatch):
    """Else the run would be held until a person looks at checkpoints that are all whole."""
    store = open_store(tmp_path)
    names = [save(store, weights(float(step)), step=step).name for step in range(5)]
    handles = StaleHandles(monkeypatch, 10_000, "manifest.json")
    with pytest.raises(CheckpointError, match="at present") as caught:
        resume(store, pauses=(100.0, 100.0))
    assert type(caught.value) is CheckpointError and str(names[-1]) in caught.value.message
    assert 200.0 <= handles.waited < 300.0  # for the newest alone, whatever the number of the rest
    handles.left = 0
    assert resume(store) == (4.0, [])


def test_what_a_damaged_one_had_filled_in_already_is_gone_after_the_older_one(tmp_path):
    """The last file of the newest one is bad: everything before it has been read into place."""
    store = open_store(tmp_path)
    save(store, weights(1.0, size=3000), step=1)
    bad = save(store, weights(2.0, size=3000), step=2)
    state = weights(-1.0, size=3000)
    real = ShardReader.read_data

    def spoil_afterwards(self, plan, planner):
        done = real(self, plan, planner)
        if self._directory == bad.path:
            raise OSError(5, "the disk is gone")
        return done

    rejected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardReader, "read_data", spoil_afterwards)
        loaded = resume_newest(
            store, state, group=None, on_reject=lambda *what: rejected.append(what)
        )
    assert [name for name, _ in rejected] == [bad.name] and "the disk is gone" in rejected[0][1]
    assert value_of(state) == loaded.extra["value"] == 1.0
    assert loaded.manifest.step == 1


def test_a_manifest_edited_by_hand_is_rejected(tmp_path):
    store = open_store(tmp_path)
    saved = save(store, weights())
    path = saved.path / "manifest.json"
    document = json.loads(path.read_text())
    document["body"]["reason"] = "edited"
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointRejectedError, match="checksum"):
        store.verify_manifest(saved.name)


def prune(store, keep, **options):
    return store.prune(keep, options.pop("fence", no_fence), **options)


def test_prune_keeps_what_it_is_told_and_the_two_newest(tmp_path):
    store = open_store(tmp_path)
    names = [save(store, weights(float(i)), step=i).name for i in range(6)]
    result = prune(store, [names[1]])
    assert set(result.removed) == {names[0], names[2], names[3]}
    assert store.candidates() == [names[5], names[4], names[1]] == list(result.kept)
    assert result.problems == ()
    assert listing(store) == sorted(map(str, result.kept))
    assert resume(store) == (5.0, [])


def test_prune_by_a_policy(tmp_path):
    store = open_store(tmp_path)
    names = [save(store, weights(float(i)), step=i).name for i in range(8)]
    prune(store, lambda present: [n for n in present if n.step % 3 == 0])
    assert store.candidates() == [names[i] for i in (7, 6, 3, 0)]


def test_prune_never_leaves_fewer_than_two_that_are_whole(tmp_path):
    store = open_store(tmp_path)
    names = [save(store, weights(float(i)), step=i).name for i in range(5)]
    for index in (4, 3, 1):
        (store.path(names[index]) / "rank-00000.data").unlink()
    result = prune(store, [])
    # The newest stays (a look at it may be wanted), 2 and 0 are the two newest whole ones.
    assert set(result.removed) == {names[3], names[1]}
    assert resume(store)[0] == 2.0
    (store.path(names[2]) / "manifest.json").unlink()
    assert prune(store, []).removed == ()


def test_a_fenced_attempt_prunes_nothing(tmp_path):
    store = open_store(tmp_path)
    for i in range(5):
        save(store, weights(float(i)), step=i)
    before = listing(store)

    def fenced():
        raise FencedError("a newer attempt has claimed the run")

    with pytest.raises(FencedError):
        prune(store, [], fence=fenced)
    assert listing(store) == before


def test_prune_takes_old_stages_and_trash_along_but_not_those_of_the_living(tmp_path):
    store = open_store(tmp_path)
    kept = [save(store, weights(float(i)), step=i, attempt=2).name for i in range(2)]
    old = CheckpointName.new(step=9, attempt=1, launch=7)
    mine = CheckpointName.new(step=9, attempt=2, launch=3)
    later = CheckpointName.new(step=9, attempt=3, launch=1)
    for name in (old, mine, later):
        store.create_stage(name)
    (store.directory / f".trash-{old}-0000").mkdir()
    (store.directory / "notes.txt").write_text("mine")
    prune(store, [], current=(2, 3))
    assert listing(store) == sorted(
        [f".stage-{mine}", f".stage-{later}", "notes.txt", *map(str, kept)]
    )


def test_failures_of_prune_are_reported_not_raised(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    names = [save(store, weights(float(i)), step=i).name for i in range(4)]

    def fail(*args, **options):
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        result = prune(store, [])
    assert result.removed == () and len(result.problems) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", fail)
        result = prune(store, [])
    assert set(result.removed) == {names[0], names[1]} and result.problems
    assert store.candidates() == [names[3], names[2]]
    assert prune(store, []).problems == ()
    assert listing(store) == sorted(map(str, names[2:]))


def test_damaged_ones_of_higher_steps_push_out_nothing(tmp_path):
    """Their sizes and manifests are right: only who has read them knows."""
    store = open_store(tmp_path)
    names = [save(store, weights(), step=step).name for step in (500, 600, 800, 900, 1000)]
    pruned = store.prune(lambda found: found[:1], no_fence, distrusted=names[2:])
    assert pruned.removed == ()
    assert store.candidates() == names[::-1]
    later = save(store, weights(), step=700).name
    pruned = store.prune(lambda found: found[:2], no_fence, distrusted=names[2:])
    assert pruned.removed == (names[0],)
    assert {names[1], later} <= set(store.candidates())


def test_a_manifest_that_could_not_be_read_back_is_not_published(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    monkeypatch.setattr("slurm_forge.store.directory.MANIFEST_LIMIT", 100)
    with pytest.raises(CheckpointError, match="can be read back"):
        save(store, weights())
    assert store.candidates() == []


def with_fallback(tmp_path):
    (tmp_path / "fallback").mkdir(mode=0o700, exist_ok=True)
    open_store(tmp_path)
    return CheckpointStore(
        tmp_path / "checkpoints", "run", fallback=tmp_path / "fallback" / "run-1a2b3c4d"
    )


def save_where_there_is_room(store, state, step):
    """With a run directory that is full."""

    def permit(size, directory):
        if directory == store.directory:
            raise CheckpointError("no room", next_step="Make room.")

    name = CheckpointName.new(step=step, attempt=1, launch=1)
    writer = CheckpointWriter(store, group=None)
    pending = writer.begin(state, name=name, reason="test", fence=no_fence, permit=permit)
    return pending.result()


def test_a_full_directory_is_passed_over_for_the_fallback(tmp_path):
    store = with_fallback(tmp_path)
    first = save(store, weights(1.0), step=1)
    second = save_where_there_is_room(store, weights(2.0), 2)
    assert (first.path.parent, second.path.parent) == (store.directory, store.fallback)
    assert store.candidates() == [second.name, first.name]
    assert resume(store) == (2.0, [])
    # Who knows of no fallback sees what there was before.
    assert resume(CheckpointStore(store.directory, "run")) == (1.0, [])


def test_checkpoints_in_the_fallback_are_pruned_and_swept_like_the_others(tmp_path):
    store = with_fallback(tmp_path)
    saved = [save_where_there_is_room(store, weights(float(n)), n) for n in range(1, 5)]
    name = CheckpointName.new(step=9, attempt=1, launch=1)
    abandoned = store.create_stage(name, fallback=True)
    pruned = store.prune([saved[3].name], no_fence, current=(2, 1))
    assert pruned.removed == (saved[0].name, saved[1].name)
    assert sorted(store.fallback.iterdir()) == [saved[2].path, saved[3].path]
    assert not abandoned.exists()


def test_a_fallback_that_others_can_write_into_is_refused(tmp_path):
    store = with_fallback(tmp_path)
    store.fallback.mkdir(mode=0o700)
    store.fallback.chmod(0o777)
    with pytest.raises(UnsafeFileError):
        with_fallback(tmp_path)


def test_a_fallback_that_is_gone_holds_nothing(tmp_path):
    store = with_fallback(tmp_path)
    first = save(store, weights(1.0), step=1)
    assert CheckpointStore(store.directory, "run", fallback=tmp_path / "gone").candidates() == [
        first.name
    ]


def test_checkpoints_in_an_earlier_fallback_are_found_and_deleted_like_the_others(tmp_path):
    store = with_fallback(tmp_path)
    saved = [save_where_there_is_room(store, weights(float(n)), n) for n in range(1, 5)]
    moved = CheckpointStore(
        store.directory, "run", fallback=tmp_path / "other" / "run", earlier=(store.fallback,)
    )
    assert resume(moved) == (4.0, [])
    newest = save_where_there_is_room(moved, weights(5.0), 5)
    assert newest.path.parent == moved.fallback
    assert moved.prune([newest.name], no_fence).removed == tuple(each.name for each in saved[:3])
    assert moved.candidates() == [newest.name, saved[3].name]
