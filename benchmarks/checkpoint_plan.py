"""What deciding a save costs beside its bytes: taking the state apart, planning, metadata.

DCP gets the tensors taken apart already, and a storage that stores nothing; it plans, and makes and
pickles its metadata, in every save.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from benchmarks.checkpoint_ranks import Ranks, run_ranks
from benchmarks.checkpoint_state import Size, training_state
from benchmarks.checkpoint_ways import Way, Ways
from benchmarks.tables import Section, paired_ratio, spread, table
from slurm_forge.checkpoint.collectives import Ranks as Exchange
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.plan import Planner
from slurm_forge.checkpoint.write.save import (
    CheckpointWriter,
    save_checkpoint,
)
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import INDEX_NAME, MANIFEST_NAME

_CAPTURE = "slurm_forge: take the state apart"
_FITS = "slurm_forge: does the plan fit"
_AGREE = "slurm_forge: one exchange of all ranks"
_UNCHANGED = "slurm_forge: all three, nothing has changed"
_UNCHANGED_AGAIN = "slurm_forge: all three, nothing has changed (A/A)"
_MANIFEST = "slurm_forge: the manifest, in the background"
_PLAN = "slurm_forge: plan and index, once"
_TAKE = "dcp: get_state_dict"
_SAVE = "dcp.save into nothing"
_SAVE_AGAIN = "dcp.save into nothing (A/A)"
_CACHED = "dcp.save into nothing, plan caching"
_ROWS = (
    _CAPTURE,
    _FITS,
    _AGREE,
    _UNCHANGED,
    _UNCHANGED_AGAIN,
    _MANIFEST,
    _PLAN,
    _TAKE,
    _SAVE,
    _SAVE_AGAIN,
    _CACHED,
)


def measure_plan(folder: Path, size: Size, world: int, rounds: int) -> Section:
    """Seconds of the slowest rank, everything once per round in another order."""
    rows: list[dict[str, float]]
    rows, sizes = run_ranks(world, _rounds, folder, size, rounds)
    lines = [_row(name, rows, sizes) for name in _ROWS]
    header = ["what", "ms", "/ slurm_forge, unchanged", "bytes"]
    return Section(
        f"Planning {size.text}, {world} ranks, {rounds} rounds",
        table(header, lines),
        {"size": asdict(size), "ranks": world, "rounds": rows, "bytes": sizes},
    )


def _rounds(
    ranks: Ranks, folder: Path, size: Size, rounds: int
) -> tuple[list[dict[str, float]], dict[str, int]]:
    side = _Side(folder, training_state(size, ranks), ranks)
    acts: dict[str, Callable[[], dict[str, float]]] = {
        _UNCHANGED: side.unchanged,
        _UNCHANGED_AGAIN: lambda: {_UNCHANGED_AGAIN: side.unchanged()[_UNCHANGED]},
        _MANIFEST: lambda: _timed(_MANIFEST, side.manifest.to_bytes),
        _PLAN: lambda: _timed(_PLAN, side.plan_anew),
        _TAKE: lambda: _timed(_TAKE, side.take_as_dcp),
        _SAVE: lambda: _timed(_SAVE, side.dcp_save),
        _SAVE_AGAIN: lambda: _timed(_SAVE_AGAIN, side.dcp_save),
        _CACHED: lambda: _timed(_CACHED, side.dcp_save_cached),
    }
    names, order = list(acts), random.Random(0)
    measured: list[dict[str, float]] = []
    for number in range(rounds + 1):
        order.shuffle(names)
        found: dict[str, float] = {}
        for name in names:
            ranks.barrier()
            mine = acts[name]()
            found.update(zip(mine, ranks.slowest(list(mine.values())), strict=True))
        if number:
            measured.append(found)
        ranks.tell(f"plan, {size.text}, {ranks.size} ranks: {number} of {rounds}")
    return measured, side.sizes


class _Side:
    """One rank's side of everything that is timed."""

    def __init__(self, folder: Path, state: TrainingState, ranks: Ranks) -> None:
        self._state = state
        self._ranks = ranks
        self._exchange = Exchange(ranks.group)
        self._tensors = dict(state.capture().tensors)
        self._ways = Ways(folder, state, ranks)
        self._ways.run(Way.OURS)  # the plan is made here
        store = CheckpointStore(folder / "kept", "benchmark")
        name = CheckpointName.new(step=1, attempt=1, launch=1)
        saved = save_checkpoint(
            store, state, name=name, reason="benchmark", group=ranks.group, fence=lambda: None
        )
        self.manifest = store.verify_manifest(saved.name)
        self.sizes = {
            _MANIFEST: (saved.path / MANIFEST_NAME).stat().st_size,
            _PLAN: (saved.path / INDEX_NAME).stat().st_size,
        }

    def unchanged(self) -> dict[str, float]:
        """What a save does before it makes room and copies: a real one, with a clock beside it."""
        found: dict[str, float] = {}
        began = 0.0

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:  # the first of them: another exchange ends the save
                    found.setdefault(name, time.perf_counter() - start)

            return wrapper

        def make_room(*args: Any, **kwargs: Any) -> Any:
            found[_UNCHANGED] = time.perf_counter() - began
            return room(*args, **kwargs)

        room = CheckpointWriter._make_room
        self._ways.open()
        with ExitStack() as stack:
            for owner, method, name in (
                (TrainingState, "capture", _CAPTURE),
                (Planner, "known", _FITS),
                (Planner, "make", _PLAN),
                (Exchange, "agree", _AGREE),
            ):
                wrapper = timed(name, getattr(owner, method))
                stack.enter_context(mock.patch.object(owner, method, wrapper))
            stack.enter_context(mock.patch.object(CheckpointWriter, "_make_room", make_room))
            began = time.perf_counter()
            self._ways.begin(Way.OURS).result()
        self._ways.close()
        if _PLAN in found:
            raise RuntimeError("a state that has not changed was planned anew")
        return found

    def plan_anew(self) -> None:
        """As the first save of a launch does, the state taken apart once more."""
        Planner().make(self._state.capture(), self._exchange)

    def take_as_dcp(self) -> None:
        """DCP's own way to come by tensors under names."""
        get_state_dict(self._state.models["model"], self._state.optimizers["optimizer"])

    def dcp_save(self) -> None:
        """Plan and metadata, every time anew."""
        self._save(DefaultSavePlanner())

    def dcp_save_cached(self) -> None:
        """Plan and metadata with what DCP keeps from save to save."""
        self._save(DefaultSavePlanner(enable_plan_caching=True))

    def _save(self, planner: SavePlanner) -> None:
        writer = _Nowhere()
        save(
            dict(self._tensors),
            storage_writer=writer,
            planner=planner,
            process_group=self._ranks.group,
            no_dist=self._ranks.group is None,
        )
        if writer.metadata_bytes:
            self.sizes[_SAVE] = writer.metadata_bytes


class _Nowhere(StorageWriter):
    """A storage that stores nothing; the metadata is pickled, as DCP's own storage does."""

    def __init__(self) -> None:
        self.metadata_bytes = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(index=item.index, size_in_bytes=0, storage_data=None)
                for item in plan.items
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: None for mine in results for result in mine}
        self.metadata_bytes = len(pickle.dumps(metadata))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _timed(name: str, act: Callable[[], object]) -> dict[str, float]:
    began = time.perf_counter()
    with torch.no_grad():
        act()
    return {name: time.perf_counter() - began}


def _row(name: str, rounds: list[dict[str, float]], sizes: dict[str, int]) -> list[str | None]:
    seconds = [each[name] for each in rounds]
    took = spread(1000 * each for each in seconds)
    ratio = paired_ratio(seconds, [each[_UNCHANGED] for each in rounds])
    return [
        name,
        None if took is None else took.text(1),
        None if ratio is None else ratio.text(),
        str(sizes[name]) if name in sizes else None,
    ]
