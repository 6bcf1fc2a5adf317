"""What saves keep in memory: the local state once, and no more after many; and their files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_ranks import Ranks, run_ranks
from benchmarks.checkpoint_state import Size, local_part, training_state
from benchmarks.checkpoint_ways import Way, Ways
from benchmarks.tables import Section, table

_WAYS = (Way.OURS, Way.OURS_AGAIN, Way.ASYNC_THREAD)
_MIB = 1 << 20


def measure_memory(folder: Path, size: Size, world: int, saves: int) -> Section:
    """So many saves of each way on fresh ranks; memory is rank 0's, which also has the index."""
    found: dict[str, Any] = {}
    for number, way in enumerate(_WAYS):
        place = folder / str(number)
        place.mkdir()
        found[way.value] = run_ranks(world, _saves, place, size, saves, way)
    header = [
        "way",
        "state MiB",
        "staging / state",
        "RSS grew MiB, save 1",
        f"save {saves}",
        "most",
        "/ state",
        "later saves, MiB",
        "files",
    ]
    return Section(
        f"Memory of {saves} saves of {size.text}, {world} ranks",
        table(header, [_row(way, found[way]) for way in found]),
        {"size": asdict(size), "ranks": world, "ways": found},
    )


def _saves(ranks: Ranks, folder: Path, size: Size, saves: int, way: Way) -> dict[str, Any]:
    state = training_state(size, ranks)
    local = sum(local_part(tensor).nbytes for tensor in state.capture().tensors.values())
    ways = Ways(folder, state, ranks)
    grown, staging, files = [], [], []
    with Path("/proc/self/statm").open() as statm:
        before = _resident(statm.read)
        for number in range(saves):
            files.append(ways.run(way).files)
            statm.seek(0)
            grown.append(_resident(statm.read) - before)
            staging.append(ways.staging(way))
            if (number + 1) % 10 == 0:
                ranks.tell(f"memory, {way.value}: {number + 1} of {saves}")
    return {"state": local, "grown": grown, "staging": staging, "files": files}


def _resident(read: Callable[[], str]) -> int:
    return int(read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _row(way: str, found: dict[str, Any]) -> list[str | None]:
    state, grown, staging = found["state"], found["grown"], found["staging"]
    files = sorted(set(found["files"]))
    return [
        way,
        f"{state / _MIB:.1f}",
        None if not staging[-1] else f"{staging[-1] / state:.3f}",
        f"{grown[0] / _MIB:.1f}",
        f"{grown[-1] / _MIB:.1f}",
        f"{max(grown) / _MIB:.1f}",
        f"{max(grown) / state:.2f}",
        f"{(grown[-1] - grown[0]) / _MIB:+.1f}",
        ", ".join(map(str, files)),
    ]
