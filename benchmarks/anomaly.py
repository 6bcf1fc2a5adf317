"""False alarms and delays of the watch for loss spikes and large gradient norms, by simulation.

    python -m benchmarks.anomaly [--steps 1000000] [--seeds 200] [--json FILE]

The real ``SpikeMonitor`` is given losses and norms as rank 0 would see them, with a clock of its
own.  A limit that it announces is in force two steps later, and an update above it is left out.
After a false alarm it is told to live with it.
"""

from __future__ import annotations

import argparse
import math
import os
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.tables import Machine, table, write_json
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import RequestProposal
from slurm_forge.recovery.monitor.loss_anomaly import announced
from slurm_forge.spec.recovery import default_recovery
from slurm_forge.training.instability.spike_monitor import SpikeMonitor
from slurm_forge.training.step.gradient_guard import Reading

Array = npt.NDArray[np.float64]
#: Losses and norms of that many steps.
Maker = Callable[[np.random.Generator, int], tuple[Array, Array]]

_STEP_S = 0.05
_EPISODE = 20_000
#: Made at once: more would fill the memory.
_AT_ONCE = 25
_BEFORE = 600
_AFTER = 60


class Rank0:
    """A run of which only losses and norms are known."""

    def __init__(self, step_s: float = _STEP_S) -> None:
        self.now = 0.0
        self._step_s = step_s
        self.alarms: list[tuple[int, int]] = []  # onset, step
        self.left_out: list[int] = []
        self.announcements = 0
        self.limit = math.inf
        self._next: tuple[float, int] | None = None
        self._step = 0
        self.watch = SpikeMonitor(self._sent, default_recovery(), lambda: self.now)

    def _sent(self, message: Message) -> None:
        assert isinstance(message, RequestProposal)
        if message.kind is RequestKind.LIMIT:
            self.announcements += 1
            self._next = (float(message.reason), self._step + 2)
        else:
            found = announced(message.reason)
            self.alarms.append((found.onset, found.step))

    def take(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        """All these steps; alarms are answered at once."""
        taken, alarms = self.watch.record, self.alarms
        known = len(alarms)
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), self._step):
            self._step = step
            self.now += self._step_s
            if self._next is not None and self._next[1] <= step:
                self.limit, self._next = self._next[0], None
                self.watch.set_active_limit(self.limit)
            applied = norm <= self.limit
            if not applied:
                self.left_out.append(step)
            taken(step, norm=norm, loss=loss, applied=applied)
            if len(alarms) != known:
                known = len(alarms)
                self.watch.tolerate()
        self._step += 1

    def resumed(self, losses: Sequence[float]) -> None:
        """As after a resume: the last losses are known, the norms are not."""
        self.watch.restarted(losses, self._step - 1)
        self.limit, self._next = math.inf, None


def wave(rng: np.random.Generator, count: int, rho: float = 0.9) -> Array:
    """Noise of deviation 1 that swings slowly."""
    pushed = rng.normal(size=count) * math.sqrt(1 - rho * rho)
    swings = accumulate(pushed.tolist(), lambda before, push: rho * before + push)
    return np.fromiter(swings, np.float64, count)


def lognormal(rng: np.random.Generator, count: int, sigma: float) -> Array:
    """Norms around 1."""
    noise: Array = np.exp(sigma * rng.normal(size=count))
    return noise


