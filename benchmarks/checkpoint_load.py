"""What a load costs, verified and not, beside ``dcp.load``: from the disk, and from the page cache.

Cold: every file is fsynced and given up with posix_fadvise(DONTNEED), which needs no root; mincore
says what stayed.  Below that a virtual disk may have a cache of its own, for all ways alike.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from unittest import mock

import numpy as np
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.checkpoint_ranks import Ranks, run_ranks
from benchmarks.checkpoint_state import Size, training_state
from benchmarks.tables import Section, paired_ratio, spread, table
from slurm_forge.checkpoint.content.index import data_file
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read import shard_reader as shardread
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.direct_io import (
    PAGE,
    bypass_cache,
    round_up,
)
from slurm_forge.checkpoint.write.save import save_checkpoint
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName

_PIECE = 16 << 20


class Way(str, Enum):
    """In the order of the table."""

    OURS = "slurm_forge, verified"
    OURS_AGAIN = "slurm_forge, verified (A/A)"
    UNVERIFIED = "slurm_forge, hashes left out"
    DCP = "dcp.load (no checksums)"
    DCP_AGAIN = "dcp.load (A/A)"
    READ = "floor: direct read of this rank's file"


@dataclass(frozen=True, slots=True)
class _Found:
    """Seconds of the slowest rank; ``cached``: the share of the files in memory before."""

    seconds: float
    cached: float


def measure_load(folder: Path, size: Size, world: int, rounds: int) -> Section:
    """Every way once cold and once warm per round, in another order each round."""
    found: list[dict[str, _Found]] = run_ranks(world, _rounds, folder, size, rounds)
    rows = [_row(way, temperature, found) for temperature in ("cold", "warm") for way in Way]
    header = ["way", "s", "/ hashes left out", "/ dcp.load", "/ direct read", "cached before"]
    return Section(
        f"Loading {size.text}, {world} ranks, {rounds} rounds",
        table(header, rows),
        {
            "size": asdict(size),
            "ranks": world,
            "rounds": [{way: asdict(one) for way, one in each.items()} for each in found],
        },
    )


def _rounds(ranks: Ranks, folder: Path, size: Size, rounds: int) -> list[dict[str, _Found]]:
    loads = _Loads(folder, training_state(size, ranks), ranks)
    order = random.Random(0)
    kinds = [(way, cold) for way in Way for cold in (True, False)]
    measured: list[dict[str, _Found]] = []
    for number in range(rounds + 1):
        order.shuffle(kinds)
        found = {_key(way, "cold" if cold else "warm"): loads.run(way, cold) for way, cold in kinds}
        if number:
            measured.append(found)
        ranks.tell(f"load, {size.text}, {ranks.size} ranks: {number} of {rounds}")
    return measured


class _Loads:
    """One rank's side: a checkpoint of ours and one of DCP's, of the same state."""

    def __init__(self, folder: Path, state: TrainingState, ranks: Ranks) -> None:
        self._state = state
        self._ranks = ranks
        self._tensors = state.capture().tensors
        self._store = CheckpointStore(folder / "ours", "benchmark")
        name = CheckpointName.new(step=1, attempt=1, launch=1)
        saved = save_checkpoint(
            self._store, state, name=name, reason="benchmark", group=ranks.group, fence=lambda: None
        )
        self._ours = saved.path
        self._dcp = folder / "dcp"
        save(
            dict(self._tensors),
            storage_writer=FileSystemWriter(self._dcp),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
        self._arena = Arena()
        self._arena.reserve(_PIECE)
        self._ranks.barrier()

    def run(self, way: Way, cold: bool) -> _Found:
        """Load once, after the files were brought to that temperature."""
        place = self._dcp if way in (Way.DCP, Way.DCP_AGAIN) else self._ours
        if self._ranks.rank == 0:
            for file in place.iterdir():
                (_give_up if cold else _read_through)(file)
        share = _cached(place) if self._ranks.rank == 0 else 0.0
        act = self._act(way)
        self._ranks.barrier()
        began = time.perf_counter()
        act()
        (slowest,) = self._ranks.slowest([time.perf_counter() - began])
        return _Found(slowest, share)

    def _act(self, way: Way) -> Callable[[], object]:
        match way:
            case Way.OURS | Way.OURS_AGAIN:
                return self._resume
            case Way.UNVERIFIED:
                return self._resume_unverified
            case Way.DCP | Way.DCP_AGAIN:
                return self._dcp_load
            case Way.READ:
                return self._read

    def _resume(self) -> None:
        loaded = resume(
            self._store, self._state, group=self._ranks.group, on_reject=lambda *_: None
        )
        if loaded is None:
            raise RuntimeError("nothing was loaded")

    def _resume_unverified(self) -> None:
        # The same path but for the hash of each block: what verification costs, nothing else.
        with mock.patch.object(shardread, "_verify", lambda *_: None):
            self._resume()

    def _dcp_load(self) -> None:
        load(
            dict(self._tensors),
            storage_reader=FileSystemReader(self._dcp),
            process_group=self._ranks.group,
            no_dist=self._ranks.group is None,
        )

    def _read(self) -> None:
        path = self._ours / data_file(self._ranks.rank)
        descriptor = os.open(path, os.O_RDONLY)
        bypass_cache(descriptor, on=True)
        memory, at, size = self._arena.memory(_PIECE), 0, path.stat().st_size
        while at < size:
            at += os.preadv(descriptor, [memory[: round_up(min(_PIECE, size - at), PAGE)]], at)
        os.close(descriptor)


def _give_up(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # pages that are not on disk yet would stay
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _read_through(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while file.readinto(buffer):
            pass


def _cached(folder: Path) -> float:
    """The share of the folder's pages that are in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = present = 0
    for path in folder.iterdir():
        if not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            view = np.frombuffer(memory, dtype=np.uint8)
            found = np.zeros(-(-len(view) // mmap.PAGESIZE), dtype=np.uint8)
            address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view))
            if libc.mincore(address, length, ctypes.c_void_p(found.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore")
            pages += len(found)
            present += int((found & 1).sum())
            del view
    return present / max(pages, 1)


def _key(way: Way, temperature: str) -> str:
    return f"{temperature}: {way.value}"


def _row(way: Way, temperature: str, rounds: list[dict[str, _Found]]) -> list[str | None]:
    def column(of: Way) -> list[float | None]:
        return [each[_key(of, temperature)].seconds for each in rounds]

    def ratio(to: Way) -> str | None:
        found = paired_ratio(column(way), column(to))
        return None if found is None else found.text()

    seconds = spread(column(way))
    cached = spread(each[_key(way, temperature)].cached for each in rounds)
    return [
        _key(way, temperature),
        None if seconds is None else seconds.text(3),
        ratio(Way.UNVERIFIED),
        ratio(Way.DCP),
        ratio(Way.READ),
        None if cached is None else f"{100 * cached.median:.0f} %",
    ]
