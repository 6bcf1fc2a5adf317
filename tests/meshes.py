"""Training functions on device meshes, and what one rank alone makes of the same samples.

All arithmetic is in float64, so that what another order of summation changes is far below what a
wrong weight, norm or sample changes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from tests.fsdp import fully_shard

BATCH, STEPS, WIDTH, TOKENS, CLASSES, LAYERS, EXPERTS = 8, 12, 8, 4, 5, 4, 4
#: Small enough that most steps are clipped: a wrong norm changes every weight.
MAX_NORM = 0.05


@dataclass(frozen=True)
class Mesh:
    """A way to lay a model out over ranks: its dimensions, and what they are for."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    data_parallel: tuple[str, ...] | None = None
    #: What becomes of a model; see ``laid_out``.
    kind: str = "plain"

    @property
    def ranks(self) -> int:
        return torch.Size(self.shape).numel()

    def make(self, device: str = "cpu") -> DeviceMesh:
        return init_device_mesh(device, self.shape, mesh_dim_names=self.names)


MESHES = {
    "tp": Mesh((2,), ("tp",), kind="tp"),
    "tp-sp": Mesh((2,), ("tp",), kind="tp-sp"),
    "fsdp-tp": Mesh((2, 2), ("dp_shard", "tp"), kind="fsdp-tp"),
    "fsdp": Mesh((2,), ("dp_shard",), kind="fsdp"),
    "hsdp": Mesh((2, 2), ("dp_replicate", "dp_shard"), kind="fsdp"),
    "hsdp-tp": Mesh((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), kind="hsdp-tp"),
    "cp": Mesh((2, 2), ("dp_shard", "cp"), kind="cp"),
    "ep": Mesh((2, 2), ("dp", "ep"), data_parallel=("dp", "ep"), kind="ep"),
    "pp": Mesh((2,), ("pp",), kind="pp"),
    "pp-local": Mesh((2,), ("pp",), kind="pp-local"),
    "pp-virtual": Mesh((2,), ("pp",), kind="pp-virtual"),
    "dp-pp": Mesh((2, 2), ("pp", "dp"), kind="pp-fsdp"),
    "pp-ddp": Mesh((2, 2), ("pp", "dp"), kind="pp-ddp"),
    "dp-pp-tp": Mesh((2, 2, 2), ("pp", "dp", "tp"), kind="pp-fsdp-tp"),
}


class Sequences(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Tokens with features and labels; some labels are left out of the loss."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        features = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (TOKENS,), generator=draw)
        labels[torch.arange(TOKENS) > 1 + index % 3] = -100
        return features, labels


class Block(nn.Module):
    """A feed-forward layer around which a residual goes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout
        # Meant to be infinite, as the mask of an attention is: no reason to doubt a state.
        self.register_buffer("mask", torch.full((2,), float("-inf")))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + F.dropout(inner, self.dropout, self.training)


class Experts(nn.Module):
    """A mixture of experts, each of which sees every token: the weights are the router's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        #: The ranks that have the other experts.
        self.group: dist.ProcessGroup | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.router(hidden), -1)
        if self.group is None:
            outputs = torch.tanh(torch.einsum("btw,ewv->btev", hidden, self.experts))
            return hidden + (outputs * weights.unsqueeze(-1)).sum(2)
        everybody = funcol.all_gather_tensor_autograd(hidden, 0, self.group)
        shares = funcol.all_gather_tensor_autograd(weights, 0, self.group)
        held: Any = self.experts
        own = held.to_local()
        first = dist.get_rank(self.group) * len(own)
        outputs = torch.tanh(torch.einsum("btw,ewv->btev", everybody, own))
        parts = (outputs * shares[..., first : first + len(own)].unsqueeze(-1)).sum(2)
        return hidden + funcol.reduce_scatter_tensor_autograd(parts, "sum", 0, self.group)


class Net(nn.Module):
    """Layers by number, of which a pipeline stage keeps its own under the same names."""

    def __init__(self, *, dropout: float = 0.0, experts: bool = False) -> None:
        super().__init__()
        self.first: nn.Module | None = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({str(n): Block(dropout) for n in range(LAYERS)})
        self.experts = Experts() if experts else None
        self.last: nn.Module | None = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            hidden = self.first(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.experts is not None:
            hidden = self.experts(hidden)
        return hidden if self.last is None else self.last(hidden)


def whole(run: forge.Run) -> Net:
    """The model before it is laid out; the same on every rank."""
    torch.manual_seed(7)
    net = Net(dropout=run.args.get("dropout", 0.0), experts=run.args.get("experts", False))
    return net.double().to(run.device)


def stage_of(model: Net, stage: int, stages: int) -> Net:
    """What a pipeline stage keeps of it."""
    per_stage = LAYERS // stages
    kept = range(stage * per_stage, (stage + 1) * per_stage)
    for name in list(model.layers):
        if int(name) not in kept:
            del model.layers[name]
    if stage > 0:
        model.first = None
    if stage < stages - 1:
        model.last = None
    return model


def tensor_parallel(model: Net, mesh: DeviceMesh) -> Net:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, plan)
    return model