def _white(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    return 2 + 0.2 * rng.normal(size=count), lognormal(rng, count, 0.2)


def _white_around_0(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    return rng.normal(size=count), lognormal(rng, count, 0.35)


def _skewed(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    return 0.01 * lognormal(rng, count, 0.5), lognormal(rng, count, 0.5)


def _waves(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    return wave(rng, count), np.exp(0.3 * wave(rng, count))


def _high_waves(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    return 2 + 0.4 * wave(rng, count), np.exp(0.5 * wave(rng, count))


def _heavy(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    return rng.standard_t(3, size=count), np.abs(1 + 0.03 * rng.standard_t(3, size=count))


def _falling(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """A power law from 11 to 2; norms rise tenfold over 300 steps, then fall twentyfold."""
    step = np.arange(count) % _EPISODE
    loss = 1.7 + 9.3 * (1 + step / 50) ** -0.55
    norm = 5 * (0.1 + np.minimum(step / 300, 1)) * (1 + step / 1000) ** -1.0
    return loss + 0.05 * rng.normal(size=count), norm * lognormal(rng, count, 0.2)


def _warm_restarts(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Cosine restarts every 2000 steps: up by 15 % within 20 steps, norms double."""
    step = np.arange(count) % 2000
    lr = 0.5 * (1 + np.cos(np.pi * step / 2000)) * np.minimum(1, (1 + step) / 20)
    loss = 2.2 * (1 + 0.15 * lr) + 0.03 * rng.normal(size=count)
    return loss, (1 + lr) * lognormal(rng, count, 0.3)


def _drops(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """The learning rate falls tenfold every 5000 of 20000 steps: loss down at once, norms up."""
    part = (np.arange(count) % _EPISODE) // 5000
    loss = 2.5 * 0.8**part + 0.03 * rng.normal(size=count)
    return loss, 1.7**part * lognormal(rng, count, 0.3)


def _bumps(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """20 % up for 10 steps of every 500."""
    up = np.where((np.arange(count) % 500) >= 490, 1.2, 1.0)
    return 2 * up + 0.03 * rng.normal(size=count), up**2 * lognormal(rng, count, 0.3)


def _kinds(share: float, times: float) -> Maker:
    """Two kinds of batches: with so much of the second, whose loss is so many times as high."""

    def make(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        level = np.where(rng.random(count) < share, times, 1.0)
        return level * 2 + 0.05 * rng.normal(size=count), lognormal(rng, count, 0.3)

    return make


def _negative(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """From -100 down to -300 in each run."""
    falling = -100 - np.arange(count) % _EPISODE / 100
    return falling + rng.normal(size=count), lognormal(rng, count, 0.3)


def _constant(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """0 in every second run."""
    return np.where(np.arange(count) // _EPISODE % 2 == 0, 0.0, 0.7), np.ones(count)


@dataclass(frozen=True, slots=True)
class Case:
    """A healthy training; each episode a run of its own, or resumed every so many steps."""

    name: str
    make: Maker
    episodes: bool = False
    resume: int = 0
    step_s: float = _STEP_S


_HEALTHY = (
    Case("white noise, 10 %; norms lognormal 0.2", _white),
    Case("white noise around 0; norms lognormal 0.35", _white_around_0),
    Case("lognormal 0.5 near 0; norms lognormal 0.5", _skewed),
    Case("AR(1) 0.9 around 0; norms AR(1) 0.9, lognormal 0.3", _waves),
    Case("AR(1) 0.9, 20 %; norms AR(1) 0.9, lognormal 0.5", _high_waves),
    Case("t(3) around 0; norms 1 + 0.03 t(3)", _heavy),
    Case("power law 11 to 2; norms up tenfold, down", _falling, episodes=True),
    Case("the same, steps of 2 ms", _falling, episodes=True, step_s=0.002),
    Case("cosine restarts, +15 %; norms double", _warm_restarts),
    Case("steps down by 20 %; norms up by 70 %", _drops, episodes=True),
    Case("+20 % for 10 steps of every 500", _bumps),
    Case("1 % of the batches five times as high", _kinds(0.01, 5.0)),
    Case("3 % of the batches five times as high", _kinds(0.03, 5.0)),
    Case("10 % of the batches half as high again", _kinds(0.1, 1.5)),
    Case("negative, falling from -100 to -300", _negative, episodes=True),
    Case("constant: 0, or 0.7", _constant, episodes=True),
    Case("AR(1) 0.9 around 0, resumed every 500 steps", _waves, resume=500),
    Case("t(3) around 0, resumed every 500 steps", _heavy, resume=500),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """A training in which nothing is wrong."""

    name: str
    steps: int
    alarms: int
    left_out: int
    announcements: int


def healthy(case: Case, steps: int) -> Healthy:
    """So many steps, in pieces."""
    rng = np.random.default_rng(1)
    rank, alarms, left_out, announcements = Rank0(case.step_s), 0, 0, 0
    pieces = max(1, steps // _EPISODE)
    for piece in range(pieces):
        if piece % _AT_ONCE == 0:
            losses, norms = case.make(rng, _AT_ONCE * _EPISODE)
        first = piece % _AT_ONCE * _EPISODE
        part = slice(first, first + _EPISODE)
        loss, norm = losses[part].tolist(), norms[part].tolist()
        for at in range(0, _EPISODE, case.resume or _EPISODE):
            until = at + (case.resume or _EPISODE)
            rank.take(loss[at:until], norm[at:until])
            if case.resume:
                rank.resumed(loss[until - 64 : until])
        if case.episodes or piece == pieces - 1:
            alarms += len(rank.alarms)
            left_out += len(rank.left_out)
            announcements += rank.announcements
            rank = Rank0(case.step_s)
    return Healthy(
        name=case.name,
        steps=pieces * _EPISODE,
        alarms=alarms,
        left_out=left_out,
        announcements=announcements,
    )


#: What is added to a loss of 2, by steps since the onset.
_BAD: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("random targets: 2 to 4.9", lambda since: 0 * since + 2.9),
    ("x 2", lambda since: 0 * since + 2.0),
    ("x 1.3", lambda since: 0 * since + 0.6),
    ("3 poisoned batches", lambda since: np.where(since < 3, 2.9, 0.1)),
    ("5 poisoned batches", lambda since: np.where(since < 5, 2.9, 0.1)),
    ("40 poisoned batches", lambda since: np.where(since < 40, 2.9, 0.1)),
    ("divergence, 15 % a step from 0.02", lambda since: 0.02 * np.exp(0.15 * since)),
    ("divergence, 5 % of the loss a step", lambda since: 2 * 1.05 ** (since + 1) - 2),
    ("1 poisoned batch", lambda since: np.where(since < 1, 2.9, 0.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A loss that goes wrong: steps from the first bad one to the alarm, both counted."""

    name: str
    seeds: int
    found: int
    delay: float | None
    most: int | None
    #: Steps from the true onset to the one that was told.
    onset: float | None


def found(name: str, add: Callable[[Array], Array], noise: float, seeds: int, kind: str) -> Found:
    """Over so many seeds, behind a healthy beginning."""
    delays, onsets = [], []
    since = np.arange(_AFTER, dtype=np.float64)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        rank = Rank0()
        count = _BEFORE + _AFTER
        swing = wave(rng, count) if kind == "AR(1)" else rng.normal(size=count)
        loss = 2 + 2 * noise * swing
        loss[_BEFORE:] += add(since)
        rank.take(loss.tolist(), lognormal(rng, count, 0.2).tolist())
        late = [(onset, step) for onset, step in rank.alarms if step >= _BEFORE]
        if late:
            onsets.append(late[0][0] - _BEFORE)
            delays.append(late[0][1] - _BEFORE + 1)
    return Found(
        name=f"{name}, {kind} {100 * noise:g} %",
        seeds=seeds,
        found=len(delays),
        delay=median(delays) if delays else None,
        most=max(delays, default=None),
        onset=median(onsets) if onsets else None,
    )


def left_out(factor: float, sigma: float, seeds: int, row: int) -> float:
    """How many of the norms, ``row`` in a row and so many times too large, were left out."""
    count = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        rank = Rank0()
        norms = lognormal(rng, _BEFORE + row, sigma)
        norms[_BEFORE:] *= factor
        rank.take([2.0] * len(norms), norms.tolist())
        count += sum(step >= _BEFORE for step in rank.left_out)
    return count / (seeds * row)


def cost_us() -> float:
    """Of one step, at its cheapest in five rounds."""
    rng = np.random.default_rng(1)
    count = 20_000
    readings = [
        Reading(True, True, norm, loss)
        for norm, loss in zip(
            lognormal(rng, count, 0.2).tolist(), rng.normal(size=count).tolist(), strict=True
        )
    ]
    watch = Rank0().watch

    def go() -> None:
        for step, reading in enumerate(readings):
            watch.record(step, norm=reading.norm, loss=reading.loss, applied=reading.applied)

    return 1e6 * min(timeit.repeat(go, number=1, repeat=5)) / count


def main() -> None:
    """The tables, and all figures as JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of each healthy training")
    parser.add_argument("--seeds", type=int, default=200, help="of each that goes wrong")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()

    calm = [healthy(case, given.steps) for case in _HEALTHY]
    head = ["nothing is wrong", "steps", "alarms", "updates left out", "limits announced"]
    rows = [
        [c.name, f"{c.steps:,}", str(c.alarms), str(c.left_out), str(c.announcements)] for c in calm
    ]
    print(table(head, rows), flush=True)

    wrong = [
        found(name, add, noise, given.seeds, kind)
        for name, add in _BAD
        for noise, kind in ((0.01, "white"), (0.05, "white"), (0.1, "white"), (0.1, "AR(1)"))
    ]
    head = ["the loss goes wrong", "found", "at bad step", "at most", "onset off by"]
    cells = [
        [
            w.name,
            f"{100 * w.found / w.seeds:.1f} %",
            None if w.delay is None else f"{w.delay:g}",
            None if w.most is None else str(w.most),
            None if w.onset is None else f"{w.onset:+g}",
        ]
        for w in wrong
    ]
    print("\n" + table(head, cells), flush=True)

    large = {
        f"x {factor:g}, {row} in a row": [
            left_out(factor, sigma, given.seeds, row) for sigma in (0.05, 0.2, 0.35, 0.5)
        ]
        for factor, row in ((10.0, 1), (100.0, 1), (20.0, 3))
    }
    head = ["norms left out", "lognormal 0.05", "0.2", "0.35", "0.5"]
    print("\n" + table(head, [[k, *(f"{100 * v:.1f} %" for v in vs)] for k, vs in large.items()]))

    cost = cost_us()
    machine = Machine.measured(load, began)
    print(f"\n{cost:.1f} us per step.  {machine.text()}, {time.time() - began:.0f} s")
    data = {"machine": asdict(machine), "left_out": large, "cost_us": cost}
    data |= {"healthy": [asdict(c) for c in calm], "found": [asdict(w) for w in wrong]}
    write_json(given.json, data)


if __name__ == "__main__":
    main()
