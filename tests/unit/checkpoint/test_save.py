"""The order of system calls of a save, and what the rename may answer."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write import save as save_module
from slurm_forge.checkpoint.write import shard_writer as shardfile
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.errors import CheckpointError, FencedError
from slurm_forge.store.identity import CheckpointName
from tests.unit.checkpoint.helpers import no_fence, open_store, save, value_of, weights


class Trace:
    """Every call that changes the file system, with the paths it is about."""

    def __init__(self, monkeypatch):
        self.calls, self.paths = [], {}
        for name in (
            "open", "write", "pwrite", "ftruncate", "fsync", "rename", "link", "unlink", "mkdir",
            "close",
        ):  # fmt: skip
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        def call(*args, **options):
            result = real(*args, **options)
            path = self.paths.get(args[0]) if isinstance(args[0], int) else Path(args[0]).name
            if name == "open":
                self.paths[result] = path
            self.calls.append((name, path, *(Path(a).name for a in args[1:] if name == "rename")))
            return result

        return call

    def last(self, name, path):
        return max(i for i, call in enumerate(self.calls) if call[:2] == (name, path))


@pytest.mark.parametrize("direct", [True, False])
def test_everything_is_on_disk_before_the_rename_and_the_rename_is_too(
    tmp_path, monkeypatch, direct
):
    monkeypatch.setattr(shardfile, "_LEAST_DIRECT", 1 if direct else 1 << 60)
    store = open_store(tmp_path)
    with monkeypatch.context() as patch:
        trace = Trace(patch)
        saved = save(store, weights(), fence=lambda: trace.calls.append(("fence", "")))
    stage, final = f".stage-{saved.name}", str(saved.name)
    commit = trace.calls.index(("rename", stage, final))
    fence = trace.calls.index(("fence", ""))
    changing = ("write", "pwrite", "ftruncate")
    written = {call[1] for call in trace.calls if call[0] in changing}
    assert {"rank-00000.data", "index.json"} < written and len(written) == 3
    for name in written:
        write = max(trace.last(call, name) for call in changing if (call, name) in trace.calls)
        assert write < trace.last("fsync", name) < fence < commit, name
        assert trace.last("fsync", name) < trace.last("close", name) < fence, name
    named = [i for i, call in enumerate(trace.calls) if call[0] in ("link", "rename", "unlink")]
    assert max(i for i in named if i < commit) < trace.last("fsync", stage) < fence < commit
    assert fence == commit - 1, "nothing lies between the question and the rename"
    assert trace.last("fsync", "checkpoints") > commit
    assert not [call for call in trace.calls[commit + 1 :] if call[0] in (*changing, "rename")]


def test_a_rename_that_was_done_and_reports_failure_is_a_success(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    real = os.rename

    def lost_reply(source, target):
        real(source, target)
        if str(target).startswith(str(store.directory / "step-")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(os, "rename", lost_reply)
    saved = save(store, weights(3.0))
    assert store.candidates() == [saved.name]
    assert store.verify_manifest(saved.name).name == saved.name


def test_a_rename_that_failed_is_a_failure(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    save(store, weights(1.0), step=1)

    def fail(*args):
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr("slurm_forge.store.directory.os.rename", fail)
        with pytest.raises(CheckpointError) as caught:
            save(store, weights(2.0), step=2)
    assert "rank 0: " in caught.value.message and "PermissionError" in caught.value.message
    assert "free space" in caught.value.next_step
    assert [name.step for name in store.candidates()] == [1]


def test_a_fenced_attempt_leaves_nothing(tmp_path):
    store = open_store(tmp_path)

    def fenced():
        raise FencedError("claimed", next_step="Exit.")

    with pytest.raises(FencedError, match="claimed"):
        save(store, weights(), fence=fenced)
    assert list(store.directory.iterdir()) == []


def gone_when(monkeypatch, name):
    """The stage is swept, as by a newer attempt, before this is called."""
    real = getattr(save_module, name, None) or getattr(save_module.CheckpointStore, name)
    place = save_module if hasattr(save_module, name) else save_module.CheckpointStore

    def swept(*args, **options):
        (path,) = (each for each in args if isinstance(each, Path))
        stage = path if path.name.startswith(".stage-") else path.parent
        shutil.rmtree(stage)
        return real(*args, **options)

    monkeypatch.setattr(place, name, swept)


@pytest.mark.parametrize("before", ["write_shard_file", "publish"])
def test_a_fenced_attempt_whose_stage_was_swept_is_told_of_the_fence(tmp_path, monkeypatch, before):
    def fenced():
        raise FencedError("claimed", next_step="Exit.")

    gone_when(monkeypatch, before)
    with pytest.raises(FencedError, match="claimed"):
        save(open_store(tmp_path), weights(), fence=fenced)
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        save(open_store(tmp_path), weights())


def test_a_stage_of_the_same_name_is_never_used_again(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    monkeypatch.setattr("secrets.token_hex", lambda n: "0123abcd")
    save(store, weights(1.0), step=1)
    stage = store.create_stage(store.candidates()[0])
    (stage / "theirs").write_text("x")
    with pytest.raises(CheckpointError, match="FileExistsError"):
        save(store, weights(2.0), step=1)
    assert (stage / "theirs").read_text() == "x"
    state = weights(-1.0)
    resume(store, state, group=None, on_reject=lambda *_: None)
    assert value_of(state) == 1.0


def test_what_the_manifest_says_of_a_save(tmp_path):
    store = open_store(tmp_path)
    first = save(store, weights(), step=1)
    manifest = store.verify_manifest(save(store, weights(), step=2, attempt=3, launch=4).name)
    assert (manifest.step, manifest.attempt, manifest.launch) == (2, 3, 4)
    assert manifest.sequence > store.verify_manifest(first.name).sequence
    assert manifest.created_at.isoformat() == "2025-06-15T15:06:40+00:00"
    assert (manifest.run_id, manifest.reason, manifest.world_size) == ("run", "test", 1)
    assert manifest.size == sum(f.size for f in manifest.files) == first.size


def test_a_save_costs_no_second_read_of_the_shards(tmp_path, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **o: (opened.append((p, a)), real(p, *a, **o))[1])
    read = []
    monkeypatch.setattr(os, "preadv", lambda *a: read.append(a) or 0)
    save(open_store(tmp_path), weights(), fence=no_fence)
    assert read == [] and opened


def begin(writer, state, step=1, **options):
    name = CheckpointName.new(step=step, attempt=1, launch=1)
    return writer.begin(state, name=name, reason="test", fence=no_fence, **options)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", [(Arena, "reserve"), (threading.Thread, "start")])
def test_nobody_waits_for_a_save_that_was_interrupted_before_it_began(tmp_path, monkeypatch, where):
    store = open_store(tmp_path)
    writer = CheckpointWriter(store, group=None)
    begin(writer, weights(1.0, size=10)).result()
    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(writer, weights(2.0, size=20), step=2)
    again = threading.Thread(
        target=lambda: begin(writer, weights(3.0, size=20), step=3).result(), daemon=True
    )
    again.start()
    again.join(10.0)
    assert {name.step for name in store.candidates()} == {1, 3}


def test_a_first_look_that_fails_is_a_failed_save_that_leaves_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    writer = CheckpointWriter(store, group=None)

    def fail(tensors):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "infinite_by_design", fail)
        with pytest.raises(CheckpointError, match="out of memory"):
            writer.prepare(weights())
        with pytest.raises(CheckpointError, match="out of memory"):
            begin(writer, weights())
    assert list(store.directory.iterdir()) == []
    begin(writer, weights()).result()


def test_no_thread_to_be_had_when_the_next_save_is_prepared_is_no_matter(tmp_path, monkeypatch):
    store, state = open_store(tmp_path), weights(4.0)
    writer = CheckpointWriter(store, group=None)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        writer.prepare(state)
    assert begin(writer, state).result().name.step == 1
