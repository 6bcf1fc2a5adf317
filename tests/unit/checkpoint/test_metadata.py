"""``.metadata`` is a pickle: whatever it says, nothing but the index of tensors comes out."""

from __future__ import annotations

import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from slurm_forge.checkpoint.read.dcp_metadata import parse_metadata
from slurm_forge.errors import CheckpointRejectedError


@pytest.fixture
def plain(tmp_path):
    """What torch.distributed.checkpoint itself wrote: the files' sizes, and ``.metadata``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"weight": torch.ones(1, 10)}, checkpoint_id=str(tmp_path / "dcp"))
    files = {path.name: path for path in (tmp_path / "dcp").iterdir()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return sizes, files[".metadata"].read_bytes()


@pytest.fixture
def honest(plain):
    """The same index without what depends on where and by which planner it was saved."""
    sizes, data = plain
    metadata = replace(pickle.loads(data), planner_data=None, storage_meta=None)
    return sizes, pickle.dumps(metadata)


def test_what_dcp_itself_wrote_is_read(plain):
    sizes, data = plain
    metadata = parse_metadata(data, sizes)
    assert list(metadata.state_dict_metadata) == ["weight"]


def test_an_index_of_tensors_alone_is_read(honest):
    sizes, data = honest
    metadata = parse_metadata(data, sizes)
    assert list(metadata.state_dict_metadata) == ["weight"]
    assert metadata.state_dict_metadata["weight"].size == (1, 10)


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
    "getattr of a class": Reduce(getattr, (Metadata, "__init__")),
    "getattr of an enum": Reduce(getattr, (_MEM_FORMAT_ENCODING, "__class__")),
    "getattr of an enum's class": Reduce(getattr, (_MEM_FORMAT_ENCODING, "__subclasses__")),
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
    sizes, _ = honest
    monkeypatch.chdir(tmp_path)
    data = RAW[case] if case in RAW else pickle.dumps(EVIL[case], protocol)
    with pytest.raises(CheckpointRejectedError):
        parse_metadata(data, sizes)
    assert not (tmp_path / MARK).exists()


def test_a_member_of_an_enum_may_be_named_as_older_pythons_do(honest, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle one as ``getattr(Enum, "NAME")``."""
    sizes, data = honest
    metadata = pickle.loads(data)
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING,
        "__reduce_ex__",
        lambda member, protocol: (getattr, (type(member), member.name)),
    )
    written = pickle.dumps(metadata)
    assert b"getattr" in written
    weight = parse_metadata(written, sizes).state_dict_metadata["weight"]
    assert weight.properties.memory_format is torch.contiguous_format


def set_storage(metadata, **changes):
    (index, info), = metadata.storage_data.items()  # fmt: skip
    changed = _StorageInfo(info.relative_path, info.offset, info.length)
    vars(changed).update(changes)  # torch 2.6 makes none with those of newer ones
    metadata.storage_data[index] = changed


def set_chunk(metadata, offsets, sizes):
    (tensor,) = metadata.state_dict_metadata.values()
    tensor.chunks[:] = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]


@pytest.mark.parametrize(("change", "reason"), [
    (lambda m: set_storage(m, relative_path="../x"), "not listed"),
    (lambda m: set_storage(m, relative_path="/etc/passwd"), "not listed"),
    (lambda m: set_storage(m, relative_path="__7_0.distcp"), "not listed"),
    (lambda m: set_storage(m, relative_path=["__0_0.distcp"]), "not listed"),
    (lambda m: set_storage(m, offset=-1), "no location"),
    (lambda m: set_storage(m, offset=True), "no location"),
    (lambda m: set_storage(m, length=10**9), "beyond the end"),
    (lambda m: set_storage(m, length=8), "can't fit"),
    (lambda m: set_storage(m, transform_descriptors=["zip"]), "transformed"),
    (lambda m: m.storage_data.clear(), "was not written"),
    (lambda m: m.storage_data.update({MetadataIndex("a"): "b"}), "no location"),
    (lambda m: m.storage_data.update({"a": "b"}), "without a name"),
    (lambda m: m.state_dict_metadata.update(x=None), "not a tensor"),
    (lambda m: m.state_dict_metadata.update({1: None}), "not a tensor"),
    (lambda m: set_chunk(m, [0, 0], [1, 5]), "add up"),
    (lambda m: set_chunk(m, [0, 5], [1, 10]), "outside of it"),
    (lambda m: set_chunk(m, [0], [10]), "outside of it"),
    (lambda m: setattr(m, "planner_data", {"a": [1]}), "private data"),
    (lambda m: setattr(m, "storage_data", None), "no list"),
    (lambda m: setattr(m, "state_dict_metadata", []), "something other"),
])  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(honest, change, reason):
    sizes, data = honest
    metadata = pickle.loads(data)
    change(metadata)
    with pytest.raises(CheckpointRejectedError) as caught:
        parse_metadata(pickle.dumps(metadata), sizes)
    assert reason in caught.value.reason


def test_shards_that_overlap_and_leave_a_hole_are_refused(honest):
    sizes, data = honest
    metadata = pickle.loads(data)
    (info,) = metadata.storage_data.values()
    set_chunk(metadata, [0, 0], [1, 5])
    second = ChunkStorageMetadata(torch.Size([0, 3]), torch.Size([1, 5]))
    metadata.state_dict_metadata["weight"].chunks.append(second)
    for offsets in ((0, 0), (0, 3)):
        metadata.storage_data[MetadataIndex("weight", torch.Size(offsets))] = info
    with pytest.raises(CheckpointRejectedError):
        parse_metadata(pickle.dumps(metadata), sizes)


@pytest.mark.parametrize("which", ["plain", "honest"])
def test_flipped_bits_raise_nothing_but_a_rejection(request, which):
    sizes, data = request.getfixturevalue(which)
    for position in range(0, len(data), 3):
        for bit in (0, 5, 7):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                parse_metadata(bytes(changed), sizes)
            except CheckpointRejectedError:
                continue
