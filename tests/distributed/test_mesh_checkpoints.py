"""Saved on one mesh, loaded on another: weights, moments and names are the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.stages import PipelineStages
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write.save import CheckpointWriter, save_checkpoint
from slurm_forge.errors import CheckpointError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.core.rank_layout import RankLayout
from tests.distributed.ranks import RanksFailedError, run_ranks
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed]

#: Sizes of each kind: ranks, and the mesh.
KINDS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "plain": ((1,), ("dp",)),
    "tp": ((2,), ("tp",)),
    "tp4": ((4,), ("tp",)),
    "fsdp": ((4,), ("dp",)),
    "fsdp2": ((2,), ("dp",)),
    "fsdp-tp": ((2, 2), ("dp", "tp")),
    "hsdp": ((2, 2), ("dp_replicate", "dp_shard")),
    "pp": ((2,), ("pp",)),
    "pp4": ((4,), ("pp",)),
    "pp-fsdp": ((2, 2), ("pp", "dp")),
}
LAYERS = 4


class Layer(nn.Module):
    """Weights that are sharded, some that are not, and a buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("seen", torch.full((3,), float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Stack(nn.Module):
    """Layers by number; sizes that neither 2 nor 4 ranks divide evenly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict()
        for number in range(LAYERS):
            self.layers[str(number)] = Layer(number + seed)


class Counter:
    """An object that holds a tensor, another one on each stage."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((2,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "kind": "counter"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


class Parts:
    """A model on a mesh with its optimizer; the same numbers whatever the mesh is."""

    def __init__(self, kind: str, seed: int, *, local: bool = False) -> None:
        shape, names = KINDS[kind]
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.layout = RankLayout.of_mesh(self.mesh)
        model: Any = Stack(seed)
        layout = self.layout
        if layout.stages > 1:
            per_stage = LAYERS // layout.stages
            for name in list(model.layers):
                if int(name) // per_stage != layout.stage:
                    del model.layers[name]
        if "tp" in names:
            for layer in model.layers.values():
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, self.mesh["tp"], plan)
        if "dp" in names and layout.data_ranks > 1:
            for layer in model.layers.values():
                fully_shard(layer, mesh=self.mesh["dp"])
        if "dp_shard" in names:
            for layer in model.layers.values():
                fully_shard(layer, mesh=self.mesh)
        self.model: nn.Module = model
        if local:
            self.model = nn.ModuleList(model.layers.values())
        decayed = [p for n, p in self.model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in self.model.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.counter = Counter(float(layout.stage + 10 * seed))

    def train(self, steps: int) -> None:
        """Each element follows from itself alone: layouts make no difference."""
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach() * 0.3
            self.optimizer.step()
            self.scheduler.step()

    def state(self, *, counter: bool = False) -> TrainingState:
        layout = self.layout
        objects: dict[str, Any] = {"lr": self.scheduler}
        if counter:
            objects["counter"] = self.counter
        models, stages = {"net": self.model}, None
        if layout.stages > 1:
            stages = PipelineStages.gathered(
                Ranks(dist.group.WORLD),
                stage=layout.stage,
                count=layout.stages,
                leads=layout.leads_stage,
                models=models,
                optimizers={"adam": self.optimizer},
            )
            models = {stages.name(name): model for name, model in models.items()}
        return TrainingState(
            models=models, optimizers={"adam": self.optimizer}, objects=objects, stages=stages
        )

    def numbers(self) -> dict[str, list[float]]:
        """Everything that this rank has, whole."""
        found: dict[str, torch.Tensor] = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for entry, value in self.optimizer.state[parameter].items():
                found[f"{name} {entry}"] = value
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()
            for name, value in found.items()
        }


def save_on(rank: int, folder: Path, kind: str, how: dict[str, Any]) -> dict[str, list[float]]:
    parts = Parts(kind, seed=1, local=how.get("local", False))
    parts.train(3)
    save_checkpoint(
        CheckpointStore(folder, "run"),
        parts.state(counter=how.get("counter", False)),
        name=CheckpointName.new(step=3, attempt=1, launch=1),
        reason="test",
        group=dist.group.WORLD,
        fence=lambda: None,
    )
    return parts.numbers()


def load_on(rank: int, folder: Path, kind: str, how: dict[str, Any]) -> Any:
    parts = Parts(kind, seed=2, local=how.get("local", False))
    if how.get("warm"):
        parts.train(1)
    loaded = resume(
        CheckpointStore(folder, "run"),
        parts.state(counter=how.get("counter", False)),
        group=dist.group.WORLD,
        on_reject=lambda *why: pytest.fail(str(why)),
    )
    assert loaded is not None
    if how.get("counter"):
        assert parts.counter.tensor.tolist() == [parts.layout.stage + 10.0] * 2
    assert parts.scheduler.last_epoch == 3
    found = parts.numbers()
    parts.train(1)
    return found, parts.numbers()


def ranks_of(kind: str) -> int:
    return torch.Size(KINDS[kind][0]).numel()


def saved(folder: Path, kind: str, **how: Any) -> dict[str, list[float]]:
    numbers: dict[str, list[float]] = {}
    for own in run_ranks(ranks_of(kind), save_on, folder, kind, how):
        assert all(own[name] == numbers.get(name, own[name]) for name in own)
        numbers |= own
    return numbers


def expected(steps: int) -> dict[str, list[float]]:
    """What one rank alone comes to."""

    def body(rank: int) -> dict[str, list[float]]:
        parts = Parts("plain", seed=1)
        parts.train(steps)
        return parts.numbers()

    return run_ranks(1, body)[0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("fsdp-tp", "tp"),
        pytest.param("pp", "plain"),
        pytest.param("tp", "plain", marks=SLOW),
        pytest.param("tp", "tp4", marks=SLOW),
        pytest.param("plain", "fsdp-tp", marks=SLOW),
        pytest.param("fsdp-tp", "fsdp", marks=SLOW),
        pytest.param("fsdp", "fsdp-tp", marks=SLOW),
        pytest.param("fsdp2", "fsdp", marks=SLOW),
        pytest.param("hsdp", "fsdp-tp", marks=SLOW),
        pytest.param("plain", "pp", marks=SLOW),
        pytest.param("pp", "pp4", marks=SLOW),
        pytest.param("pp4", "pp", marks=SLOW),
        pytest.param("pp-fsdp", "fsdp-tp", marks=SLOW),
        pytest.param("tp", "pp-fsdp", marks=SLOW),
        pytest.param("pp-fsdp", "pp-fsdp", marks=SLOW),
    ],
)
def test_a_checkpoint_loads_on_another_mesh(tmp_path: Path, first: str, then: str) -> None:
    assert saved(tmp_path, first) == expected(3)
    whole: dict[str, list[float]] = {}
    further: dict[str, list[float]] = {}
    for found, after in run_ranks(ranks_of(then), load_on, tmp_path, then, {"warm": True}):
        whole |= found
        further |= after
    assert whole == expected(3)
    assert further == expected(4)


