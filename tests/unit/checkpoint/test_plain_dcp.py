"""Directories that torch.distributed.checkpoint wrote: read without running anything of them."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from slurm_forge.checkpoint.read.plain_dcp import (
    PlainDcp,
    load_plain_dcp,
)
from slurm_forge.errors import CheckpointError, CheckpointRejectedError, UnsafeFileError
from tests.distributed.ranks import run_ranks
from tests.fsdp import fully_shard
from tests.unit.checkpoint.helpers import bitwise

TENSORS = {
    "a.weight": torch.arange(60.0).reshape(12, 5),
    "half": torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "count": torch.tensor(41),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
}


def dcp_save(state, path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=str(path))
    return path


@pytest.fixture
def plain(tmp_path):
    return dcp_save(TENSORS, tmp_path / "plain")


def where(path, name):
    """File, offset and length of a tensor with one shard."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (chunk,) = metadata.state_dict_metadata[name].chunks
    info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    return path / info.relative_path, info.offset, info.length


def replace_item(path, name, make):
    """Put other bytes of the same length where a tensor lies."""
    file, offset, length = where(path, name)
    data = bytearray(file.read_bytes())
    new = make(bytes(data[offset : offset + length]))
    assert len(new) == length
    data[offset : offset + length] = new
    file.write_bytes(bytes(data))


