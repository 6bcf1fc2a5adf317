"""Which ranks get different samples, and which compute one model together: the device mesh.

Without a mesh every rank is a data-parallel rank.  With one, its dimensions are interpreted by
their names, as PyTorch and torchtitan use them: those of data parallelism get different samples,
all others (tensor, context, pipeline parallelism) the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from slurm_forge.errors import UsageError
from slurm_forge.vocabulary.json_value import Json


class DimensionKind(str, Enum):
    """What ranks along a mesh dimension share."""

    #: Different samples, and averaged gradients.
    DATA = "data"
    #: The same samples and tokens, another part of each layer.
    TENSOR = "tensor"
    #: The same samples, different tokens, and averaged gradients.
    CONTEXT = "context"
    #: The same samples, different layers.
    PIPELINE = "pipeline"


_NAMES: Mapping[str, DimensionKind] = {
    **dict.fromkeys(
        (
            "dp", "ddp", "data", "data_parallel", "batch", "fsdp", "hsdp", "replicate", "shard",
            "dp_replicate", "dp_shard",
        ),
        DimensionKind.DATA,
    ),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "mp", "model"), DimensionKind.TENSOR),
    **dict.fromkeys(("cp", "context", "context_parallel", "sp", "ulysses"), DimensionKind.CONTEXT),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), DimensionKind.PIPELINE),
}  # fmt: skip
#: The ranks of an expert group have different samples in some programs, the same in others.
_EXPERT = frozenset({"ep", "expert", "expert_parallel"})
_EXAMPLE = 'init_device_mesh(…, mesh_dim_names=("dp", "tp"))'


@dataclass(frozen=True, slots=True)
class RankLayout:
    """This rank's place among the ranks with different samples, and among the others.

    ``data_rank`` counts among ``data_ranks``.  ``model_coordinates`` are the dimensions that do not
    divide the samples, by name, with this rank's place.  A group of None is this rank alone,
    or, without a mesh, all ranks.
    """

    data_rank: int
    data_ranks: int
    model_coordinates: tuple[tuple[str, int], ...] = ()
    #: Name and size of each dimension of the mesh; empty without a mesh.
    dimensions: tuple[tuple[str, int], ...] = ()
    #: The ranks over which gradients are averaged: those with different samples or tokens.
    averaging_ranks: int = 1
    averaging_group: dist.ProcessGroup | None = None
    #: This rank's pipeline stage of how many, and the ranks that hold the other stages.
    stage: int = 0
    stages: int = 1
    pipeline_group: dist.ProcessGroup | None = None
    #: Ranks with the same number draw the same random numbers when these are derived.
    random_stream: int = 0

    @classmethod
    def flat(cls, rank: int, world_size: int) -> RankLayout:
        """Without a mesh: every rank is a data-parallel rank."""
        return cls(rank, world_size, averaging_ranks=world_size, random_stream=rank)

    @classmethod
    def on_mesh(
        cls,
        dimensions: Sequence[tuple[str, int]],
        coordinate: Sequence[int],
        data_parallel: Sequence[str] | None = None,
    ) -> RankLayout:
        """The layout that follows from names, sizes and this rank's place; pure, without groups.

        Raises:
            UsageError: The purpose of a dimension is unknown.
        """
        kinds = dimension_kinds(dimensions, data_parallel)
        places = list(zip(kinds, (size for _, size in dimensions), coordinate, strict=True))

        def counted(*of: DimensionKind) -> tuple[int, int]:
            """This rank's number among the ranks along these dimensions, and how many there are."""
            number, count = 0, 1
            for kind, size, at in places:
                if kind in of:
                    number, count = number * size + at, count * size
            return number, count

        data_rank, data_ranks = counted(DimensionKind.DATA)
        stage, stages = counted(DimensionKind.PIPELINE)
        return cls(
            data_rank,
            data_ranks,
            tuple(
                (name, at)
                for (name, _), (kind, _, at) in zip(dimensions, places, strict=True)
                if kind is not DimensionKind.DATA
            ),
            dimensions=tuple((str(name), int(size)) for name, size in dimensions),
            averaging_ranks=counted(DimensionKind.DATA, DimensionKind.CONTEXT)[1],
            stage=stage,
            stages=stages,
            random_stream=counted(*_RANDOM)[0],
        )

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, data_parallel: Sequence[str] | None = None) -> RankLayout:
        """The layout of this rank on a mesh, with its groups.  Collective over all ranks.

        Raises:
            UsageError: It isn't a mesh of all ranks whose names tell their purpose.
        """
        dimensions, coordinate = mesh_facts(mesh)
        layout = cls.on_mesh(dimensions, coordinate, data_parallel)
        kinds = dimension_kinds(dimensions, data_parallel)

        sized = [
            (name, kind) for (name, size), kind in zip(dimensions, kinds, strict=True) if size > 1
        ]

        def along(*of: DimensionKind) -> dist.ProcessGroup | None:
            names = tuple(name for name, kind in sized if kind in of)
            if len(names) == len(sized) > 1:
                return dist.group.WORLD
            return _group(mesh, names)

        # On every rank in this order: creating a group is collective.
        return replace(
            layout,
            averaging_group=along(DimensionKind.DATA, DimensionKind.CONTEXT),
            pipeline_group=along(DimensionKind.PIPELINE),
        )

    @property
    def leads_stage(self) -> bool:
        """Whether it is the first of the ranks with its pipeline stage."""
        return self.data_rank == 0 and all(
            at == 0
            for name, at in self.model_coordinates
            if _NAMES.get(name) is not DimensionKind.PIPELINE
        )

    def to_json(self) -> Json:
        """For the checkpoint: on the same mesh a rank's own random state is restored.

        Empty if every rank is a data-parallel rank, as without a mesh.
        """
        if self.data_ranks == math.prod(size for _, size in self.dimensions):
            return []
        return [[name, size] for name, size in self.dimensions]

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in self.dimensions)
        return sizes or f"{self.data_ranks} data-parallel ranks"


