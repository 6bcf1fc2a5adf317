"""What a save costs: how long it holds up training, and until it is on disk, way by way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.checkpoint_ranks import Ranks, run_ranks
from benchmarks.checkpoint_state import Size, training_state
from benchmarks.checkpoint_ways import Timing, Way, Ways
from benchmarks.tables import Section, paired_ratio, spread, table


def measure_save(
    folder: Path, size: Size, world: int, rounds: int, chosen: Sequence[Way] = ()
) -> Section:
    """Every way once per round, each round in another order; ratios are of one round."""
    ways = list(chosen or Way)
    found: list[dict[str, Timing]] = run_ranks(world, _rounds, folder, size, rounds, ways)
    rows = [_row(way, found) for way in ways]
    header = ["way", "held up s", "/ copy", "on disk s", "/ direct write", "/ ours", "files"]
    return Section(
        f"Saving {size.text}, {world} ranks, {rounds} rounds",
        table(header, rows),
        {
            "size": asdict(size),
            "ranks": world,
            "rounds": [{way: asdict(timing) for way, timing in each.items()} for each in found],
        },
    )


def _rounds(
    ranks: Ranks, folder: Path, size: Size, rounds: int, chosen: list[Way]
) -> list[dict[str, Timing]]:
    ways = Ways(folder, training_state(size, ranks), ranks)
    order, shuffled = random.Random(0), list(chosen)
    measured: list[dict[str, Timing]] = []
    for number in range(rounds + 1):
        order.shuffle(shuffled)
        found: dict[str, Timing] = {}
        for way in shuffled:
            timing = ways.run(way)
            blocked, durable = ranks.slowest([timing.blocked_s, timing.durable_s])
            found[way.value] = Timing(blocked, durable, timing.files)
        if number:  # the first touches memory that was never touched
            measured.append(found)
        ranks.tell(f"save, {size.text}, {ranks.size} ranks: {number} of {rounds}")
    return measured


def _row(way: Way, rounds: list[dict[str, Timing]]) -> list[str | None]:
    def blocked(of: Way) -> list[float | None]:
        return [each[of.value].blocked_s if of.value in each else None for each in rounds]

    def durable(of: Way) -> list[float | None]:
        return [each[of.value].durable_s if of.value in each else None for each in rounds]

    def ratio(mine: list[float | None], to: list[float | None]) -> str | None:
        found = paired_ratio(mine, to)
        return None if found is None else found.text()

    copies = way in (Way.COPY, Way.COPY_AGAIN)
    held, disk = spread(blocked(way)), spread(durable(way))
    return [
        way.value,
        None if held is None else held.text(3),
        ratio(blocked(way), blocked(Way.COPY)),
        None if disk is None or copies else disk.text(3),
        None if copies else ratio(durable(way), durable(Way.WRITE)),
        None if copies else ratio(durable(way), durable(Way.OURS)),
        None if copies else str(rounds[0][way.value].files),
    ]
