from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.training.checkpointing.structure import (
    Structure,
    differences,
)
from slurm_forge.training.core.tensor_names import (
    Folded,
    fold,
    guess_renames,
)
from tests.distributed.ranks import run_ranks
from tests.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)


class Net(nn.Module):
    def __init__(self, blocks: str = "blocks", depth: int = 12, width: int = 8) -> None:
        super().__init__()
        self.add_module(blocks, nn.ModuleList(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 4)


class OtherNet(Net):
    pass


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **{"lr": 0.1, **options})


def structure(model: nn.Module, optimizer: Any = None, **others: Any) -> Structure:
    optimizers = {} if optimizer is None else {"optimizer": optimizer}
    return Structure.of({"model": model}, optimizers, others)


def changed(saved: Structure, now: Structure) -> list[str]:
    """Through JSON, as a resume would see it."""
    read = Structure.from_json(json.loads(json.dumps(saved.to_json())))
    assert read == saved
    return list(differences(read, now))


def test_the_same_structure_has_no_differences() -> None:
    def build() -> Structure:
        model = Net()
        optimizer = adam(model)
        return structure(model, optimizer, scheduler=CosineAnnealingLR(optimizer, 10))

    assert changed(build(), build()) == []


def test_training_by_itself_makes_no_difference() -> None:
    for schedule in (
        lambda optimizer: CosineAnnealingLR(optimizer, 10),
        lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=10),
    ):
        model = Net()
        optimizer = adam(model)
        scheduler = schedule(optimizer)
        before = structure(model, optimizer, scheduler=scheduler)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()
        assert changed(before, structure(model, optimizer, scheduler=scheduler)) == []


def test_wrappers_make_no_difference(one_rank: None) -> None:
    def wrapped_inside() -> Net:
        model = Net()
        model.head = checkpoint_wrapper(model.head)
        return model

    plain = structure(Net(), adam(Net()))
    for wrapped in (
        DistributedDataParallel(Net()),
        torch.compile(Net()),
        fully_shard(Net()),
        wrapped_inside(),
    ):
        now = structure(wrapped, adam(wrapped))
        assert changed(plain, structure(wrapped)) == [
            "optimizer optimizer (Adam) is not registered now"
        ]
        assert now.models == plain.models


@pytest.mark.distributed
def test_shapes_are_those_of_the_whole_model_on_every_rank() -> None:
    def on_each(rank: int) -> object:
        model = fully_shard(Net(depth=2))
        return structure(model, adam(model)).to_json()

    plain = Net(depth=2)
    assert run_ranks(2, on_each) == [structure(plain, adam(plain)).to_json()] * 2


def test_names_are_those_of_the_checkpoint() -> None:
    model = Net(depth=2)
    model.tied = nn.Linear(8, 4)
    model.tied.weight = model.head.weight
    keys = TrainingState(models={"model": model}).capture().tensors
    described = structure(model).models["model"].tensors
    assert {f"models/model/{fqn}" for fqn in described} == set(keys)
    assert all(keys[f"models/model/{fqn}"].shape == t.shape for fqn, t in described.items())


def test_a_model_that_differs_is_told_tensor_by_tensor() -> None:
    now = Net()
    now.blocks[3].linear = nn.Linear(16, 8)
    now.blocks[4].linear = nn.Linear(16, 8, dtype=torch.float64)
    now.head = nn.Linear(8, 4, bias=False)
    now.head.weight.requires_grad_(False)
    now.extra = nn.Linear(8, 3, bias=False, dtype=torch.bfloat16)
    assert changed(structure(Net()), structure(now)) == [
        "model: blocks.3.linear.weight is (8, 16), was (8, 8)",
        "model: blocks.4.linear.weight is float64 (8, 16), was float32 (8, 8)",
        "model: blocks.4.linear.bias is float64, was float32",
        "model: head.weight is frozen, was trained",
        "model: head.bias is gone, float32 (4,)",
        "model: extra.weight is new, bfloat16 (3, 8)",
    ]


def test_equal_layers_are_told_in_one_line() -> None:
    assert changed(structure(Net(depth=12)), structure(Net(depth=10)))[0] == (
        "model: blocks.10-11.linear.weight is gone, float32 (8, 8) (2 times)"
    )
    wide = changed(structure(Net(width=8)), structure(Net(width=16)))
    assert wide[0] == "model: blocks.0-11.linear.weight is (16, 16), was (8, 8)"
    assert len(wide) == 7


def test_a_renamed_part_is_told_as_one() -> None:
    renamed = Net("layers")
    renamed.layers[3].linear = nn.Linear(16, 8)
    assert changed(structure(Net("blocks")), structure(renamed)) == [
        'model: "blocks" is called "layers" now '
        "(83 tensors of the same shape: blocks.0.linear.weight is layers.0.linear.weight)",
        "model: layers.3.linear.weight is (8, 16), was (8, 8)",
    ]


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_a_prefix_by_hand_is_named(prefix: str) -> None:
    outside = nn.Module()
    outside.add_module(prefix, Net())
    lines = changed(structure(Net()), structure(outside))
    assert lines[0] == "model is Module, was Net"
    assert lines[1].startswith(f'model: names begin with "{prefix}." now (86 tensors')
    assert len(lines) == 2
    assert f'names have lost "{prefix}."' in changed(structure(outside), structure(Net()))[1]


def test_another_class_and_other_objects_are_told() -> None:
    saved = Structure.of({"a": Net(), "b": Net()}, {}, {"ema": Net()})
    now = Structure.of({"a": OtherNet(), "c": Net()}, {}, {"scaler": Net()})
    assert changed(saved, now) == [
        "a is OtherNet, was Net",
        "model b (Net) is not registered now",
        "model c (Net) is new",
        "object ema (Net) is not registered now",
        "object scaler (Net) is new",
    ]