def sequence_parallel(model: Net, mesh: DeviceMesh) -> Net:
    """Tensor parallel, with the tokens divided between the layers."""
    tokens = Shard(1)
    inside = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    for layer in model.layers.values():
        parallelize_module(layer, mesh, inside)
    around = {
        "first": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=tokens),
        "last": PrepareModuleInput(
            input_layouts=tokens, desired_input_layouts=Replicate(), use_local_output=True
        ),
    }
    return parallelize_module(model, mesh, around)


def sharded(model: Net, mesh: DeviceMesh) -> Net:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def laid_out(model: Net, kind: str, mesh: DeviceMesh) -> nn.Module:
    """The model over the ranks of a mesh."""
    if kind == "tp":
        return tensor_parallel(model, mesh["tp"])
    if kind == "tp-sp":
        return sequence_parallel(model, mesh["tp"])
    if kind == "hsdp-tp":
        return sharded(tensor_parallel(model, mesh["tp"]), mesh["dp_replicate", "dp_shard"])
    if kind == "fsdp-tp":
        return sharded(tensor_parallel(model, mesh["tp"]), mesh["dp_shard"])
    if kind == "fsdp":
        return sharded(model, mesh)
    if kind == "cp":
        return sharded(model, mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    if kind == "ep" and model.experts is not None:
        experts = model.experts
        whole_experts = experts.experts.detach()
        experts.experts = nn.Parameter(distribute_tensor(whole_experts, mesh["ep"], [Shard(0)]))
        experts.group = mesh["ep"].get_group()
        return model
    raise ValueError(kind)


def program(name: str, steps: int = STEPS, **how: Any) -> Callable[[forge.Run], None]:
    """The training function of a mesh in ``MESHES``; one rank alone does the same without."""
    mesh = MESHES[name]
    return piped(mesh, steps, **how) if mesh.kind.startswith("pp") else direct(mesh, steps, **how)


#: Called before each step; a test stops, holds or kills ranks there.
Before = Callable[[forge.Run], None]


def nothing(run: forge.Run) -> None:
    """Before a step of a run that is not disturbed."""


def direct(mesh: Mesh, steps: int, before: Before = nothing) -> Callable[[forge.Run], None]:
    """``run.train_step`` on a mesh whose ranks all compute the loss."""

    def train(run: forge.Run) -> None:
        device_mesh = mesh.make(run.device.type) if run.world_size > 1 else None
        model: nn.Module = whole(run)
        if device_mesh is not None:
            model = laid_out(whole(run), mesh.kind, device_mesh)
        optimizer = adamw(run, model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        if device_mesh is not None and mesh.kind == "ep":
            _average_by_hand(model, device_mesh)

        def logits_and_labels(micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
            features, labels = micro
            if device_mesh is not None and mesh.kind == "cp":
                at, count = device_mesh.get_local_rank("cp"), device_mesh["cp"].size()
                features, labels = features.chunk(count, 1)[at], labels.chunk(count, 1)[at]
            return model(features).flatten(0, 1), labels.flatten()

        def counted_loss(micro: Any) -> forge.Loss:
            logits, labels = logits_and_labels(micro)
            total = F.cross_entropy(logits, labels, reduction="sum")
            return forge.Loss(total, (labels != -100).sum())

        def mean_loss(micro: Any) -> torch.Tensor:
            logits, labels = logits_and_labels(micro)
            return F.cross_entropy(logits, labels.clamp(min=0))

        loss = counted_loss if run.args.get("counted") else mean_loss
        for batch in run.batches(
            Sequences(),
            global_batch_size=BATCH,
            micro_batch_size=None if mesh.kind == "ep" else 2,
            until=forge.Steps(steps),
            mesh=device_mesh,
            data_parallel=mesh.data_parallel if device_mesh is not None else None,
        ):
            before(run)
            note(run, batch)
            run.train_step(batch, loss, max_norm=MAX_NORM)
        keep(run, model)

    return train


def piped(mesh: Mesh, steps: int, before: Before = nothing) -> Callable[[forge.Run], None]:
    """A pipeline schedule in a loop of its own; one rank alone computes the same loss."""

    def train(run: forge.Run) -> None:
        device_mesh = mesh.make(run.device.type) if run.world_size > 1 else None
        parts: list[nn.Module] = [whole(run)]
        schedule: Any = None
        first = last = True
        if device_mesh is not None:
            place, places = device_mesh.get_local_rank("pp"), device_mesh["pp"].size()
            first, last = place == 0, place == places - 1
            virtual = 2 if "virtual" in mesh.kind else 1
            numbers = [place + places * turn for turn in range(virtual)]
            parts = [part_of(run, mesh, device_mesh, n, places * virtual) for n in numbers]
            stages = [
                PipelineStage(
                    part, n, places * virtual, run.device, group=device_mesh.get_group("pp")
                )
                for part, n in zip(parts, numbers, strict=True)
            ]
            if virtual > 1:
                schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=mean_over_tokens)
            else:
                schedule = Schedule1F1B(stages[0], 2, loss_fn=mean_over_tokens)
        parameters = [parameter for part in parts for parameter in part.parameters()]
        registered = parts if len(parts) > 1 else parts[0]
        optimizer = adamw(run, parameters)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        run.register(model=registered, optimizer=optimizer, scheduler=scheduler)
        always_bad = set(run.args.get("bad_steps", ()))
        bad = set(run.args.get("bad_once", ()))
        run.restore(mesh=device_mesh)
        for batch in run.batches(Sequences(), global_batch_size=BATCH, until=forge.Steps(steps)):
            before(run)
            note(run, batch)
            ((features, labels),) = batch.micro_batches
            if run.step_number in always_bad | bad:
                bad.discard(run.step_number)  # after a rollback it is fine
                features.mul_(float("nan"))
            with run.step(batch) as step:
                if schedule is None:
                    for micro in step.micro_batches():
                        step.backward(mean_over_tokens(parts[0](micro[0]), micro[1]))
                else:
                    inputs, targets = (features,) if first else (), {"target": labels}
                    schedule.step(*inputs, **(targets if last else {}))
                step.apply(optimizer, max_norm=MAX_NORM)
        keep(run, *parts)

    return train


def adamw(run: forge.Run, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """On a device the one that leaves a bad step out by itself, where torch has it for all."""
    parameters = list(parameters)
    kinds = {each.device_mesh if isinstance(each, DTensor) else None for each in parameters}
    fused = run.device.type != "cpu" and len(kinds) == 1
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False, fused=fused)


def part_of(
    run: forge.Run, mesh: Mesh, device_mesh: DeviceMesh, stage: int, stages: int
) -> nn.Module:
    """One stage of the model, laid out over the ranks that have it."""
    part = stage_of(whole(run), stage, stages)
    if "tp" in mesh.kind:
        tensor_parallel(part, device_mesh["tp"])
    if "fsdp" in mesh.kind:
        sharded(part, device_mesh["dp"])
    if "ddp" in mesh.kind:
        return DistributedDataParallel(part, process_group=device_mesh.get_group("dp"))
    return numbered_from_zero(part) if "local" in mesh.kind else part


def numbered_from_zero(stage: Net) -> nn.Module:
    """A stage as people write it by hand: its names are those of other stages, too."""
    parts = [stage.first, *stage.layers.values(), stage.last]
    return nn.Sequential(*(part for part in parts if part is not None))


def mean_over_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())


def _average_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """What FSDP2 does for the gradients of a model with experts, written out.

    Every rank has its own samples: dense gradients are averaged over all ranks.  An expert's
    gradient is the sum over the samples of its group already.
    """
    ranks, in_group = mesh.size(), mesh["ep"].size()

    def average(parameter: torch.Tensor) -> None:
        grad: Any = parameter.grad
        if isinstance(grad, DTensor):
            dist.all_reduce(grad.to_local(), group=mesh.get_group("dp"))
            grad.to_local().div_(mesh["dp"].size() * in_group)
        else:
            dist.all_reduce(grad)
            grad.div_(ranks)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def note(run: forge.Run, batch: Any) -> None:
    """Write down which samples this rank has in which step."""
    with (run.directory / f"samples-{run.rank}").open("a") as file:
        file.write(f"{run.step_number} {[index for _, index in batch.sample_ids]}\n")


def keep(run: forge.Run, *models: nn.Module) -> None:
    """Write down the final weights, whole, as far as this rank has them."""
    weights = {}
    named = [pair for model in models for pair in model.named_parameters()]
    for name, parameter in named:
        held: Any = parameter
        weights[name.removeprefix("module.")] = (
            held.full_tensor() if isinstance(held, DTensor) else held
        ).detach()
    torch.save(weights, run.directory / f"weights-{run.rank}.pt")


def killed_at(step: int, rank: int) -> Before:
    """One rank is gone before this step of the first start."""

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == step and run.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return before
