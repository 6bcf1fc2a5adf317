"""Pickles that do something, by every opcode that can: nothing of it is done (X01, X02)."""

from __future__ import annotations

import copyreg
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from slurm_forge.checkpoint.read.dcp_metadata import parse_metadata
from slurm_forge.checkpoint.write.planner import ForgeLoadPlanner
from slurm_forge.errors import CheckpointRejectedError
from tests.security.bounded import bounded

MARK = "touched"
TOUCH = f"touch {MARK}".encode()
TEXT = b"X" + len(TOUCH).to_bytes(4, "little") + TOUCH
META = b"ctorch.distributed.checkpoint.metadata\n"
#: One byte codes that extensions are registered under; torch and pickle use none.
EXTENSION = 0xE7


def stack_global(module, name):
    return (
        b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93"
    )


#: By the opcode that would do it: what leaves one object on the stack.
EVIL = {
    "GLOBAL and REDUCE": b"cos\nsystem\n" + TEXT + b"\x85R",
    "GLOBAL of the C module": b"cposix\nsystem\n" + TEXT + b"\x85R",
    "STACK_GLOBAL and REDUCE": stack_global("os", "system") + TEXT + b"\x85R",
    "STACK_GLOBAL from the memo":
        b"\x8c\x02os\x94\x8c\x06system\x9400h\x00h\x01\x93" + TEXT + b"\x85R",
    "INST": b"(S'" + TOUCH + b"'\nios\nsystem\n",
    "OBJ": b"(cos\nsystem\n" + TEXT + b"o",
    "NEWOBJ": b"csubprocess\nPopen\n(" + TEXT + b"l\x85\x81",
    "NEWOBJ_EX": b"csubprocess\nPopen\n(" + b"]" + TEXT + b"at}\x92",
    "BUILD with __setstate__": b"cthreading\nlocal\n)\x81}b",
    "BUILD of a generator state": b"crandom\nRandom\n)\x81}b",
    "EXT1": b"\x82" + bytes([EXTENSION]) + TEXT + b"\x85R",
    "EXT2": b"\x83" + EXTENSION.to_bytes(2, "little") + TEXT + b"\x85R",
    "EXT4": b"\x84" + EXTENSION.to_bytes(4, "little") + TEXT + b"\x85R",
    "PERSID": b"P" + TOUCH + b"\n",
    "BINPERSID": TEXT + b"Q",
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": b"\x97\x98",
    "eval": b"cbuiltins\neval\n" + TEXT + b"\x85R",
    "exec": b"cbuiltins\nexec\n" + TEXT + b"\x85R",
    "getattr": b"cbuiltins\ngetattr\n",
    "import": b"cbuiltins\n__import__\nX\x02\0\0\0os\x85R",
    "importlib": b"cimportlib\nimport_module\nX\x02\0\0\0os\x85R",
    "run a module": b"crunpy\n_run_code\n",
    "a partial": b"cfunctools\npartial\ncos\nsystem\n\x85R",
    "an attribute by name": stack_global("operator", "attrgetter"),
    "a dotted name of torch": stack_global("torch", "os.system"),
    "a dotted name of what is allowed": stack_global(
        "torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
    "a method of what is allowed": stack_global("pathlib", "PosixPath.write_text"),
    "a neighbour of what is allowed": stack_global("torch.serialization", "load"),
    "a module of what is allowed": stack_global("torch.distributed.checkpoint.metadata", "os"),
    "torch.load": stack_global("torch", "load"),
    "torch.hub": stack_global("torch.hub", "load"),
    "a library": stack_global("torch.ops", "load_library"),
    "a tensor": stack_global("torch._utils", "_rebuild_tensor_v2"),
    "the unpickler": stack_global("_pickle", "loads"),
    "numpy": stack_global("numpy.core.multiarray", "_reconstruct"),
}  # fmt: skip
#: Where it stands: in the place of the index, or deep inside an honest-looking one.
PLACES = {
    "alone": b"%s",
    "a tensor": META + b"Metadata\n)\x81}(X\x13\0\0\0state_dict_metadata}X\x01\0\0\0a%ssub",
    "a key": META + b"Metadata\n)\x81}(X\x13\0\0\0state_dict_metadata}%sNsub",
    "the shards": META + b"Metadata\n)\x81}(X\x0c\0\0\0storage_data%sub",
    "the state": META + b"Metadata\n)\x81%sb",
    "the slots": META + b"Metadata\n)\x81N}X\x01\0\0\0a%ss\x86b",
    "an argument": b"cpathlib\nPosixPath\n%s\x85R",
    "a size": b"ctorch\nSize\n%s\x85R",
    "popped again": b"%s0N",
}  # fmt: skip


def test_the_traps_are_traps(tmp_path, monkeypatch):
    """What these tests prove rests on the pickles doing something where nobody stops them."""
    monkeypatch.chdir(tmp_path)
    for case in ("GLOBAL and REDUCE", "STACK_GLOBAL and REDUCE", "INST", "OBJ"):
        for place in ("alone", "a tensor", "an argument", "popped again"):
            bounded(lambda case=case, place=place: pickle.loads(
                b"\x80\x04" + PLACES[place] % EVIL[case] + b"."))  # fmt: skip
            assert (tmp_path / MARK).exists(), (case, place)
            (tmp_path / MARK).unlink()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", EVIL)
def test_nothing_is_done_whatever_the_opcode_and_wherever(tmp_path, monkeypatch, case, place):
    monkeypatch.chdir(tmp_path)
    copyreg.add_extension("os", "system", EXTENSION)
    try:
        with pytest.raises(CheckpointRejectedError):
            parse_metadata(b"\x80\x05" + PLACES[place] % EVIL[case] + b".", {})
    finally:
        copyreg.remove_extension("os", "system", EXTENSION)
    assert not (tmp_path / MARK).exists()


@pytest.mark.parametrize("name", ["Metadata", "MetadataIndex", "TensorStorageMetadata"])
def test_a_class_that_may_be_named_is_not_changed(name):
    """BUILD with a pair as state sets attributes, and its object may be a class."""
    build = META + name.encode() + b"\nN}X\x05\0\0\0hello" + b"K\x01s\x86b0N."
    cls = {c.__name__: c for c in (Metadata, MetadataIndex, TensorStorageMetadata)}[name]
    try:
        with pytest.raises(CheckpointRejectedError):
            parse_metadata(b"\x80\x04" + build, {})
        assert not hasattr(cls, "hello")
    finally:
        if hasattr(cls, "hello"):
            delattr(cls, "hello")


def doubled(levels):
    """A tuple of two of a tuple of two of …: small, until somebody walks through it."""
    steps = b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) + b"0"
        for i in range(levels)
    )
    return b")q\x000" + steps + b"h" + bytes([levels])


