from __future__ import annotations

import errno
import io
import os
import random

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.checkpoint.blocks import HashingFile, VerifyingFile, verify_blocks
from slurm_forge.errors import CheckpointRejectedError, UnsafeFileError

BLOCK = 4096


def write(path, parts, block_size=BLOCK):
    with HashingFile(path, block_size=block_size) as file:
        for part in parts:
            file.write(part)
    return file.entry()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200_000), max_size=6), st.integers(0, 2**32))
def test_hashes_are_those_of_the_blocks_however_it_is_written(tmp_path_factory, sizes, seed):
    path = tmp_path_factory.mktemp("blocks") / "f"
    source = random.Random(seed)
    parts = [source.randbytes(size) for size in sizes]
    entry = write(path, parts)
    data = b"".join(parts)
    assert path.read_bytes() == data
    assert entry.size == len(data) and entry.name == "f"
    assert list(entry.block_hashes) == [
        xxhash.xxh3_128_hexdigest(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 5 * BLOCK),
    st.lists(st.tuples(st.integers(0, 6 * BLOCK), st.integers(0, 3 * BLOCK)), max_size=8),
)
def test_reads_like_a_file(tmp_path_factory, size, reads):
    path = tmp_path_factory.mktemp("blocks") / "f"
    data = os.urandom(size)
    entry = write(path, [data])
    with VerifyingFile(path, entry, block_size=BLOCK) as file:
        plain = io.BytesIO(data)
        for offset, length in reads:
            assert file.seek(offset) == plain.seek(offset)
            assert file.read(length) == plain.read(length)
            assert file.tell() == plain.tell() or offset > size
        assert file.seek(-size, os.SEEK_END) == 0
        assert file.read() == data


def test_torch_can_save_and_load_through_them(tmp_path):
    tensor = torch.randn(300, 100)
    with HashingFile(tmp_path / "f", block_size=BLOCK) as file:
        torch.save(tensor, file)
    with VerifyingFile(tmp_path / "f", file.entry(), block_size=BLOCK) as source:
        assert torch.equal(torch.load(source, weights_only=True), tensor)


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_a_changed_byte_is_never_handed_out(tmp_path, position):
    path = tmp_path / "f"
    data = os.urandom(2 * BLOCK + 8)
    entry = write(path, [data])
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([data[position] ^ 1]))
    bad = position // BLOCK
    with VerifyingFile(path, entry, block_size=BLOCK) as file:
        for index in range(3):
            for length in (1, BLOCK):
                file.seek(index * BLOCK)
                if index == bad:
                    with pytest.raises(CheckpointRejectedError, match=f"block {bad}"):
                        file.read(length)
                else:
                    expected = data[index * BLOCK : index * BLOCK + length]
                    assert file.read(min(length, len(expected))) == expected
    good = [i for i in range(3) if i != bad]
    assert list(verify_blocks(path, entry, good, block_size=BLOCK)) == good
    with pytest.raises(CheckpointRejectedError):
        list(verify_blocks(path, entry, [bad], block_size=BLOCK))


def test_a_file_of_another_size_is_not_even_read(tmp_path):
    entry = write(tmp_path / "f", [b"x" * 100])
    with (tmp_path / "f").open("ab") as file:
        file.write(b"y")
    with pytest.raises(CheckpointRejectedError, match="has 101 bytes"):
        VerifyingFile(tmp_path / "f", entry, block_size=BLOCK)


def test_links_and_files_that_others_may_write_are_refused(tmp_path):
    entry = write(tmp_path / "f", [b"x" * 100])
    (tmp_path / "g").symlink_to(tmp_path / "f")
    with pytest.raises(UnsafeFileError):
        VerifyingFile(tmp_path / "g", entry, block_size=BLOCK)
    (tmp_path / "f").chmod(0o620)
    with pytest.raises(UnsafeFileError):
        VerifyingFile(tmp_path / "f", entry, block_size=BLOCK)


def test_nothing_is_overwritten_and_the_file_is_private(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        HashingFile(tmp_path / "f")
    (tmp_path / "g").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError):
        HashingFile(tmp_path / "g")
    assert (tmp_path / "f").read_bytes() == b"old"
    write(tmp_path / "h", [b"x"])
    assert (tmp_path / "h").stat().st_mode & 0o777 == 0o600


def test_the_descriptor_is_only_given_out_with_all_bytes_written(tmp_path):
    with HashingFile(tmp_path / "f") as file:
        file.write(b"abc")
        assert os.fstat(file.fileno()).st_size == 3


def test_it_is_synced_before_it_counts(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    write(tmp_path / "f", [b"abc"])
    assert synced == [3]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_write_or_sync_is_final(tmp_path, monkeypatch, call):
    def fail(*args):
        raise OSError(errno.ENOSPC, "full")

    file = HashingFile(tmp_path / "f")
    file.write(b"abc")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="full"):
            file.close()
    file.close()
    with pytest.raises(ValueError, match="not written to the end"):
        file.entry()
