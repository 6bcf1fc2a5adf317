"""What the guard costs per step: on against off, beside what others do.

    python -m benchmarks.guard [--only one,two,gpt] [--seconds 60] [--accelerator] [--json FILE]

A loop is trained in short turns, every way once per round and in another order each time; what is
quoted is the median over the rounds of the difference to *guard off* in the same round.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_ranks import Ranks, run_ranks
from benchmarks.guard_loops import LOOPS, Loop, Way, steps_of
from benchmarks.tables import Change, Machine, Section, table, write_json
from slurm_forge.device.accelerator import synchronize

#: Rounds that warm up: the optimizer's state, DDP's buckets.
_WARM = 3
_LEAST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class _Turn:
    """Milliseconds per step, by all ranks together: of the clock, and of processors per rank."""

    wall: float
    cpu: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every loop on fresh ranks, and print a table of each."""
    options = _parse(arguments)
    began, load = time.time(), os.getloadavg()[0]
    found: list[dict[str, Any]] = []
    for name in options.only:
        for loop in LOOPS[name]:
            section = measure(loop, options.seconds, options.accelerator)
            sys.stdout.write(f"\n{section.title}\n\n{section.text}\n")
            sys.stdout.flush()
            found.append({"part": name, "title": section.title, **section.data})
            machine = Machine.measured(load, began)
            write_json(options.json, {"machine": asdict(machine), "parts": found})
    sys.stdout.write(f"\n{Machine.measured(load, began).text()}\n")
    return 0


def measure(loop: Loop, seconds: float, on_accelerator: bool = False) -> Section:
    """One loop for about so long."""
    rounds: list[dict[Way, _Turn]] = run_ranks(
        loop.ranks, _rounds, loop, seconds, threads=1, on_accelerator=on_accelerator
    )
    header = ["", "wall ms", "cpu ms", "cpu µs more", "cpu % more", "wall % more"]
    return Section(
        f"{loop.text}: {len(rounds)} rounds of {loop.steps} steps each way",
        table(header, [_row(way, rounds) for way in loop.ways]) + "\n" + _goals(loop, rounds),
        {
            "loop": asdict(loop),
            "rounds": [{way.value: asdict(turn) for way, turn in each.items()} for each in rounds],
        },
    )


def _rounds(ranks: Ranks, loop: Loop, seconds: float) -> list[dict[Way, _Turn]]:
    steps = steps_of(loop, ranks.device)
    order = random.Random(0)  # the same on every rank
    found: list[dict[Way, _Turn]] = []
    began, number, enough = time.monotonic(), 0, False
    while not enough:
        ways = list(steps)
        order.shuffle(ways)
        taken = {}
        for way in ways:
            step = steps[way]
            synchronize(ranks.device)
            ranks.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(loop.steps):
                step()
            synchronize(ranks.device)
            taken[way] = (time.perf_counter() - wall, time.process_time() - cpu)
        turns = _of_all(ranks, loop, taken)
        if number >= _WARM:
            found.append(turns)
        else:
            gc.collect()
            gc.freeze()
        number += 1
        late = time.monotonic() - began > seconds * loop.patience and len(found) >= _LEAST_ROUNDS
        enough = ranks.slowest([float(late)])[0] > 0
    ranks.tell(f"{loop.text}: {len(found)} rounds")
    return found


def _of_all(ranks: Ranks, loop: Loop, mine: dict[Way, tuple[float, float]]) -> dict[Way, _Turn]:
    """The slowest rank's clock, and the mean of the processors."""
    ways = list(Way)
    known = [way for way in ways if way in mine]
    wall = ranks.slowest([mine[way][0] for way in known])
    cpu = _mean(ranks, [mine[way][1] for way in known])
    scale = 1000 / loop.steps
    return {way: _Turn(w * scale, c * scale) for way, w, c in zip(known, wall, cpu, strict=True)}


def _mean(ranks: Ranks, values: list[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    if ranks.group is not None:
        dist.all_reduce(found, group=ranks.group)
    return list((found / ranks.size).tolist())


def _cpu(way: Way, rounds: Sequence[dict[Way, _Turn]], beside: Way = Way.OFF) -> list[float]:
    """Microseconds more per step, round by round."""
    return [1000 * (each[way].cpu - each[beside].cpu) for each in rounds]


def _row(way: Way, rounds: Sequence[dict[Way, _Turn]]) -> list[str | None]:
    mine, off = [each[way] for each in rounds], [each[Way.OFF] for each in rounds]
    pairs = list(zip(mine, off, strict=True))
    share = Change.of([100 * (one.cpu / other.cpu - 1) for one, other in pairs])
    wall = Change.of([100 * (one.wall / other.wall - 1) for one, other in pairs])
    is_off = way is Way.OFF
    return [
        way.value,
        f"{statistics.median(one.wall for one in mine):.3f}",
        f"{statistics.median(one.cpu for one in mine):.3f}",
        None if is_off else Change.of(_cpu(way, rounds)).text(1),
        None if is_off else share.text(2),
        None if is_off else wall.text(2),
    ]


def _goals(loop: Loop, rounds: Sequence[dict[Way, _Turn]]) -> str:
    """Whether the guard costs little enough, and what judging costs by itself."""
    if not loop.clips:
        return "no goal: the norm is computed for the guard alone"
    off = statistics.median(1000 * each[Way.OFF].cpu for each in rounds)
    ours = _cpu(Way.ON, rounds)
    more = Change.of(ours)
    lines = []
    if loop.goal is not None:
        least = loop.goal / 100 * off
        lines.append(
            f"goal: guard on costs at most {loop.goal:.0f} % cpu: {100 * more.median / off:+.2f} %"
            f", {_met(Change.of([least - one for one in ours]))}"
        )
    for way in (Way.FLAG, Way.EACH):
        theirs = _cpu(way, rounds)
        left = Change.of([naive - 10 * one for naive, one in zip(theirs, ours, strict=True)])
        lines.append(
            f"goal: at most a tenth of '{way.value}': {more.median:+.0f} µs beside "
            f"{statistics.median(theirs):+.0f}, {_met(left)}"
        )
    alone = Change.of(_cpu(Way.ON, rounds, beside=Way.UNJUDGED))
    share = 100 * alone.median / off
    lines.append(f"judging by itself (on less not judged): {alone.text(1)} µs, {share:+.1f} %")
    return "\n".join(lines)


def _met(to_spare: Change) -> str:
    """By what is left to the goal, round by round."""
    if to_spare.low >= 0:
        return "met"
    return "missed" if to_spare.high < 0 else "lost in the noise"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(LOOPS))
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each loop; four times as long for the GPT"
    )
    parser.add_argument("--accelerator", action="store_true", help="train there, not on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(LOOPS)
    if unknown:
        parser.error(f"--only knows {', '.join(LOOPS)}, not {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