BOMBS = {
    "a memo of 128 million": b"Nr" + (1 << 27).to_bytes(4, "little") + b".",
    "a key that is hashed for ever": b"}" + doubled(60) + b"Ns.",
    "a path that is spelled for ever": b"cpathlib\nPosixPath\n" + doubled(60) + b"\x85R.",
    "bytes of a terabyte": b"\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a frame of a terabyte": b"\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
    "a number of a megabyte":
        b"\x8b" + (1 << 20).to_bytes(4, "little") + b"\x7f" * (1 << 20) + b".",
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_pickle_takes_little_time_and_memory(case):
    spent = bounded(lambda: parse_metadata(b"\x80\x04" + BOMBS[case], {}), seconds=2)
    assert spent is not None, "it did not end by itself"
    assert spent.result is CheckpointRejectedError
    assert spent.seconds < 2 and spent.megabytes < 100, spent


class Evil:
    """An entry that is no tensor: torch pickles it into the shards."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_entries_that_are_no_tensors_are_never_unpickled(tmp_path):
    mark = tmp_path / MARK
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": torch.ones(4), "evil": Evil(mark)}
        dcp.save(state, checkpoint_id=str(tmp_path / "dcp"))
        dcp.load({"w": torch.zeros(4), "evil": 0}, checkpoint_id=str(tmp_path / "dcp"))
        assert mark.exists(), "the trap is none: torch itself did not fall into it"
        mark.unlink()
        plain = pytest.importorskip("slurm_forge.checkpoint.read.plain_dcp")
        target = {"w": torch.zeros(4), "evil": 0}
        left_out = plain.load_plain_dcp(tmp_path / "dcp", target)
        assert torch.equal(target["w"], torch.ones(4)) and target["evil"] == 0
        assert left_out == ("evil",)
        opened = plain.PlainDcp.open(tmp_path / "dcp")
        assert set(opened.tensors) == {"w"}
        with pytest.raises(KeyError):
            opened.read("evil")
    assert not mark.exists()


def test_our_own_loads_refuse_bytes():
    class Item:
        dest_index = MetadataIndex("evil")

    with pytest.raises(TypeError, match="evil is not a tensor"):
        ForgeLoadPlanner().load_bytes(Item(), None)


def test_bytes_that_stand_for_a_tensor_are_none():
    data = pickle.dumps(Metadata({"w": BytesStorageMetadata()}, storage_data={}))
    try:
        found = parse_metadata(data, {})
    except CheckpointRejectedError:
        return
    assert type(found.state_dict_metadata["w"]) is BytesStorageMetadata
