"""How many rounds it takes to find one bad node, or one bad link, of n: simulated up to 1,024.

    python -m benchmarks.isolation [--seeds 200] [--local 4] [--json FILE]

The real search (``recovery.isolation``) is given what nodes with that fault would answer.  Its time
is simulated: a round in which a group hangs lasts as long as that group may take, one in which none
does as long as a collective (``--round``, in seconds).  ``--local N`` also looks at this machine
with N real processes, through ``slurm-forge probe``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.tables import table
from slurm_forge.launch.conductor.preflight_monitor import (
    _ALL_GLOO_S,
    _FEW_GLOO_S,
    _FEW_LEAST_S,
)
from slurm_forge.recovery.monitor.isolation import (
    Isolated,
    isolate,
)

SIZES = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Fails = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search: what it said, and how long it took if what is bad hangs, or fails at once."""

    why: str
    right: bool
    rounds: int
    groups: int
    hangs_s: float
    fails_s: float


def search(nodes: int, fails: Fails, right: Callable[[Isolated], bool], round_s: float) -> Search:
    """The search among ``n0``, ``n1``, …"""
    found = isolate([f"n{number}" for number in range(nodes)])
    hangs = quick = 0.0
    limit = _ALL_GLOO_S
    try:
        groups = next(found)
        while True:
            outcomes = [not fails(frozenset(group)) for group in groups]
            hangs += round_s if all(outcomes) else limit
            quick += round_s
            limit = _FEW_GLOO_S if limit == _ALL_GLOO_S else max(_FEW_LEAST_S, 20 * round_s)
            groups = found.send(outcomes)
    except StopIteration as stop:
        told: Isolated = stop.value
    return Search(
        why=told.why.value,
        right=right(told),
        rounds=told.rounds,
        groups=told.groups,
        hangs_s=hangs,
        fails_s=quick,
    )


def bad_node(nodes: int, rng: random.Random, round_s: float) -> Search:
    """One node with which nothing works."""
    bad = f"n{rng.randrange(nodes)}"
    expected = (bad,) if nodes > 2 else ()  # of two nobody can tell which
    return search(nodes, lambda g: bad in g, lambda f: f.nodes == expected, round_s)


def bad_link(nodes: int, rng: random.Random, round_s: float) -> Search:
    """Two good nodes that don't reach each other."""
    link = {f"n{number}" for number in rng.sample(range(nodes), 2)}
    expected = {frozenset(link)} if nodes > 2 else set()
    return search(
        nodes,
        lambda g: link <= g,
        lambda f: not f.nodes and {frozenset(each) for each in f.links} == expected,
        round_s,
    )


def three_nodes(nodes: int, rng: random.Random, round_s: float) -> Search:
    """Three bad nodes at once, of sixteen and more."""
    bad = {f"n{number}" for number in rng.sample(range(nodes), 3)}
    return search(nodes, lambda g: not g.isdisjoint(bad), lambda f: set(f.nodes) == bad, round_s)


CASES: dict[str, tuple[int, Callable[[int, random.Random, float], Search]]] = {
    "one bad node": (2, bad_node),
    "one bad link": (2, bad_link),
    "three bad nodes": (16, three_nodes),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--round", type=float, default=0.2, dest="round_s")
    parser.add_argument("--local", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[list[str]] = []
    every: dict[str, list[dict[str, object]]] = {}
    for name, (least, case) in CASES.items():
        for nodes in SIZES:
            if nodes < least:
                continue
            found = [case(nodes, random.Random(seed), given.round_s) for seed in range(given.seeds)]
            every[f"{name}, {nodes}"] = [asdict(each) for each in found]
            rounds = [each.rounds for each in found]
            rows.append(
                [
                    name,
                    str(nodes),
                    f"{100 * sum(each.right for each in found) / len(found):.1f} %",
                    f"{statistics.median(rounds):g} ({max(rounds)})",
                    f"{statistics.median(each.groups for each in found):g}",
                    f"{statistics.median(each.hangs_s for each in found):.0f}",
                    f"{statistics.median(each.fails_s for each in found):.1f}",
                ]
            )
    header = ["fault", "nodes", "right", "rounds (most)", "groups", "s, hangs", "s, fails at once"]
    print(table(header, rows))
    local = _local(given.local) if given.local else None
    if local is not None:
        print(json.dumps(local))
    if given.json is not None:
        given.json.write_text(json.dumps({"searches": every, "local": local}, indent=1))


def _local(processes: int) -> dict[str, object]:
    """A real look at this machine: how long the checks, and all together, took."""
    words = (
        sys.executable,
        "-m",
        "slurm_forge.cli.main",
        "probe",
        f"--local={processes}",
        "--json",
    )
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(done.stdout)
    return {
        "processes": processes,
        "checks_s": [round(each["seconds"], 3) for each in found["nodes"]],
        "bytes_per_s": found["bytes_per_s"],
        "seconds": found["seconds"],
        "ok": found["ok"],
    }


if __name__ == "__main__":
    main()
