"""What training loses to a save in the background: the time by which all steps together are late.

How long the call holds up training is a part of it; the rest is what threads take from the steps
after it (the interpreter's lock, cores, memory bandwidth).  A step is timed alone before and after;
what the steps in between take beyond that, the call included, is the stall.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoint_ranks import Ranks, run_ranks
from benchmarks.checkpoint_state import Size, training_state
from benchmarks.checkpoint_ways import Pending, Way, Ways
from benchmarks.tables import Section, paired_ratio, spread, table
from slurm_forge.device.accelerator import synchronize

#: Seconds of steps before and after, to know what one takes.
_ALONE_S = 0.7
#: Seconds of steps from the save's beginning at least, so that nothing counts for something.
_LEAST_S = 1.0
#: Seconds that one step takes, of each kind.
_STEP_S = {"interpreter": 0.001, "compute": 0.012}
_WAYS = (Way.OURS, Way.OURS_AGAIN, Way.ASYNC_THREAD, Way.ASYNC_PROCESS, Way.COPY)
_NOTHING = "nothing is saved (A/A of the step)"


class Step(str, Enum):
    """What a step is made of."""

    INTERPRETER = "interpreter"  # hundreds of small operations: the interpreter's lock is the limit
    COMPUTE = "compute"  # a few products of matrices: cores and memory are


@dataclass(frozen=True, slots=True)
class _Found:
    """Seconds of the slowest rank."""

    blocked_s: float
    stall_s: float
    durable_s: float
    step_s: float


def measure_stall(
    folder: Path, size: Size, world: int, rounds: int, on_accelerator: bool = False
) -> Section:
    """Both kinds of step, every way once per round."""
    found: list[dict[str, _Found]] = run_ranks(
        world, _rounds, folder, size, rounds, threads=1, on_accelerator=on_accelerator
    )
    names = [*(way.value for way in _WAYS), _NOTHING]
    rows = [_row(step, name, found) for step in Step for name in names]
    header = [
        "step: way",
        "held up s",
        "stall s",
        "/ one copy",
        "ours / this",
        "on disk s",
        "step ms",
    ]
    return Section(
        f"What training loses to a save of {size.text}, {world} ranks, {rounds} rounds",
        table(header, rows),
        {
            "size": asdict(size),
            "ranks": world,
            "rounds": [{name: asdict(one) for name, one in each.items()} for each in found],
        },
    )


def _rounds(ranks: Ranks, folder: Path, size: Size, rounds: int) -> list[dict[str, _Found]]:
    ways = Ways(folder, training_state(size, ranks), ranks)
    steps = {
        Step.INTERPRETER: _interpreter_step(ranks.device),
        Step.COMPUTE: _compute_step(ranks.device),
    }
    for way in _WAYS:
        ways.run(way)  # memory that is touched for the first time, a process that is started
    kinds: list[tuple[Step, Way | None]] = [(s, w) for s in Step for w in (*_WAYS, None)]
    order = random.Random(0)
    measured: list[dict[str, _Found]] = []
    for number in range(1, rounds + 1):
        order.shuffle(kinds)
        found: dict[str, _Found] = {}
        for step, each in kinds:
            ways.open()
            one = _stall(steps[step], None if each is None else partial(ways.begin, each))
            ways.close()
            slowest = ranks.slowest([one.blocked_s, one.stall_s, one.durable_s, one.step_s])
            found[_key(step, _NOTHING if each is None else each.value)] = _Found(*slowest)
        measured.append(found)
        ranks.tell(f"stall, {size.text}, {ranks.size} ranks: {number} of {rounds}")
    return measured


def _stall(step: Callable[[], None], begin: Callable[[], Pending] | None) -> _Found:
    count, before = _alone(step)
    began = time.perf_counter()
    pending = None if begin is None else begin()
    blocked = time.perf_counter() - began
    durable, done = 0.0, 0
    while True:
        if not durable and (pending is None or pending.done()):
            durable = time.perf_counter() - began
        if durable and time.perf_counter() - began >= _LEAST_S:
            break
        step()
        done += 1
    took = time.perf_counter() - began
    if pending is not None:
        pending.result()
    more, after = _alone(step)
    alone = (before + after) / (count + more)
    return _Found(blocked, took - done * alone, durable, alone)


def _alone(step: Callable[[], None]) -> tuple[int, float]:
    """So many steps, in so many seconds, with nothing beside them."""
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < _ALONE_S:
        step()
        count += 1
    return count, took


def _interpreter_step(device: torch.device) -> Callable[[], None]:
    small = torch.zeros(16, device=device)

    def part() -> None:
        small.add_(1.0)

    return _repeated(part, _STEP_S[Step.INTERPRETER.value], device)


def _compute_step(device: torch.device) -> Callable[[], None]:
    left, right = torch.randn(384, 384, device=device), torch.randn(384, 384, device=device)
    product = torch.empty(384, 384, device=device)

    def part() -> None:
        torch.mm(left, right, out=product)

    return _repeated(part, _STEP_S[Step.COMPUTE.value], device)


def _repeated(part: Callable[[], None], seconds: float, device: torch.device) -> Callable[[], None]:
    """A step of about so many seconds; it ends when the device has done it."""
    fastest = float("inf")  # what others do on the machine only makes it slower
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(10):
            part()
        synchronize(device)
        fastest = min(fastest, (time.perf_counter() - began) / 10)
    repeat = max(1, round(seconds / fastest))

    def step() -> None:
        for _ in range(repeat):
            part()
        synchronize(device)

    return step


def _key(step: Step, name: str) -> str:
    return f"{step.value}: {name}"


def _row(step: Step, name: str, rounds: list[dict[str, _Found]]) -> list[str | None]:
    def stalls(of: str) -> list[float | None]:
        return [each[_key(step, of)].stall_s for each in rounds]

    copies = [each[_key(step, Way.COPY.value)].blocked_s for each in rounds]
    mine = [each[_key(step, name)] for each in rounds]
    held = spread(one.blocked_s for one in mine)
    stall = spread(one.stall_s for one in mine)
    disk = spread(one.durable_s for one in mine)
    length = spread(1000 * one.step_s for one in mine)
    copy = paired_ratio(stalls(name), list(copies))
    ours = paired_ratio(stalls(Way.OURS.value), stalls(name))
    saves = name not in (_NOTHING, Way.COPY.value)
    return [
        _key(step, name),
        None if held is None or name == _NOTHING else held.text(3),
        None if stall is None else stall.text(3),
        None if copy is None or name == _NOTHING else copy.text(),
        None if ours is None or not saves else ours.text(),
        None if disk is None or not saves else disk.text(),
        None if length is None else length.text(),
    ]