def test_another_mode_is_told() -> None:
    model = Net()
    saved = structure(model)
    model.blocks[2].norm.eval()
    assert changed(saved, saved.with_modes({"model": model})) == [
        "model: blocks.2.norm is in eval mode, was in train mode"
    ]
    model.eval()
    evaluating = saved.with_modes({"model": model})
    assert changed(saved, evaluating) == ["model is in eval mode, was in train mode"]
    assert changed(evaluating, saved) == ["model is in train mode, was in eval mode"]


def test_a_wrapper_has_no_name_in_a_mode_either() -> None:
    model = Net()
    model.head = checkpoint_wrapper(model.head)
    saved = structure(model)
    model.head._checkpoint_wrapped_module.eval()
    assert changed(saved, saved.with_modes({"model": model})) == [
        "model: head is in eval mode, was in train mode"
    ]


def test_an_optimizer_that_differs_is_told() -> None:
    model = Net(depth=2)
    saved = structure(model, adam(model, weight_decay=0.01))
    decayed = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.1, betas=(0.9, 0.95))
    lines = changed(saved, structure(model, decayed))
    assert lines[0] == "optimizer is AdamW, was Adam"
    assert "optimizer: weight_decay 0.1, was 0.01" in lines
    assert "optimizer: betas (0.9, 0.95), was (0.9, 0.999)" in lines
    assert "optimizer: lr 0.5, was 0.1" in lines


def test_of_a_learning_rate_that_a_schedule_moves_the_first_one_is_told() -> None:
    model = Net(depth=2)
    optimizer = adam(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    (group,) = structure(model, optimizer).optimizers["optimizer"].groups
    assert "lr" not in group.options
    assert group.options["initial_lr"] == "0.1"


def test_parameters_that_moved_between_groups_are_told() -> None:
    model = Net(depth=3)
    body, head = list(model.blocks.parameters()), list(model.head.parameters())
    saved = structure(model, torch.optim.SGD([{"params": body}, {"params": head}], lr=1.0))
    now = structure(model, torch.optim.SGD([{"params": [*body, *head[:1]]}], lr=1.0))
    assert changed(saved, now) == [
        "optimizer has 1 parameter group, had 2 parameter groups",
        "optimizer: head.bias is not optimized now, was before",
        "optimizer: head.weight is in group 0, was in group 1",
    ]
    turned = structure(model, torch.optim.SGD([{"params": body[::-1]}, {"params": head}], lr=1.0))
    assert changed(saved, turned) == ["optimizer: group 0 has the same parameters in another order"]


def test_a_parameter_that_the_model_lost_is_told_once() -> None:
    with_bias, without = Net(), Net()
    without.head = nn.Linear(8, 4, bias=False)
    assert changed(structure(with_bias, adam(with_bias)), structure(without, adam(without))) == [
        "model: head.bias is gone, float32 (4,)"
    ]


def test_a_schedule_that_was_made_longer_is_told() -> None:
    model = Net(depth=1)

    def with_steps(steps: int, lr: float = 0.1) -> Structure:
        optimizer = adam(model, lr=lr)
        return structure(model, optimizer, scheduler=CosineAnnealingLR(optimizer, steps))

    assert changed(with_steps(100), with_steps(200)) == ["scheduler: T_max 200, was 100"]
    assert "optimizer: initial_lr 0.5, was 0.1" in changed(with_steps(9), with_steps(9, lr=0.5))


def test_many_differences_are_counted() -> None:
    saved = Structure.of({f"m{i}": nn.Linear(1, 1) for i in range(30)}, {}, {})
    lines = changed(saved, Structure.of({}, {}, {}))
    assert len(lines) == 21
    assert lines[-1] == "and 10 more differences"


def test_five_thousand_tensors_are_a_few_lines_in_a_manifest() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(5000))
    assert len(json.dumps(structure(model, adam(model)).to_json())) < 1000


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"models": {"m": {}}, "optimizers": {}, "others": {}},
        {
            "models": {
                "m": {
                    "kind": "N",
                    "in_eval": [],
                    "tensors": [[["a", "0-99999999", ""], [], "", None]],
                }
            },
            "optimizers": {},
            "others": {},
        },
    ],
)
def test_what_a_manifest_says_and_nobody_understands_is_nothing(value: object) -> None:
    assert Structure.from_json(value) is None


NAMES = st.lists(
    st.sampled_from(["a", "b", "0", "1", "2", "10", "007", "-1", "x1", ""]), min_size=1, max_size=4
).map(".".join)


@given(st.dictionaries(NAMES, st.integers(0, 2), max_size=20))
def test_folded_names_are_the_names(items: dict[str, int]) -> None:
    again = {
        name: value
        for folded, value in fold(items.items())
        for name in Folded.from_json(json.loads(json.dumps(folded.to_json()))).names()
    }
    assert again == items


@given(st.dictionaries(NAMES, st.integers(0, 1), max_size=12))
def test_a_guess_explains_each_name_once_and_by_its_own_rule(new: dict[str, int]) -> None:
    gone = {f"old.{name}": value for name, value in new.items()}
    pairs = [pair for _, explained in guess_renames(gone, new) for pair in explained.items()]
    assert len({old for old, _ in pairs}) == len({now for _, now in pairs}) == len(pairs)
    assert all(gone[old] == new[now] for old, now in pairs)


def test_nothing_in_common_is_no_rename() -> None:
    assert guess_renames({"encoder.weight": 1}, {"decoder.bias": 1}) == []
    assert guess_renames({"a.weight": 1}, {"b.weight": 2}) == []
