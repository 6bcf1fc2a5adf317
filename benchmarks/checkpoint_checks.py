"""What the comparison of ranks costs: beside the save that it is a part of, and per step of 250 ms.

Every rank holds a copy of the whole state, as under DDP: all of it is compared.  A digest is timed
by itself, often, because it is too short to be seen in the time of a save.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks.checkpoint_ranks import Ranks, run_ranks
from benchmarks.checkpoint_state import Size, training_state
from benchmarks.checkpoint_ways import Way, Ways
from benchmarks.tables import Section, cell, paired_ratio, plain, spread, table
from slurm_forge.recovery.policy.save_interval import ASSUMED, best_interval

_STEP_S = 0.25
_TIMES = 20


@dataclass(frozen=True, slots=True)
class _Found:
    """Seconds of the slowest rank, and the share of the state that one digest covers.

    On the host a digest is one thread's: its time of a core is nearly untouched by others' load.
    """

    digest_s: float
    digest_cpu_s: float
    blocked_s: float
    durable_s: float
    covered: float

    @property
    def amortised(self) -> float:
        """Of a step of 250 ms, at the interval that a run chooses where nothing is set."""
        interval = best_interval(
            blocked=timedelta(seconds=self.blocked_s),
            durable=timedelta(seconds=self.durable_s),
            between=ASSUMED,
        )
        return self.digest_s / interval.total_seconds()


def measure_checks(folder: Path, size: Size, world: int, rounds: int) -> Section:
    """Each round: a save, and a digest of the same state many times."""
    found: list[_Found] = run_ranks(world, _rounds, folder, size, rounds)
    of_save = paired_ratio([one.digest_s for one in found], [one.durable_s for one in found])
    row: list[str | None] = [
        size.text,
        *(
            cell(values, digits)
            for values, digits in (
                (spread(1e3 * one.digest_s for one in found), 2),
                (spread(1e3 * one.digest_cpu_s for one in found), 2),
                (spread(one.blocked_s for one in found), 3),
                (spread(one.durable_s for one in found), 3),
                (of_save, 4),
                (spread(one.amortised for one in found), 7),
            )
        ),
        f"{found[-1].covered:.3f}",
    ]
    header = [
        "state",
        "digest ms",
        "its cpu ms",
        "held up s",
        "on disk s",
        "/ save",
        "of a step",
        "covered",
    ]
    return Section(
        f"Comparing the copies of {size.text} on {world} ranks, {rounds} rounds",
        table(header, [row]),
        {
            "size": asdict(size),
            "ranks": world,
            "rounds": [{**asdict(one), "amortised": one.amortised} for one in found],
            "of_save": plain(of_save),
            "step_s": _STEP_S,
        },
    )


def _rounds(ranks: Ranks, folder: Path, size: Size, rounds: int) -> list[_Found]:
    torch.manual_seed(0)
    state = training_state(size, dataclasses.replace(ranks, rank=0, size=1))
    state = dataclasses.replace(state, rng={})
    ways = Ways(folder, state, ranks)
    for _ in range(2):  # memory that is touched for the first time, and the plan
        ways.run(Way.OURS)
    captured, writer = state.capture(), ways.writer
    measured: list[_Found] = []
    for number in range(rounds):
        timing = ways.run(Way.OURS)
        seconds, of_cpu, covered = [], [], 0.0
        for _ in range(_TIMES):
            began, cpu = time.perf_counter(), time.thread_time()
            digest = writer._replicas.take(captured, writer._planner.plan, turn=number)
            digest.report()
            seconds.append(time.perf_counter() - began)
            of_cpu.append(time.thread_time() - cpu)
            covered = digest.covered
        middle = statistics.median(seconds), statistics.median(of_cpu)
        values = [*middle, timing.blocked_s, timing.durable_s, covered]
        measured.append(_Found(*ranks.slowest(values)))
        ranks.tell(f"checks, {size.text}, {ranks.size} ranks: {number + 1} of {rounds}")
    return measured