_RANDOM = (DimensionKind.DATA, DimensionKind.CONTEXT, DimensionKind.PIPELINE)


class ActiveLayout:
    """The layout in force: flat until a mesh is given, then the mesh's."""

    def __init__(self, rank: int, world_size: int) -> None:
        #: The layout that all parts of a run use.
        self.now = RankLayout.flat(rank, world_size)
        self._given: tuple[DeviceMesh, tuple[str, ...] | None] | None = None

    def give(
        self,
        mesh: DeviceMesh | None,
        data_parallel: Sequence[str] | None,
        *,
        restored: bool = False,
    ) -> None:
        """Adopt the mesh of ``run.batches`` or ``run.restore``; None keeps the present one.

        Collective the first time.  Raises ``UsageError`` if it comes too late, or another one was
        given before.
        """
        if mesh is None:
            if data_parallel is not None:
                raise UsageError(
                    f"data_parallel={tuple(data_parallel)!r} names dimensions of a mesh, and no "
                    "mesh is given",
                    next_step="Pass the mesh as well: run.batches(…, mesh=mesh, data_parallel=…).",
                )
            return
        if isinstance(data_parallel, str):
            data_parallel = (data_parallel,)
        names = None if data_parallel is None else tuple(data_parallel)
        if self._given is not None:
            if self._given != (mesh, names):
                raise UsageError(
                    f"the run goes by {self.now}, and another mesh or data_parallel= is given",
                    next_step="Pass the same mesh and data_parallel= everywhere, or only the first "
                    "time.",
                )
            return
        if restored:
            raise UsageError(
                "the mesh is given after the checkpoint was loaded: its tensors and random states "
                "go by the mesh",
                next_step="Pass it the first time: run.restore(mesh=mesh), or run.batches(…, "
                "mesh=mesh) without a restore before it.",
            )
        self.now = RankLayout.of_mesh(mesh, names)
        self._given = mesh, names


def dimension_kinds(
    dimensions: Sequence[tuple[str, int]], data_parallel: Sequence[str] | None
) -> list[DimensionKind]:
    """The purpose of each dimension of a mesh; ``UsageError`` if it is unknown.

    ``data_parallel`` names the dimensions that divide the samples, if their names do not tell.
    """
    names = [name for name, _ in dimensions]
    unknown = [name for name in data_parallel or () if name not in names]
    if unknown:
        raise UsageError(
            f"data_parallel names {unknown[0]!r}, and the mesh has {', '.join(names)}",
            next_step="Name dimensions of the mesh.",
        )
    return [_kind(name, size, data_parallel) for name, size in dimensions]


def _kind(name: str, size: int, data_parallel: Sequence[str] | None) -> DimensionKind:
    if data_parallel is not None and name in data_parallel:
        return DimensionKind.DATA
    known = _NAMES.get(name)
    if name in _EXPERT and (data_parallel is not None or size == 1):
        return DimensionKind.TENSOR
    if name in _EXPERT:
        raise UsageError(
            f"the mesh dimension {name!r} does not tell whether the ranks of an expert group are "
            "given different samples",
            next_step=f'Add data_parallel=("dp", "{name}") where they are (the usual case), or '
            'data_parallel=("dp",) where they are given the same.',
        )
    if known is None and size == 1:
        return DimensionKind.TENSOR  # of one rank: it has no consequence
    if known is None:
        raise UsageError(
            f"the mesh dimension {name!r} does not tell what it is for",
            next_step=f'Add data_parallel=("{name}",) if its ranks are given different samples; '
            "else name it tp, cp or pp in mesh_dim_names.",
        )
    if known is DimensionKind.DATA and data_parallel is not None and size > 1:
        raise UsageError(
            f"data_parallel= does not name the mesh dimension {name!r}, which is data-parallel by "
            "its name",
            next_step=f'Write data_parallel=("{name}", …), or name it tp, cp or pp in '
            "mesh_dim_names.",
        )
    return known