def test_every_tensor_comes_back_bit_by_bit(plain):
    opened = PlainDcp.open(plain)
    assert opened.left_out == ()
    assert set(opened.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert opened.tensors[name].shape == tuple(tensor.shape)
        assert opened.tensors[name].dtype == tensor.dtype
        assert bitwise(opened.read(name), tensor)


def test_model_and_optimizer_as_everybody_saves_them(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp_save({"model": model_state, "optim": optimizer_state, "step": 7}, tmp_path / "x")
    opened = PlainDcp.open(tmp_path / "x")
    assert "model.weight" in opened.tensors
    assert "optim.state.weight.exp_avg" in opened.tensors
    # Options are pickles in there: named, and not touched.
    assert "step" in opened.left_out
    assert any(name.startswith("optim.param_groups") for name in opened.left_out)
    fresh = nn.Linear(4, 2)
    into = {"model": fresh.state_dict(), "step": 0}
    with pytest.warns(UserWarning, match="not loaded, because they are not tensors: step"):
        assert load_plain_dcp(tmp_path / "x", into) == ("step",)
    assert into["step"] == 0
    assert bitwise(fresh.weight, model.weight)


def filled_up(archive, length):
    """The archive with a comment, so that it has that length."""
    room = length - len(archive)
    return archive[:-2] + room.to_bytes(2, "little") + bytes(room)


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (self.mark,))


def test_entries_that_are_no_tensors_are_never_unpickled(tmp_path):
    mark = str(tmp_path / "executed")
    dcp_save({"w": torch.ones(3), "evil": Evil(mark)}, tmp_path / "x")
    opened = PlainDcp.open(tmp_path / "x")
    assert opened.left_out == ("evil",)
    assert bitwise(opened.read("w"), torch.ones(3))
    with pytest.warns(UserWarning, match="evil"):
        load_plain_dcp(tmp_path / "x", {"w": torch.zeros(3), "evil": None})
    with pytest.raises(CheckpointError, match="evil was not saved as a tensor"):
        load_plain_dcp(tmp_path / "x", {"w": torch.zeros(3), "evil": torch.zeros(1)})
    assert not Path(mark).exists()


def test_a_pickle_in_the_place_of_a_tensor_is_not_run(tmp_path, plain):
    mark = str(tmp_path / "executed")

    def evil(item):
        out = io.BytesIO()
        torch.save(Evil(mark), out)
        return filled_up(out.getvalue(), len(item))

    wide = dcp_save({"w": torch.zeros(4000)}, tmp_path / "wide")
    replace_item(wide, "w", evil)
    with pytest.raises(CheckpointRejectedError, match="w: "):
        PlainDcp.open(wide).read("w")
    assert not Path(mark).exists()


def test_a_flipped_bit_of_the_data_is_found(plain):
    """torch.load itself hands out the wrong number without a word."""

    def flip(item):
        at = item.index(TENSORS["a.weight"].numpy().tobytes()) + 17
        return item[:at] + bytes([item[at] ^ 4]) + item[at + 1 :]

    replace_item(plain, "a.weight", flip)
    opened = PlainDcp.open(plain)
    with pytest.raises(CheckpointRejectedError, match=r"a\.weight: its checksum"):
        opened.read("a.weight")
    assert bitwise(opened.read("count"), TENSORS["count"])


def test_checksums_that_were_switched_off_are_no_damage(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp_save({"w": torch.arange(9)}, tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(before)
    assert bitwise(PlainDcp.open(tmp_path / "x").read("w"), torch.arange(9))


def zipped(item):
    """The same archive, compressed, which would unpack into any amount of memory."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
            for record in old.infolist():
                new.writestr(record.filename, old.read(record.filename))
    return filled_up(out.getvalue(), len(item))


@pytest.mark.parametrize(("make", "why"), [
    (lambda item: b"\x80\x02" + item[2:], "not stored the way"),
    (lambda item: item[: len(item) // 2] + bytes(len(item) - len(item) // 2), "archive"),
    (zipped, "compressed"),
])  # fmt: skip
def test_what_torch_save_can_not_have_written_is_refused(tmp_path, make, why):
    wide = dcp_save({"w": torch.zeros(4000)}, tmp_path / "wide")
    replace_item(wide, "w", make)
    with pytest.raises(CheckpointRejectedError, match=why):
        PlainDcp.open(wide).read("w")


def test_another_tensor_than_the_index_says_is_refused(tmp_path):
    path = dcp_save({"a": torch.ones(4), "b": torch.ones(2, 2), "c": torch.ones(4).int()},
                    tmp_path / "x")  # fmt: skip
    metadata = pickle.loads((path / ".metadata").read_bytes())
    at = {index.fqn: index for index in metadata.storage_data}
    for other in ("b", "c"):
        swapped = pickle.loads((path / ".metadata").read_bytes())
        swapped.storage_data[at["a"]] = metadata.storage_data[at[other]]
        (path / ".metadata").write_bytes(pickle.dumps(swapped))
        with pytest.raises(CheckpointRejectedError, match="the data there is not"):
            PlainDcp.open(path).read("a")
        (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_file_that_others_may_write_is_refused(plain):
    file, _, _ = where(plain, "count")
    file.chmod(0o666)
    with pytest.raises(UnsafeFileError):
        PlainDcp.open(plain).read("count")
    file.chmod(0o644)
    (plain / ".metadata").chmod(0o666)
    with pytest.raises(UnsafeFileError):
        PlainDcp.open(plain)


def test_a_link_in_the_place_of_a_file_is_refused(plain, tmp_path):
    file, _, _ = where(plain, "count")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointRejectedError, match="not listed"):
        PlainDcp.open(plain)


def test_a_truncated_file_is_refused(plain):
    file, offset, _ = where(plain, "turned")
    os.truncate(file, offset + 10)
    with pytest.raises(CheckpointRejectedError, match="beyond the end"):
        PlainDcp.open(plain)


def test_what_is_no_checkpoint_is_said_so(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointRejectedError, match=r"it has no \.metadata"):
            PlainDcp.open(path)


@pytest.mark.parametrize(("into", "why"), [
    ({"count": torch.tensor(0), "more": torch.ones(1)}, "more"),
    ({"count": torch.tensor(0.0)}, "count: saved as int64"),
    ({"a.weight": torch.zeros(12, 6)}, "a.weight"),
])  # fmt: skip
def test_a_state_dict_that_does_not_fit_is_left_as_it_is(plain, into, why):
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(CheckpointError, match=why):
        load_plain_dcp(plain, into)
    assert all(bitwise(into[name], before[name]) for name in into)


def test_partial_leaves_the_rest_alone(plain):
    into = {"count": torch.tensor(0), "more": torch.ones(1)}
    load_plain_dcp(plain, into, partial=True)
    assert (int(into["count"]), int(into["more"])) == (41, 1)


def sharded_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def save_sharded(rank, path):
    net = sharded_net()
    fully_shard(net)
    odd = distribute_tensor(torch.arange(3.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    dcp.save({"model": net.state_dict(), "odd": odd, "all": torch.ones(2)}, checkpoint_id=path)


@pytest.mark.distributed
def test_what_two_ranks_sharded_is_put_together_and_sharded_anew(tmp_path):
    path = str(tmp_path / "x")
    run_ranks(2, save_sharded, path, timeout=60)
    opened = PlainDcp.open(path)
    for name, tensor in sharded_net().state_dict().items():
        assert bitwise(opened.read(f"model.{name}"), tensor)
    assert bitwise(opened.read("odd"), torch.arange(3.0))
    fresh = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    load_plain_dcp(path, {"model": fresh.state_dict()})
    assert all(bitwise(a, b) for a, b in
               zip(fresh.parameters(), sharded_net().parameters(), strict=True))  # fmt: skip

    def load_again(rank):
        torch.manual_seed(rank + 50)
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fully_shard(net)
        load_plain_dcp(path, {"model": net.state_dict()})
        assert isinstance(net[0].weight, DTensor)
        whole = {name: value.full_tensor() for name, value in net.state_dict().items()}
        assert dist.get_world_size() == 3
        return whole

    for found in run_ranks(3, load_again, timeout=60):
        assert all(bitwise(found[n], t) for n, t in sharded_net().state_dict().items())
