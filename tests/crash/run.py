"""Runs the matrix and shows it as a table."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from tests.crash.case import Case, Result
from tests.crash.matrix import PATHS, enumerate_cases, remove, run_all, scratch_folder
from tests.crash.sabotage import SABOTAGE
from tests.crash.saves import dcp_paths

_THEIRS = {path.name for path in dcp_paths()}
_COLUMNS = (
    "injections",
    "old",
    "new",
    "neither",
    "WRONG",
    "lost after ack",
    "next blocked",
    "hangs",
)


def run(options: argparse.Namespace) -> int:
    """Everything asked for; the exit status is 0 where nothing of ours went wrong."""
    torch.set_num_threads(1)
    ours = [name for name in PATHS if name not in _THEIRS]
    theirs = [] if options.no_dcp else sorted(_THEIRS)
    if options.path:
        ours = [name for name in ours if name in options.path]
        theirs = [name for name in theirs if name in options.path]
    folder = scratch_folder(options.folder)
    tempfile.tempdir = str(folder)  # of everything from here on
    began = time.monotonic()
    if options.sabotage:
        SABOTAGE[options.sabotage]()
    try:
        results = _run_ours(ours, options)
        if theirs:
            cases = enumerate_cases(theirs, seed=options.seed)
            results += run_all(cases, jobs=options.jobs)
    finally:
        remove(folder)
    seconds = time.monotonic() - began
    found = [result for result in results if result.path in ours]
    bad = [result for result in found if result.bad]
    if options.json:
        body = {
            "seed": options.seed,
            "torch": torch.__version__,
            "seconds": round(seconds, 1),
            "injections": len(found),
            "bad": len(bad),
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(body, indent=1))
    print(table(results))
    print(
        f"\n{len(found)} injections into slurm_forge, {len(bad)} with a wrong outcome; "
        f"{len(results) - len(found)} into plain DCP, "
        f"{sum(r.bad for r in results) - len(bad)} with a wrong outcome; "
        f"{seconds:.0f} s, seed {options.seed}"
    )
    for result in bad[:40]:
        print(f"  {result}", file=sys.stderr)
    return 1 if bad else 0


def _run_ours(names: Sequence[str], options: argparse.Namespace) -> list[Result]:
    if not names:
        return []
    seed, results = options.seed, []
    while True:
        cases = enumerate_cases(names, seed=seed)
        if options.kind:
            cases = [case for case in cases if case.strike.name in options.kind]
        if options.sample:
            cases = sample(cases, options.sample, seed)
        results += run_all(cases, jobs=options.jobs)
        if options.sample or options.path or options.kind or len(results) >= options.injections:
            return results
        seed += 1000  # chance decides what a power loss leaves: another round is not the same


def sample(cases: Iterable[Case], count: int, seed: int) -> list[Case]:
    """Some of them, in equal parts of every path and every kind."""
    groups: dict[tuple[str, Any], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.path, case.strike].append(case)
    chance = random.Random(seed)
    for group in groups.values():
        chance.shuffle(group)
    chosen: list[Case] = []
    while len(chosen) < count and any(groups.values()):
        chosen += [group.pop() for group in groups.values() if group]
    return chosen[:count]


def table(results: Iterable[Result]) -> str:
    """Path by kind: how many, and what came of them."""
    rows: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        rows[result.path, result.kind].append(result)
        rows[result.path, "all"].append(result)
    width = max((len(path) for path, _ in rows), default=4)
    head = f"{'path':{width}}  {'kind':32}" + "".join(f"{name:>15}" for name in _COLUMNS)
    lines = [head]
    order = list(PATHS)
    for (path, kind), found in sorted(
        rows.items(), key=lambda row: (order.index(row[0][0]), row[0][1] == "all", row[0][1])
    ):
        figures = (
            len(found),
            sum(result.state == "old" for result in found),
            sum(result.state == "new" for result in found),
            sum(result.state == "none" for result in found),
            sum(bool(result.wrong) for result in found),
            sum(result.lost for result in found),
            sum(bool(result.blocked) for result in found),
            sum(result.hang for result in found),
        )
        if kind == "all":
            lines.append("-" * len(head))
        lines.append(f"{path:{width}}  {kind:32}" + "".join(f"{n:15}" for n in figures))
        if kind == "all":
            lines.append("")
    return "\n".join(lines)