def mesh_facts(mesh: DeviceMesh) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Names and sizes of the dimensions, and this rank's place.

    Raises:
        UsageError: It has no names, or not every rank of the run exactly once.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"mesh={mesh!r} is not a DeviceMesh",
            next_step=f"Make one with {_EXAMPLE} from torch.distributed.device_mesh.",
        )
    if mesh.mesh_dim_names is None:
        raise UsageError(
            f"the mesh of shape {tuple(mesh.shape)} has no names: which of its dimensions divide "
            "the samples can't be told",
            next_step=f"Name its dimensions: {_EXAMPLE}.",
        )
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    members = mesh.mesh.flatten().tolist()
    coordinate = mesh.get_coordinate()
    if sorted(members) != list(range(world_size)) or coordinate is None:
        raise UsageError(
            f"the mesh {', '.join(mesh.mesh_dim_names)} has {len(members)} of the "
            f"{world_size} ranks of the run",
            next_step='Pass the whole mesh, not a part of it such as mesh["dp"].',
        )
    if members[0] != 0:
        raise UsageError(
            f"the mesh begins with rank {members[0]}",
            next_step="Put rank 0 first: it keeps the journal of the run.",
        )
    return tuple(zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True)), tuple(coordinate)


def _group(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup | None:
    """The ranks along these dimensions; several are combined as by FSDP (``dp_shard``, ``cp``)."""
    if not names:
        return None
    if len(names) == 1:
        return mesh.get_group(names[0])
    return mesh[names]._flatten(f"forge_{'_'.join(names)}").get_group()


@dataclass(frozen=True, slots=True)
class ModelParallelParameter:
    """A parameter whose parts are on ranks with the same samples."""

    name: str
    placement: str


def model_parallel_parameters(
    models: Mapping[str, nn.Module], world_size: int
) -> list[ModelParallelParameter]:
    """Parameters whose placement is not due to data parallelism alone.

    FSDP2 shards over all ranks, or, as HSDP, replicates the shards; any other DTensor placement is
    tensor, expert or pipeline parallelism.  Facts only, not collective.
    """
    return [
        ModelParallelParameter(name, f"{list(parameter.placements)} on {_describe(mesh)}")
        for name, parameter, mesh, in_fsdp in _dtensors(models)
        if not _is_data_parallel(parameter, mesh, in_fsdp=in_fsdp, world_size=world_size)
    ]


def _dtensors(
    models: Mapping[str, nn.Module],
) -> Iterator[tuple[str, DTensor, DeviceMesh, bool]]:
    for model_name, model in models.items():
        below_fsdp = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for parameter in module.parameters()
        }
        for name, parameter in model.named_parameters():
            held: Any = parameter
            if isinstance(held, DTensor):
                yield f"{model_name}.{name}", held, held.device_mesh, id(parameter) in below_fsdp


def _is_data_parallel(
    parameter: DTensor, mesh: DeviceMesh, *, in_fsdp: bool, world_size: int
) -> bool:
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    names = [name for name, size in sizes if size > 1]
    if any(_NAMES.get(name, DimensionKind.DATA) is not DimensionKind.DATA for name in names):
        return False
    if _EXPERT & set(names) or mesh.size() < world_size:
        return False
    if all(placement.is_replicate() for placement in parameter.placements):
        return True
    # FSDP2 shards along one dimension, the last one: before it HSDP replicates.
    *before, _ = parameter.placements
    return in_fsdp and all(placement.is_replicate() for placement in before)


def _describe(mesh: DeviceMesh) -> str:
    shape = " x ".join(map(str, mesh.shape))
    return f"a mesh of {shape} ranks ({', '.join(mesh.mesh_dim_names or ('no names',))})"


def refuse_without_mesh(models: Mapping[str, nn.Module], world_size: int) -> None:
    """Refuse to treat ranks that compute one model together as data-parallel ones.

    Raises:
        UsageError: Names the first parameter, and the line to write.
    """
    found = model_parallel_parameters(models, world_size) if world_size > 1 else []
    if found:
        first, more = found[0], len(found) - 1
        others = f" (and {more} more parameters)" if more else ""
        raise UsageError(
            f"{first.name} is laid out as {first.placement}{others}: some ranks compute one model "
            "together, and without the mesh each would be given other samples",
            next_step="Pass the whole mesh: run.batches(…, mesh=mesh), or run.restore(mesh=mesh) "
            "in a loop of your own.",
        )


__all__ = [
    "ActiveLayout",
    "DimensionKind",
    "ModelParallelParameter",
    "RankLayout",
    "dimension_kinds",
    "mesh_facts",
    "model_parallel_parameters",
    "refuse_without_mesh",
]
