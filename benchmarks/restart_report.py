"""What the rounds come to: phases, tables, JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.restart_jobs import Way
from benchmarks.restart_timeline import Relaunch, Timeline
from benchmarks.tables import Spread, cell, paired_ratio, plain, spread, table


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    key: str
    title: str
    of: Callable[[Timeline], float | None]
    digits: int = 2


def _since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


METRICS = (
    Metric("seen", "signal to seen by the program", lambda t: _since(t.sent, t.seen), 3),
    Metric("agreed", "signal to stop step agreed", lambda t: _since(t.sent, t.agreed), 3),
    Metric("saved", "signal to checkpoint committed", lambda t: _since(t.sent, t.saved), 3),
    Metric("asked", "signal to requeue taken by Slurm", lambda t: _since(t.sent, t.asked)),
    Metric("queued", "signal to waiting in the queue", lambda t: t.queued - t.sent),
    Metric("slurm", "Slurm's delay: queue to batch script", lambda t: t.script - t.queued),
    Metric("supervisor", "batch script to srun started", lambda t: _since(t.script, t.launched)),
    Metric("imports", "… to torch imported", lambda t: t.imported - (t.launched or t.script)),
    Metric("rendezvous", "… to process groups joined", lambda t: t.met - t.imported),
    Metric("build", "… to model built", lambda t: t.built - t.met),
    Metric("load", "… to state loaded", lambda t: t.loaded - t.built),
    Metric("step", "… to first new step done", lambda t: t.stepped - t.loaded),
    Metric("start", "batch script to first new step", lambda t: t.stepped - t.script),
    Metric("requeue", "waiting to first new step", lambda t: t.stepped - t.queued),
    Metric("total", "signal to first new step", lambda t: t.stepped - t.sent),
    Metric("standstill", "last old step to first step beyond", lambda t: t.caught_up - t.last_step),
    Metric("lost", "steps lost (computed again)", lambda t: float(t.steps_lost), 0),
    Metric("share", "… as a share of the save interval", lambda t: t.steps_lost / t.save_every),
    Metric("cpu", "cpu s of rank 0 to first new step", lambda t: t.cpu),
)
#: What is compared with the first way of a block, round by round.
COMPARED = ("queued", "start", "total", "standstill", "cpu")

RELAUNCH_METRICS: tuple[tuple[str, str, Callable[[Relaunch], float]], ...] = (
    ("given_up", "first bad step to old launch ended", lambda r: r.ended - r.fault),
    ("launched", "… to srun started again", lambda r: r.launched - r.ended),
    ("imports", "… to torch imported", lambda r: r.imported - r.launched),
    ("rendezvous", "… to process groups joined", lambda r: r.met - r.imported),
    ("build", "… to model built", lambda r: r.built - r.met),
    ("load", "… to state loaded", lambda r: r.loaded - r.built),
    ("step", "… to first new step done", lambda r: r.stepped - r.loaded),
    ("total", "first bad step to first new step", lambda r: r.stepped - r.fault),
    ("cpu", "cpu s of rank 0 to first new step", lambda r: r.cpu),
)


def print_ways(found: dict[Way, list[Timeline]]) -> None:
    """One column per way, and the ratios to the first."""
    ways = list(found)
    rows = [
        (m.title, *(cell(spread(m.of(t) for t in found[way]), m.digits) for way in ways))
        for m in METRICS
    ]
    print(table(("seconds: median (least-most)", *(way.value for way in ways)), rows))
    ratios = [
        (m.title, *(cell(_ratio(m, found[way], found[ways[0]]), 2) for way in ways[1:]))
        for m in METRICS
        if m.key in COMPARED
    ]
    if ways[1:]:
        print(f"\nas multiples of {ways[0].value}, round by round")
        print(table(("", *(way.value for way in ways[1:])), ratios))


def _ratio(metric: Metric, these: list[Timeline], those: list[Timeline]) -> Spread | None:
    return paired_ratio([metric.of(t) for t in these], [metric.of(t) for t in those])


def print_relaunches(found: list[Relaunch], requeues: list[Timeline]) -> None:
    """The relaunch in the allocation, and how much shorter it is than coming back by requeue."""
    rows = [(title, cell(spread(of(r) for r in found), 2)) for _, title, of in RELAUNCH_METRICS]
    print(table(("seconds: median (least-most)", "relaunch"), rows))
    relaunched = spread(r.stepped - r.fault for r in found)
    requeued = spread(t.stepped - t.sent for t in requeues)
    if relaunched and requeued:
        share = relaunched.median / requeued.median
        print(f"\n{share:.2f} of a preemption's signal to first new step (medians, same run)")


def ways_as_json(found: Mapping[Way, list[Timeline]]) -> dict[str, Any]:
    """Every moment of every round, beside what they come to."""
    return {
        way.value: {
            "seconds": {m.key: plain(spread(m.of(t) for t in rounds)) for m in METRICS},
            "rounds": [asdict(t) for t in rounds],
        }
        for way, rounds in found.items()
    }


def relaunches_as_json(found: list[Relaunch]) -> dict[str, Any]:
    """The same for the relaunches."""
    return {
        "seconds": {key: plain(spread(of(r) for r in found)) for key, _, of in RELAUNCH_METRICS},
        "rounds": [asdict(r) for r in found],
    }
