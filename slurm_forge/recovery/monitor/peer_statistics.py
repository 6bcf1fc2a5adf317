"""Ranks compared with those of the other hosts: medians, and how far these scatter.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from slurm_forge.recovery.monitor.drift import spread_of
from slurm_forge.recovery.monitor.straggler_reports import Reading

__all__ = ["Rest", "by_host", "lower", "others_of", "too_many"]

#: Above so many hosts the median of all is as good as that of all others.
_MANY_HOSTS = 8


@dataclass(frozen=True, slots=True)
class Rest:
    """The others of a rank: what is in the middle of them, and how they differ."""

    middle: float
    spread: float


def lower(values: Iterable[float]) -> float:
    """What three of four are above."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


def by_host(readings: Sequence[Reading]) -> dict[str, list[Reading]]:
    """Readings of every host, by rank."""
    hosts: dict[str, list[Reading]] = {}
    for each in sorted(readings, key=lambda one: one.rank):
        hosts.setdefault(each.host, []).append(each)
    return hosts


def others_of(hosts: Mapping[str, list[Reading]], values: Mapping[int, float]) -> dict[int, Rest]:
    """For each rank the ranks of other hosts; on a single host all other ranks of it."""
    on_hosts = {
        host: known
        for host, on_it in hosts.items()
        if (known := {r.rank: values[r.rank] for r in on_it if r.rank in values})
    }
    found: dict[int, Rest] = {}
    if len(on_hosts) > _MANY_HOSTS:
        everybody = list(values.values())
        rest = Rest(median(everybody), spread_of(everybody))
        return dict.fromkeys(values, rest)
    for host, own in on_hosts.items():
        if len(on_hosts) > 1:
            others = [v for other, each in on_hosts.items() if other != host for v in each.values()]
            found.update(dict.fromkeys(own, Rest(median(others), spread_of(others))))
            continue
        for rank in own:
            others = [value for other, value in own.items() if other != rank]
            if others:
                found[rank] = Rest(median(others), spread_of(others))
    return found


def too_many(
    slow: Mapping[str, list[Reading]],
    hosts: Mapping[str, list[Reading]],
    readings: Sequence[Reading],
) -> bool:
    """Never more than a minority: of most it is the program, or the others that are fast."""
    if len(hosts) > 1:
        return len(slow) > max(1, (len(hosts) - 1) // 2)
    ranks = sum(len(each) for each in slow.values())
    return ranks > max(1, (len(readings) - 1) // 2)
