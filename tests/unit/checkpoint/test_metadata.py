"""``.metadata`` is a pickle: whatever it says, nothing but the index of tensors comes out."""

from __future__ import annotations

import hashlib
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from slurm_forge.checkpoint.metadata import parse_metadata
from slurm_forge.errors import CheckpointRejectedError
from tests.unit.checkpoint.helpers import open_store, save, weights


@pytest.fixture
def honest(tmp_path):
    """A real manifest and the real bytes of its ``.metadata``."""
    store = open_store(tmp_path)
    saved = save(store, weights())
    manifest = store.verify_manifest(saved.name)
    return manifest, (saved.path / ".metadata").read_bytes()


def parse(manifest, data):
    """Parse bytes that the manifest vouches for: the checksum is not what protects here."""
    return parse_metadata(data, replace(manifest, metadata_sha256=hashlib.sha256(data).hexdigest()))


def test_the_real_one_is_read(honest):
    manifest, data = honest
    metadata = parse(manifest, data)
    assert list(metadata.state_dict_metadata) == ["models/model/weight"]
    assert str(Path.cwd()).encode() not in data and b"checkpoints" not in data


def test_another_one_than_the_manifests_is_refused(honest):
    manifest, data = honest
    with pytest.raises(CheckpointRejectedError, match="not the one"):
        parse_metadata(data + b" ", manifest)


class Reduce:
    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return self.what


MARK = "touched-by-a-pickle"
MAKE = f"open({MARK!r}, 'w').close()"
EVIL = {
    "os.system": Reduce(os.system, (f"touch {MARK}",)),
    "eval": Reduce(eval, (MAKE,)),
    "exec": Reduce(exec, (MAKE,)),
    "open": Reduce(open, (MARK, "w")),
    "torch.load": Reduce(torch.load, ("x",)),
    "getattr": Reduce(getattr, (1, "real")),
    "import": Reduce(__import__, ("os",)),
    "path": Reduce(Path, ("/etc",)),
    "bytes entry": BytesStorageMetadata(),
    "inside": Metadata({"a": Reduce(eval, (MAKE,))}),
    "key": Metadata({Reduce(str, ("a",)): None}),
}
RAW = {
    "GLOBAL": f"cos\nsystem\n(S'touch {MARK}'\ntR.".encode(),
    "INST": f"(S'touch {MARK}'\nios\nsystem\n.".encode(),
    "OBJ": f"(cos\nsystem\nS'touch {MARK}'\no.".encode(),
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(MARK) + 6])
    + f"touch {MARK}".encode() + b"\x85R.",
    "NEWOBJ_EX": b"\x80\x04cbuiltins\neval\n)}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Pabc\n.",
    "BINPERSID": b"K\x01Q.",
    "dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
    "torch function": b"ctorch\nload\n.",
    "torch hub": b"ctorch\nhub\n.",
    "BUILD on a class": b"ctorch.distributed.checkpoint.metadata\nMetadata\n}S'x'\nK\x01sb.",
    "empty": b"",
    "truncated": b"\x80\x04\x8c",
}  # fmt: skip


@pytest.mark.parametrize("case", [*EVIL, *RAW])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_does_something_is_refused_before_it_does(
    honest, tmp_path, monkeypatch, case, protocol
):
    manifest, _ = honest
    monkeypatch.chdir(tmp_path)
    data = RAW[case] if case in RAW else pickle.dumps(EVIL[case], protocol)
    with pytest.raises(CheckpointRejectedError):
        parse(manifest, data)
    assert not (tmp_path / MARK).exists()


def set_storage(metadata, **changes):
    (index, info), = metadata.storage_data.items()  # fmt: skip
    facts = {"relative_path": info.relative_path, "offset": info.offset, "length": info.length}
    metadata.storage_data[index] = _StorageInfo(**(facts | changes))


def set_chunk(metadata, offsets, sizes):
    (tensor,) = metadata.state_dict_metadata.values()
    tensor.chunks[:] = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]


@pytest.mark.parametrize(("change", "reason"), [
    (lambda m: set_storage(m, relative_path="../x"), "not listed"),
    (lambda m: set_storage(m, relative_path="/etc/passwd"), "not listed"),
    (lambda m: set_storage(m, relative_path="__7_0.distcp"), "not listed"),
    (lambda m: set_storage(m, relative_path=["__0_0.distcp"]), "not listed"),
    (lambda m: set_storage(m, offset=-1), "at no place"),
    (lambda m: set_storage(m, offset=True), "at no place"),
    (lambda m: set_storage(m, length=10**9), "beyond the end"),
    (lambda m: set_storage(m, length=8), "can't fit"),
    (lambda m: set_storage(m, transform_descriptors=["zip"]), "transformed"),
    (lambda m: m.storage_data.clear(), "was not written"),
    (lambda m: m.storage_data.update({MetadataIndex("a"): "b"}), "lies nowhere"),
    (lambda m: m.storage_data.update({"a": "b"}), "without a name"),
    (lambda m: m.state_dict_metadata.update(x=None), "not a tensor"),
    (lambda m: m.state_dict_metadata.update({1: None}), "not a tensor"),
    (lambda m: set_chunk(m, [0, 0], [1, 5]), "add up"),
    (lambda m: set_chunk(m, [0, 5], [1, 10]), "outside of it"),
    (lambda m: set_chunk(m, [0], [10]), "outside of it"),
    (lambda m: setattr(m, "planner_data", {}), "private data"),
    (lambda m: setattr(m, "storage_data", None), "no list"),
    (lambda m: setattr(m, "state_dict_metadata", []), "something else"),
])  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(honest, change, reason):
    manifest, data = honest
    metadata = pickle.loads(data)
    change(metadata)
    with pytest.raises(CheckpointRejectedError) as caught:
        parse(manifest, pickle.dumps(metadata))
    assert reason in caught.value.reason


def test_flipped_bits_raise_nothing_but_a_rejection(honest):
    manifest, data = honest
    for position in range(0, len(data), 3):
        for bit in (0, 5, 7):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                parse(manifest, bytes(changed))
            except CheckpointRejectedError:
                continue
