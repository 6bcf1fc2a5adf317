"""How planning grows from 4 to 4,096 ranks: the planner's own functions, the ranks simulated.

Rank 0 merges what all ranks hold.  Here it gets lists as every rank of an FSDP2 training would send
them (each tensor cut into as many shards as there are ranks) or of a DDP training (every rank holds
everything).  Python objects of twenty million shards would not fit into memory, so there are fewer
tensors where there are more ranks; the figures per shard say whether it stays linear.  Beside it
rank 0's part of DCP's planning of the same shards, which DCP does in every save: its planner, and
the pickles that come in and go out.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from benchmarks.tables import Section, paired_ratio, spread, table
from slurm_forge.checkpoint.content.shard_layout import (
    Shard,
    lay_out,
)
from slurm_forge.checkpoint.write.plan import (
    choose,
    index_of,
)
from slurm_forge.checkpoint.write.planner import ForgeSavePlanner

_WORLDS = (4, 16, 64, 256, 1024, 4096)
_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class _Case:
    """So many ranks; ``alike``: each of them holds every tensor, else one row of it."""

    world: int
    tensors: int
    alike: bool

    @property
    def shards(self) -> int:
        """That all ranks together tell rank 0 of."""
        return self.world * self.tensors


@dataclass(frozen=True, slots=True)
class _Found:
    """Seconds and bytes on rank 0; ``again_s`` is the plan once more."""

    plan_s: float
    again_s: float
    dcp_s: float
    unchanged_s: float
    sent: int
    answer: int
    index: int
    written: int
    unchanged: int


def measure_scale(tensors: int, shards: int, rounds: int) -> Section:
    """Plan for each number of ranks, with ``tensors`` or as many as make up ``shards`` shards."""
    cases = [
        _Case(world, max(1, min(tensors, shards // world)), alike)
        for alike in (False, True)
        for world in _WORLDS
    ]
    found: dict[_Case, list[_Found]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            found[case].append(_measure(case))
        sys.stderr.write(f"planning for simulated ranks: {number + 1} of {rounds}\n")
    header = [
        "ranks",
        "tensors",
        "shards",
        "plan, once s",
        "A/A",
        "us per shard",
        "dcp, each save s",
        "unchanged ms",
        "sent MB",
        "unchanged kB",
        "index MB",
        "bytes per shard",
    ]
    return Section(
        f"Planning for simulated ranks, on rank 0, {rounds} rounds",
        table(header, [_row(case, found[case]) for case in cases]),
        {
            "cases": [
                {**asdict(case), "rounds": [asdict(one) for one in found[case]]} for case in cases
            ]
        },
    )


def _measure(case: _Case) -> _Found:
    reports = [json.dumps([astuple(shard) for shard in _held(case, r)]) for r in range(case.world)]
    plan_s, answer, index, written = _plan(case, reports)
    again_s, *_ = _plan(case, reports)
    again = [json.dumps(_unchanged()) for _ in range(case.world)]
    gc.collect()
    began = time.perf_counter()
    told = [json.loads(report) for report in again]
    if not all(each == told[0] for each in told):
        raise AssertionError("they are equal")
    return _Found(
        plan_s=plan_s,
        again_s=again_s,
        unchanged_s=time.perf_counter() - began,
        dcp_s=_plan_as_dcp(case),
        sent=sum(map(len, reports)),
        answer=answer,
        index=index,
        written=written,
        unchanged=sum(map(len, again)),
    )


def _plan(case: _Case, reports: list[str]) -> tuple[float, int, int, int]:
    """Seconds, and bytes of the answer and of the index, and shards that are written."""
    keys = [_key(number) for number in range(case.tensors)] if case.alike else []
    gc.collect()
    began = time.perf_counter()
    everybody = [[_shard(row) for row in json.loads(report)] for report in reports]
    chosen = choose(ForgeSavePlanner(keys), everybody)
    index = index_of(everybody, chosen).to_bytes()
    answer = json.dumps(chosen)
    lay_out([everybody[0][number] for number in chosen[0]])
    return time.perf_counter() - began, len(answer), len(index), sum(map(len, chosen))


def _plan_as_dcp(case: _Case) -> float:
    sent = [pickle.dumps(SavePlan([_item(s) for s in _held(case, r)])) for r in range(case.world)]
    gc.collect()
    began = time.perf_counter()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    plans, metadata = planner.create_global_plan([pickle.loads(report) for report in sent])
    for plan in plans:
        pickle.dumps(plan)
    pickle.dumps(metadata)
    return time.perf_counter() - began


def _held(case: _Case, rank: int) -> list[Shard]:
    """What a rank has to tell when it plans."""
    return [
        Shard(
            key=_key(number),
            dtype="float32",
            itemsize=4,
            shape=(1 if case.alike else case.world, _COLUMNS),
            offsets=(0 if case.alike else rank, 0),
            sizes=(1, _COLUMNS),
        )
        for number in range(case.tensors)
    ]


def _key(number: int) -> str:
    return f"optimizers/optimizer/state/model/layers.{number // 12}.part.{number % 12}/exp_avg"


def _shard(row: list[Any]) -> Shard:
    key, dtype, itemsize, shape, offsets, sizes = row
    return Shard(key, dtype, itemsize, tuple(shape), tuple(offsets), tuple(sizes))


def _item(shard: Shard) -> WriteItem:
    offsets = torch.Size(shard.offsets)
    return WriteItem(
        index=MetadataIndex(shard.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shard.sizes)),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(shard.shape),
        ),
    )


def _unchanged() -> dict[str, Any]:
    """What a rank sends when its plan still fits: as long whatever it holds."""
    digest = "0123456789abcdef" * 4
    parts = dict.fromkeys(("extra", "models/model", "optimizers/optimizer"), digest)
    return {"step": 1, "name": "n" * 36, "shape": digest, "parts": parts, "plan": 1}


def _row(case: _Case, found: list[_Found]) -> list[str | None]:
    def text(values: list[float], digits: int) -> str | None:
        of = spread(values)
        return None if of is None else of.text(digits)

    same = paired_ratio([one.again_s for one in found], [one.plan_s for one in found])
    first = found[0]
    return [
        f"{case.world}, {'every rank holds all' if case.alike else 'sharded'}",
        str(case.tensors),
        str(case.shards),
        text([one.plan_s for one in found], 2),
        None if same is None else same.text(),
        text([1e6 * one.plan_s / case.shards for one in found], 1),
        text([one.dcp_s for one in found], 2),
        text([1000 * one.unchanged_s for one in found], 1),
        f"{first.sent / 1e6:.1f}",
        f"{first.unchanged / 1e3:.0f}",
        f"{first.index / 1e6:.2f}",
        f"{first.index / first.written:.0f}",
    ]
