"""What checkpoints cost: saving, loading, what training loses, planning, memory, and checks.

    python -m benchmarks.checkpoint [--only save,load,stall,plan,memory,checks] [--ranks 1,2]
    python -m benchmarks.checkpoint --all --json FILE     # everything that is quoted

Every round runs every way once, in another order; ratios are of one round, so that what slows a
whole round down cancels out.  The A/A rows are the same thing once more: what differs there is
noise.  What is saved is removed at once; the disk holds two checkpoints at most.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables import Machine, Section, write_json

if TYPE_CHECKING:
    from benchmarks.checkpoint_state import Size

_PARTS = ("save", "load", "stall", "plan", "memory", "checks")
#: From here on a state is measured in fewer rounds.
_LARGE_GIB = 2.0
#: How many shards rank 0 is given in all for a simulated plan.
_SHARDS = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts one after another, each on fresh ranks, and print a table of each."""
    options = _parse(arguments)
    began, load = time.time(), os.getloadavg()[0]
    found: list[dict[str, Any]] = []
    for name, measure in _plan(options):
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.dir))
        try:
            section = measure(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.write(f"\n{section.title}\n\n{section.text}\n")
        sys.stdout.flush()
        found.append({"part": name, "title": section.title, **section.data})
        machine = Machine.measured(load, began)
        # After each part: what was measured is not lost with a later one.
        write_json(options.json, {"machine": asdict(machine), "parts": found})
    sys.stdout.write(f"\n{Machine.measured(load, began).text()}\n")
    return 0


def _plan(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Path], Section]]]:
    """The parts that were asked for, in the order in which they are printed."""
    from benchmarks import checkpoint_load, checkpoint_memory, checkpoint_plan, checkpoint_save
    from benchmarks.checkpoint_checks import measure_checks
    from benchmarks.checkpoint_scale import measure_scale
    from benchmarks.checkpoint_stall import measure_stall
    from benchmarks.checkpoint_state import Size
    from benchmarks.checkpoint_ways import Way

    chosen = [way for way in Way if not options.ways or way.name.lower() in options.ways]
    large = [Size(gib=gib) for gib in options.gib]
    small = Size(tensors=options.tensors)
    sizes = [*large, *([small] if options.tensors else [])]
    alone = [n for n in options.ranks if 2 * n <= len(os.sched_getaffinity(0))] or [1]

    def rounds(size: Size) -> int:
        return int(options.rounds if size.gib < _LARGE_GIB else max(2, options.rounds // 2))

    for size in sizes if "save" in options.only else []:
        for world in options.ranks:
            n = rounds(size)
            yield (
                "save",
                partial(
                    checkpoint_save.measure_save, size=size, world=world, rounds=n, chosen=chosen
                ),
            )
    for size in sizes if "load" in options.only else []:
        for world in options.ranks:
            n = rounds(size)
            yield "load", partial(checkpoint_load.measure_load, size=size, world=world, rounds=n)
    for size in large if "stall" in options.only else []:
        for world in alone:
            n = rounds(size)
            yield (
                "stall",
                partial(
                    measure_stall,
                    size=size,
                    world=world,
                    rounds=n,
                    on_accelerator=options.accelerator,
                ),
            )
    if "plan" in options.only and options.tensors:
        for world in options.ranks:
            n = options.rounds
            yield "plan", partial(checkpoint_plan.measure_plan, size=small, world=world, rounds=n)
        yield "plan", lambda _: measure_scale(options.tensors, options.shards, rounds=2)
    for size in sizes if "checks" in options.only else []:
        for world in (each for each in options.ranks if each > 1):
            n = rounds(size)
            yield "checks", partial(measure_checks, size=size, world=world, rounds=n)
    if "memory" in options.only:
        for world in options.ranks:
            yield (
                "memory",
                partial(
                    checkpoint_memory.measure_memory,
                    size=large[0],
                    world=world,
                    saves=options.saves,
                ),
            )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--all", action="store_true", help="all that is quoted: takes an hour or more"
    )
    parser.add_argument("--only", type=several(str), default=list(_PARTS), help=",".join(_PARTS))
    parser.add_argument("--gib", type=several(float), help="of model and Adam's state: 1,4")
    parser.add_argument("--tensors", type=int, default=5000, help="of the small state; 0 for none")
    parser.add_argument("--ranks", type=several(int), help="1,2,4")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--saves", type=int, help="how many, to see memory grow")
    parser.add_argument("--shards", type=int, help="of a simulated plan, at most")
    parser.add_argument("--ways", type=several(str), default=[], help="of save: ours,dcp,write,…")
    parser.add_argument("--accelerator", action="store_true", help="stall: the state is there")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="a folder on the disk")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(_PARTS)
    if unknown:
        parser.error(f"--only knows {', '.join(_PARTS)}, not {', '.join(sorted(unknown))}")
    everything = options.all
    options.gib = options.gib or ([1.0, 4.0] if everything else [1.0])
    options.ranks = options.ranks or ([1, 2, 4] if everything else [2])
    options.rounds = options.rounds or (7 if everything else 3)
    options.saves = options.saves or (200 if everything else 20)
    options.shards = options.shards or (10 * _SHARDS if everything else _SHARDS)
    return options


if __name__ == "__main__":
    sys.exit(main())