def test_stages_with_the_same_names_are_saved_each(tmp_path: Path) -> None:
    how = {"local": True, "counter": True}
    # Every stage has a layer 0, and they differ: all of it is there.
    before = run_ranks(2, save_on, tmp_path, "pp", how)
    assert before[0].keys() == before[1].keys()
    assert before[0] != before[1]
    after = run_ranks(2, load_on, tmp_path, "pp", how)
    assert [found for found, _ in after] == before
    manifest = CheckpointStore(tmp_path, "run")
    state = manifest.verify_manifest(manifest.candidates()[0]).state
    assert sorted(state["models"]) == ["net@0", "net@1"]
    assert sorted(state["objects"]) == ["counter@0", "counter@1", "lr"]
    # On another number of stages nothing tells which layer is which.
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(1, load_on, tmp_path, "plain", {"local": True})
    (outcome,) = caught.value.outcomes
    assert isinstance(outcome.exception, CheckpointError)
    assert "net@0, net@1" in str(outcome.exception)
    assert "use as many stages" in outcome.exception.next_step


def test_stages_whose_optimizers_differ_in_groups_are_refused() -> None:
    def body(rank: int) -> str:
        model = nn.Linear(2, 2)
        parameters = list(model.parameters())
        groups = [{"params": parameters}] if rank else [{"params": [each]} for each in parameters]
        with pytest.raises(CheckpointError) as caught:
            PipelineStages.gathered(
                Ranks(dist.group.WORLD),
                stage=rank,
                count=2,
                leads=True,
                models={"net": model},
                optimizers={"sgd": torch.optim.SGD(groups)},
            )
        return f"{caught.value} | {caught.value.next_step}"

    for text in run_ranks(2, body):
        assert "2 parameter groups on pipeline stage 0 and 1 on stage 1" in text
        assert "the same groups on every stage" in text


def test_what_a_stage_holds_is_in_every_manifest_and_as_it_was_then(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        parts = Parts("pp", seed=1)
        parts.train(1)
        writer = CheckpointWriter(CheckpointStore(tmp_path, "run"), group=dist.group.WORLD)
        for step, count in ((1, 1), (2, 1), (3, 5)):
            for parameter in parts.model.parameters():
                parts.optimizer.state[parameter]["count"] = count
            writer.begin(
                parts.state(),
                name=CheckpointName.new(step=step, attempt=1, launch=1),
                reason="test",
                fence=lambda: None,
            ).result()

    run_ranks(2, body)
    store = CheckpointStore(tmp_path, "run")
    states = [store.verify_manifest(name).state for name in reversed(store.candidates())]
    for state, count in zip(states, (1, 1, 5), strict=True):
        adam = state["optimizers"]["adam"]
        assert len(adam["state"]) == LAYERS * 6
        assert all(each["count"] == count for each in adam["state"].values())
        assert [len(group["params"]) for group in adam["groups"]] == [LAYERS * 3] * 2
        assert state["stages"] == 2
