"""One rank's file: exactly the bytes and hashes, whatever the file system makes of direct I/O."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from contextlib import contextmanager

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.checkpoint.write import shard_writer as shardfile
from slurm_forge.checkpoint.write.direct_io import PAGE
from tests.unit.checkpoint.helpers import open_descriptors, write_bytes

CHUNK = 4 * PAGE


def near(*borders):
    return [max(border + off, 0) for border in borders for off in (-PAGE, -1, 0, 1, 7, PAGE)]


sizes = st.sampled_from(near(0, PAGE, CHUNK, 2 * CHUNK)) | st.integers(0, 3 * CHUNK)
block_sizes = st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE, CHUNK, 2 * CHUNK])


@contextmanager
def small_chunks():
    """Files here are a few pages long, and direct I/O is tried for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardfile, "_CHUNK", CHUNK)
        patch.setattr(shardfile, "_LEAST_DIRECT", 1)
        yield patch


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def refuse_the_flag(patch, _):
    real = fcntl.fcntl

    def refusing(descriptor, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(descriptor, command, flags)

    patch.setattr(fcntl, "fcntl", refusing)


def refuse_the_write(patch, chance):
    real = os.pwrite

    def refusing(descriptor, data, at):
        if is_direct(descriptor) and chance.random() < 0.5:
            code = chance.choice([errno.EINVAL, errno.EOPNOTSUPP])
            raise OSError(code, "no direct I/O here, after all")
        return real(descriptor, data, at)

    patch.setattr(os, "pwrite", refusing)


def write_short(patch, chance):
    real = os.pwrite

    def short(descriptor, data, at):
        count = chance.choice([1, 512, PAGE, PAGE + 1, len(data)])
        # Through another descriptor, as the kernel would not take such a length for direct I/O.
        plain = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
        try:
            return real(plain, data[:count], at)
        finally:
            os.close(plain)

    patch.setattr(os, "pwrite", short)


KINDS = {
    "as it is": lambda *_: None,
    "the flag is refused": refuse_the_flag,
    "the write is refused": refuse_the_write,
    "writes are short": write_short,
}


@pytest.mark.parametrize("kind", KINDS)
@given(size=sizes, block_size=block_sizes, direct=st.booleans(), seed=st.integers(0, 2**32))
def test_the_file_is_the_bytes_and_the_hashes_are_theirs(
    tmp_path_factory, kind, size, block_size, direct, seed
):
    path = tmp_path_factory.mktemp("file") / "f"
    chance = random.Random(seed)
    data = chance.randbytes(size)
    with small_chunks() as patch:
        KINDS[kind](patch, chance)
        entry = write_bytes(path, data, direct=direct, block_size=block_size)
    assert path.read_bytes() == data
    assert (entry.name, entry.size) == ("f", size)
    assert list(entry.block_hashes) == [
        xxhash.xxh3_128_hexdigest(data[i : i + block_size]) for i in range(0, size, block_size)
    ]


@pytest.mark.parametrize("size", [3 * 5000 + 1, 4 * PAGE - 10, 5 * 5000, 5 * PAGE])
def test_blocks_that_are_no_whole_pages(tmp_path, size):
    with small_chunks():
        entry = write_bytes(tmp_path / "f", bytes(size), block_size=5000)
    assert entry.size == (tmp_path / "f").stat().st_size == size


def test_the_cache_is_bypassed_where_that_works_and_only_for_files_worth_it(tmp_path, monkeypatch):
    used, real = [], os.pwrite

    def watched(descriptor, data, at):
        used.append(is_direct(descriptor))
        return real(descriptor, data, at)

    with small_chunks() as patch:
        probe = os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY)
        try:
            fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            pytest.skip("this file system has no direct I/O")
        finally:
            os.close(probe)
        patch.setattr(os, "pwrite", watched)
        write_bytes(tmp_path / "a", bytes(3 * CHUNK))
        assert used == [True], "blocks are larger than a chunk: one write"
        used.clear()
        write_bytes(tmp_path / "b", bytes(3 * CHUNK), direct=False)
        assert not any(used)
        used.clear()
        patch.setattr(shardfile, "_LEAST_DIRECT", 3 * CHUNK + 1)
        write_bytes(tmp_path / "c", bytes(3 * CHUNK))
        assert not any(used)


def test_nothing_is_overwritten_and_the_file_is_private(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "f", b"new")
    (tmp_path / "g").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError):
        write_bytes(tmp_path / "g", b"new")
    assert (tmp_path / "f").read_bytes() == b"old" and not (tmp_path / "nowhere").exists()
    before = os.umask(0)
    try:
        write_bytes(tmp_path / "h", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "h").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("direct", [True, False])
def test_it_is_synced_in_its_final_length_and_not_touched_after(tmp_path, monkeypatch, direct):
    calls = []
    with small_chunks() as patch:

        def watched(name, real):
            def call(descriptor, *args):
                result = real(descriptor, *args)
                calls.append((name, os.fstat(descriptor).st_size))
                return result

            return call

        for name in ("pwrite", "ftruncate", "fsync"):
            patch.setattr(os, name, watched(name, getattr(os, name)))
        write_bytes(tmp_path / "f", bytes(2 * PAGE + 3), direct=direct)
    assert calls[-1] == ("fsync", 2 * PAGE + 3)
    assert [name for name, _ in calls].count("fsync") == 1


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failing_call_is_final_and_leaves_no_descriptor(tmp_path, call, code, direct):
    before = open_descriptors()
    tried, real = [], getattr(os, call)

    def fail(*args):
        tried.append(args)
        if call == "close":
            real(*args)
        raise OSError(code, "injected")

    with small_chunks() as patch:
        patch.setattr(os, call, fail)
        if call == "ftruncate" and not direct:
            write_bytes(tmp_path / "f", bytes(PAGE + 1), direct=direct)
            assert tried == []
            return
        with pytest.raises(OSError, match="injected"):
            write_bytes(tmp_path / "f", bytes(PAGE + 1), direct=direct)
    assert len(tried) == 1, "what failed once is not tried again"
    assert open_descriptors() == before


def test_a_refusal_without_direct_io_is_an_error_like_any_other(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.EINVAL, "injected")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="injected"):
        write_bytes(tmp_path / "f", bytes(PAGE), direct=False)


def test_a_disk_that_fills_up_half_way_is_an_error(tmp_path):
    real = os.pwrite

    def full(descriptor, data, at):
        if at >= CHUNK:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data[: CHUNK - at], at)

    with small_chunks() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="full"):
            write_bytes(tmp_path / "f", bytes(2 * CHUNK))
