"""Exports open with what everybody has: safetensors, torch.load, plain DCP."""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.export import export_files
from slurm_forge.checkpoint.export.export_files import (
    Format,
    write_export,
)
from slurm_forge.checkpoint.export.main import (
    export,
    main,
    plain_source,
    run_source,
)
from slurm_forge.checkpoint.read.plain_dcp import PlainDcp
from slurm_forge.errors import CheckpointError, CheckpointRejectedError
from slurm_forge.store.directory import CheckpointStore
from tests.distributed.ranks import run_ranks
from tests.fsdp import fully_shard
from tests.unit.checkpoint.helpers import bitwise, open_store, save

SUFFIX = {Format.SAFETENSORS: "x.safetensors", Format.TORCH: "x.pt", Format.DCP: "x"}


class Net(nn.Module):
    """Tied weights, a buffer, a number, several dtypes, an empty tensor."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(seed + 0.5))
        self.register_buffer("seen", torch.tensor([seed, 2]))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 3))


def trained(net):
    optimizer = torch.optim.AdamW(net.parameters(), fused=False)
    (net.head(net.embed(torch.tensor([1, 2]))).sum() + net.scale + net.narrow.sum()).backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def run(tmp_path):
    """A store with one checkpoint: (store, its name, the model, the optimizer)."""
    store, net = open_store(tmp_path), Net()
    optimizer = trained(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = TrainingState(
        models={"model": net},
        optimizers={"optimizer": optimizer},
        objects={"scheduler": scheduler},
        rng={"rng/rank-0/torch": torch.get_rng_state()},
    )
    return store, save(store, state, step=7).name, net, optimizer


def exported(run, tmp_path, kind, only=(), *, everything=False, force=False):
    store, name = run[:2]
    target = tmp_path / SUFFIX[kind]
    source = run_source(store, name, only=only, everything=everything)
    return export(source, target, kind, force=force), target


def opened(target, kind, like):
    """With the real openers; what ``dcp.load`` fills is made after ``like``."""
    if kind is Format.SAFETENSORS:
        return load_file(target)
    if kind is Format.TORCH:
        return torch.load(target, weights_only=True)
    into = {name: torch.full_like(tensor, 1) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(into, checkpoint_id=str(target))
    assert set(dcp.FileSystemReader(str(target)).read_metadata().state_dict_metadata) == set(like)
    return into


@pytest.mark.parametrize("kind", list(Format))
def test_the_model_opens_elsewhere_and_fits(run, tmp_path, kind):
    net = run[2]
    done, target = exported(run, tmp_path, kind)
    found = opened(target, kind, net.state_dict())
    assert done.tensors == len(found) == len(net.state_dict())
    assert all(bitwise(found[name], tensor) for name, tensor in net.state_dict().items())
    fresh = Net(seed=2)
    fresh.load_state_dict(found, strict=True)
    assert bitwise(fresh.head.weight, net.head.weight)
    files = [target] if target.is_file() else list(target.iterdir())
    assert done.size == sum(file.stat().st_size for file in files)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", target.name}


def test_only_the_optimizer_and_everything(run, tmp_path):
    optimizer = run[3]
    _, target = exported(run, tmp_path, Format.TORCH, ["optimizer"])
    found = torch.load(target, weights_only=True)
    moments = optimizer.state[run[2].embed.weight]
    assert bitwise(found["optimizer.state.embed.weight.exp_avg"], moments["exp_avg"])
    assert all(name.startswith("optimizer.") for name in found)
    done, target = exported(run, tmp_path, Format.TORCH, everything=True, force=True)
    found = torch.load(target, weights_only=True)
    assert bitwise(found["model.scale"], run[2].scale)
    assert bitwise(found["rng.rank-0.torch"], torch.get_rng_state())
    assert "optimizer.state.scale.step" in found
    assert done.notes == ("omitted, because they are not tensors: options, counters and learning "
                          "rates",)  # fmt: skip


def test_two_models_keep_their_names_apart(tmp_path):
    store = open_store(tmp_path)
    models = {"big": nn.Linear(3, 3), "small": nn.Linear(2, 2)}
    run = (store, save(store, TrainingState(models=models)).name)
    _, target = exported(run, tmp_path, Format.SAFETENSORS)
    assert sorted(load_file(target)) == ["big.bias", "big.weight", "small.bias", "small.weight"]
    _, target = exported(run, tmp_path, Format.SAFETENSORS, ["small"], force=True)
    models["small"].load_state_dict(load_file(target))


@pytest.mark.parametrize(("only", "why"), [
    (["modle"], r"no 'modle' in it \(did you mean \"model\"\?\)"),
    (["scheduler"], "no tensors"),
])  # fmt: skip
def test_what_can_not_be_chosen_is_said(run, tmp_path, only, why):
    with pytest.raises(CheckpointError, match=why):
        exported(run, tmp_path, Format.TORCH, only)
    assert not (tmp_path / "x.pt").exists()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self):
        return {"calls": 3, "table": torch.arange(2)}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_named_as_left_out(tmp_path):
    store = open_store(tmp_path)
    run = (store, save(store, TrainingState(models={"model": nn.Sequential(Counting())})).name)
    done, target = exported(run, tmp_path, Format.SAFETENSORS)
    assert list(load_file(target)) == ["0.weight"]
    assert "0._extra_state" in done.notes[0]


@pytest.mark.parametrize("kind", list(Format))
def test_a_damaged_block_leaves_nothing_behind(run, tmp_path, kind):
    store, name = run[:2]
    file = store.path(name) / "rank-00000.data"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointRejectedError, match="block 0"):
        exported(run, tmp_path, kind)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("kind", list(Format))
def test_what_is_there_is_replaced_only_with_force_and_only_as_a_whole(
    run, tmp_path, kind, monkeypatch
):
    _, target = exported(run, tmp_path, kind, ["optimizer"])
    before = content(target)
    with pytest.raises(CheckpointError, match="exists already"):
        exported(run, tmp_path, kind)
    monkeypatch.setattr(export_files, "fsync_directory", fail)
    monkeypatch.setattr(export_files.os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        exported(run, tmp_path, kind, force=True)
    monkeypatch.undo()
    assert content(target) == before
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", target.name}
    exported(run, tmp_path, kind, force=True)
    assert content(target) != before
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", target.name}


def fail(*_):
    raise OSError(28, "the disk is full")


def content(target):
    files = [target] if target.is_file() else sorted(target.iterdir())
    return {file.name: file.read_bytes() for file in files}


def test_a_folder_of_something_else_is_never_replaced(run, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="holds something other"):
        exported(run, tmp_path, Format.DCP, force=True)
    assert (tmp_path / "x" / "thesis.tex").exists()


ALL_DTYPES = {
    str(dtype): torch.arange(8).to(dtype) for dtype in export_files._SAFE_DTYPES
}  # fmt: skip


def test_every_dtype_that_safetensors_knows(tmp_path):
    described = {name: (tuple(t.shape), t.dtype) for name, t in ALL_DTYPES.items()}
    target = tmp_path / "x.safetensors"
    write_export(target, Format.SAFETENSORS, described, iter(ALL_DTYPES.items()),
                 about={"step": "3"}, force=False)  # fmt: skip
    found = load_file(target)
    assert set(found) == set(ALL_DTYPES)
    assert all(bitwise(found[name], tensor) for name, tensor in ALL_DTYPES.items())
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}


def test_every_tensor_begins_at_a_multiple_of_its_width(run, tmp_path):
    """Readers that map the file hand out what lies there, and not all of them can misaligned."""
    _, target = exported(run, tmp_path, Format.SAFETENSORS)
    data = target.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    places = {name: 8 + length + entry["data_offsets"][0]
              for name, entry in header.items() if name != "__metadata__"}  # fmt: skip
    assert set(places) == set(run[2].state_dict())
    for name, tensor in run[2].state_dict().items():
        assert places[name] % tensor.itemsize == 0, name


def test_a_dtype_without_a_name_there_is_refused_before_anything_is_written(tmp_path):
    tensor = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match=r"w is torch\.complex128") as caught:
        write_export(tmp_path / "x.safetensors", Format.SAFETENSORS, {"w": ((2,), tensor.dtype)},
                     iter([("w", tensor)]), about={}, force=False)  # fmt: skip
    assert ".pt" in caught.value.next_step
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_text_is_refused_before_anything_is_written(tmp_path):
    name, described = "w\ud800", ((2,), torch.float32)
    with pytest.raises(CheckpointError, match=r"'w\\ud800' is not valid Unicode") as caught:
        write_export(tmp_path / "x.safetensors", Format.SAFETENSORS, {name: described},
                     iter([(name, torch.ones(2))]), about={}, force=False)  # fmt: skip
    assert ".pt" in caught.value.next_step
    assert list(tmp_path.iterdir()) == []
    write_export(tmp_path / "x.pt", Format.TORCH, {name: described},
                 iter([(name, torch.ones(2))]), about={}, force=False)  # fmt: skip
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)) == [name]


def test_a_folder_whose_name_is_no_text_is_told_as_text(tmp_path):
    target = tmp_path / "x.safetensors"
    write_export(target, Format.SAFETENSORS, {"w": ((2,), torch.float32)},
                 iter([("w", torch.ones(2))]), about={"from": "p\udcff"}, force=False)  # fmt: skip
    with safe_open(target, "pt") as file:
        assert file.metadata()["from"] == "p\\udcff"


def test_safetensors_holds_one_tensor_at_a_time(tmp_path):
    alive = []

    def tensors():
        for number in range(5):
            # Tensors may be kept alive by a view of theirs, so their memory is what is counted.
            storage = torch.full((4,), float(number))
            alive.append(weakref.ref(storage.untyped_storage()))
            yield f"t{number}", storage
            del storage
            assert [ref() for ref in alive] == [None] * (number + 1)

    described = {f"t{number}": ((4,), torch.float32) for number in range(5)}
    target = tmp_path / "x.safetensors"
    write_export(target, Format.SAFETENSORS, described, tensors(), about={}, force=False)
    assert len(alive) == 5
    assert float(load_file(target)["t3"][0]) == 3.0


def test_small_groups_give_the_same_file(run, tmp_path, monkeypatch):
    _, target = exported(run, tmp_path, Format.SAFETENSORS, everything=True)
    whole = content(target)
    monkeypatch.setattr("slurm_forge.checkpoint.export.main._MOST_GROUP", 1)
    exported(run, tmp_path, Format.SAFETENSORS, everything=True, force=True)
    assert content(target) == whole


def test_plain_dcp_becomes_one_file(tmp_path):
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "optim": {"m": torch.ones(2)}, "n": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=str(tmp_path / "plain"))
    target = tmp_path / "x.safetensors"
    done = export(plain_source(tmp_path / "plain", only=()), target, Format.SAFETENSORS,
                  force=False)  # fmt: skip
    assert sorted(load_file(target)) == ["model.w", "optim.m"]
    assert done.notes == ("omitted, because they are not tensors: n",)
    export(plain_source(tmp_path / "plain", only=["model"]), target, Format.SAFETENSORS, force=True)
    assert bitwise(load_file(target)["w"], state["model"]["w"])
    with pytest.raises(CheckpointError, match=r"did you mean \"optim\""):
        plain_source(tmp_path / "plain", only=["optm"])


def test_what_is_written_for_dcp_is_read_by_our_reader_too(run, tmp_path):
    _, target = exported(run, tmp_path, Format.DCP)
    plain = PlainDcp.open(target)
    assert all(bitwise(plain.read(name), t) for name, t in run[2].state_dict().items())


def save_sharded(rank, folder):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3))
    whole = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fully_shard(net)
    store = CheckpointStore(folder, "run")
    saved = save(store, TrainingState(models={"model": net}), group=torch.distributed.group.WORLD)
    return saved.name, whole


@pytest.mark.distributed
def test_what_two_ranks_sharded_is_one_file(tmp_path):
    folder = tmp_path / "checkpoints"
    (name, whole), _ = run_ranks(2, save_sharded, folder, timeout=60)
    _, target = exported((CheckpointStore(folder, "run"), name), tmp_path, Format.SAFETENSORS)
    found = load_file(target)
    assert set(found) == set(whole)
    assert all(bitwise(found[key], tensor) for key, tensor in whole.items())


def test_what_was_written_is_told_as_json(run, tmp_path, capsys):
    store, name = run[:2]
    target = tmp_path / "x.pt"
    words = ["--checkpoints", store.directory, "--run-id", "run", "--name", name]
    assert main([*map(str, words), "--to", str(target), "--format", "torch"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["size"]) == (str(target), target.stat().st_size)


def test_how_far_it_is_is_told_before_the_result(run, tmp_path, capsys):
    store, name = run[:2]
    target = tmp_path / "x.pt"
    words = ["--checkpoints", store.directory, "--run-id", "run", "--name", name]
    assert main([*map(str, words), "--to", str(target), "--format", "torch", "--progress"]) == 0
    *steps, told = map(json.loads, capsys.readouterr().out.splitlines())
    assert steps
    assert all(0 < step["done"] <= step["total"] for step in steps)
    assert (told["path"], told["size"]) == (str(target), target.stat().st_size)


def test_errors_of_the_process_are_safe_for_a_terminal(tmp_path, capsys):
    evil = "w\x1b]0;owned\x07"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({evil: torch.ones(2, dtype=torch.complex128)}, checkpoint_id=str(tmp_path / "p"))
    target = str(tmp_path / "x.safetensors")
    assert main(["--plain", str(tmp_path / "p"), "--to", target, "--format", "safetensors"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert r"w\x1b]0;owned\x07 is torch.complex128" in said.err
    assert "\x1b" not in said.err
    assert not Path(target).exists()


def test_that_the_target_exists_is_said_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "x.pt").touch()
    words = ["--to", str(tmp_path / "x.pt"), "--format", "torch"]
    assert main(["--plain", str(tmp_path / "nowhere"), *words]) == 2
    assert "exists already" in capsys.readouterr().err


def test_of_a_damaged_one_is_said_what_to_do(run, tmp_path, capsys):
    store, name = run[:2]
    (store.path(name) / "rank-00000.data").unlink()
    words = ["--checkpoints", store.directory, "--run-id", "run", "--name", name, "--to",
             tmp_path / "x.pt", "--format", "torch"]  # fmt: skip
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert f"{name} is damaged: rank-00000.data is missing" in said
    assert "slurm-forge checkpoints verify" in said


def test_one_of_our_own_is_no_plain_one(run, tmp_path, capsys):
    store, name = run[:2]
    words = ["--plain", str(store.path(name)), "--to", str(tmp_path / "x.pt"), "--format", "torch"]
    assert main(words) == 2
    assert "slurm-forge export RUN --checkpoint NAME" in capsys.readouterr().err
