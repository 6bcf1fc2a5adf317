from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import CheckpointRejectedError, UnsafeFileError
from slurm_forge.store.blocks import open_entry, read_whole, verify_blocks
from tests.unit.checkpoint.helpers import open_descriptors, write_bytes

BLOCK = 4096


def read(path, entry, limit=1 << 20):
    return read_whole(path, entry, block_size=BLOCK, limit=limit)


@given(st.binary(max_size=50), st.integers(0, 5))
def test_a_file_is_read_as_it_was_written(tmp_path_factory, seed, blocks):
    path = tmp_path_factory.mktemp("blocks") / "f"
    data = os.urandom(blocks * BLOCK) + seed
    entry = write_bytes(path, data, block_size=BLOCK)
    assert read(path, entry) == data
    everything = range(len(entry.block_hashes))
    assert list(verify_blocks(path, entry, everything, block_size=BLOCK)) == list(everything)


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_a_changed_byte_is_never_handed_out(tmp_path, position):
    path = tmp_path / "f"
    data = os.urandom(2 * BLOCK + 8)
    entry = write_bytes(path, data, block_size=BLOCK)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([data[position] ^ 1]))
    bad = position // BLOCK
    with pytest.raises(CheckpointRejectedError, match=f"block {bad}"):
        read(path, entry)
    good = [i for i in range(3) if i != bad]
    assert list(verify_blocks(path, entry, good, block_size=BLOCK)) == good
    with pytest.raises(CheckpointRejectedError, match=f"block {bad}"):
        list(verify_blocks(path, entry, [bad], block_size=BLOCK))


@pytest.mark.parametrize("size", [99, 101, 0])
def test_a_file_of_another_size_is_not_even_read(tmp_path, monkeypatch, size):
    entry = write_bytes(tmp_path / "f", b"x" * 100, block_size=BLOCK)
    os.truncate(tmp_path / "f", size)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("it was read"))
    before = open_descriptors()
    with pytest.raises(CheckpointRejectedError, match=f"has {size} bytes"):
        read(tmp_path / "f", entry)
    assert open_descriptors() == before, "a descriptor was left open"


def test_a_file_that_ends_while_it_is_read_is_refused(tmp_path, monkeypatch):
    entry = write_bytes(tmp_path / "f", b"x" * 100, block_size=BLOCK)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointRejectedError, match="ended while it was read"):
        read(tmp_path / "f", entry)


def test_a_file_above_the_limit_is_not_read(tmp_path):
    entry = write_bytes(tmp_path / "f", b"x" * 100, block_size=BLOCK)
    with pytest.raises(CheckpointRejectedError, match="99 are read at most"):
        read(tmp_path / "f", entry, limit=99)
    assert read(tmp_path / "f", entry, limit=100) == b"x" * 100


def test_links_and_files_that_others_may_write_are_refused(tmp_path):
    entry = write_bytes(tmp_path / "f", b"x" * 100, block_size=BLOCK)
    (tmp_path / "g").symlink_to(tmp_path / "f")
    with pytest.raises(UnsafeFileError):
        open_entry(tmp_path / "g", entry)
    (tmp_path / "f").chmod(0o602)
    with pytest.raises(UnsafeFileError):
        open_entry(tmp_path / "f", entry)
