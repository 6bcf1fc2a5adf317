"""What a change costs: benchmarks of two commits in turn, and the ratio of each figure.

    python -m benchmarks.commits BASE [--rounds 3] [--only guard,probe,…] [--json FILE]

``BASE`` is checked out beside this checkout, and each commit measures itself with its own copy of
the benchmark.  Both commits run once per round, in alternating order, so that what slows a whole
round down cancels out.  ``relaunch`` boots a Slurm, which needs root and Slurm's packages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import Machine, cell, paired_ratio, plain, spread, table, write_json

_REPOSITORY = Path(__file__).resolve().parents[1]
#: No figure may become worse than this; the noise of two runs of one commit is of that size.
_LIMIT = 1.05
_PATIENCE_S = 1800.0

#: By the name of a figure; less is better for each of them.
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """How one benchmark is run, and which of its figures are compared."""

    arguments: tuple[str, ...]
    figures: Callable[[Any], Figures]


def _guard_figures(result: Any) -> Figures:
    figures = {}
    for part in result["parts"]:
        name = part["loop"]["name"]
        for way in ("guard on", "guard on, with run.step"):
            turns = [each[way] for each in part["rounds"] if way in each]
            if turns:
                figures[f"{name}: {way}, cpu ms"] = statistics.median(t["cpu"] for t in turns)
    return figures


def _probe_figures(result: Any) -> Figures:
    """Each beside what was measured in turns with it: a step without a probe is plain torch."""
    probe, block = result["probe"], result["probe"]["blocks"][0]
    pairs = zip(block["with_cpu_ms"], block["without_cpu_ms"], strict=True)
    return {
        "issue of a probe, in bare all_reduces": statistics.median(
            issue / floor for issue, floor in zip(probe["issue_us"], probe["floor_us"], strict=True)
        ),
        "heartbeat, us": probe["beat_us"],
        "step with a probe a second, in steps without (cpu)": statistics.median(
            with_probe / without for with_probe, without in pairs
        ),
    }


def _checkpoint_figures(result: Any) -> Figures:
    figures = {}
    for part in result["parts"]:
        for way in part["rounds"][0]:
            if not way.startswith("slurm_forge") or "A/A" in way:
                continue
            for key, value in part["rounds"][0][way].items():
                if isinstance(value, float) and value > 0:
                    values = [each[way][key] for each in part["rounds"]]
                    figures[f"{part['part']}: {way}, {key}"] = statistics.median(values)
    return figures


def _relaunch_figures(result: Any) -> Figures:
    return {
        f"{way}: SIGKILL to first new step, s": found["seconds"]["total"]["median"]
        for way, found in result["ways"].items()
    }


BENCHMARKS = {
    "guard": Benchmark(("guard", "--only", "one,two", "--seconds", "20"), _guard_figures),
    "probe": Benchmark(("probe", "--blocks", "12", "--seconds", "1.5"), _probe_figures),
    "checkpoint": Benchmark(
        (
            *("checkpoint", "--only", "save,load,stall", "--gib", "0.5", "--tensors", "0"),
            *("--ranks", "1,2", "--rounds", "3", "--ways", "ours,ours_waiting"),
        ),
        _checkpoint_figures,
    ),
    "relaunch": Benchmark(
        ("relaunch", "--rounds", "3", "--ways", "warm,cold,in_process"), _relaunch_figures
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both commits in turn; 1 where a figure became worse than the limit."""
    options = _parse(arguments)
    began, load = time.time(), os.getloadavg()[0]
    rounds: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in options.only}
    with checked_out(options.base) as base:
        for number in range(options.rounds):
            for name in options.only:
                trees = [base, _REPOSITORY] if number % 2 == 0 else [_REPOSITORY, base]
                figures = {tree: measure(tree, BENCHMARKS[name]) for tree in trees}
                rounds[name].append((figures[base], figures[_REPOSITORY]))
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
    text, data, met = report(rounds)
    machine = Machine.measured(load, began)
    print(f"{machine.text()}\n\nbeside {options.base}\n\n{text}")
    write_json(options.json, {"machine": asdict(machine), "base": options.base, "figures": data})
    return 0 if met else 1


def report(rounds: Mapping[str, Sequence[tuple[Figures, Figures]]]) -> tuple[str, Any, bool]:
    """A table, every round for programs, and whether all ratios are within the limit."""
    rows, data, met = [], {}, True
    for name, pairs in rounds.items():
        for figure in pairs[0][0]:
            before = [base.get(figure) for base, _ in pairs]
            after = [new.get(figure) for _, new in pairs]
            ratio = paired_ratio(after, before)
            met = met and ratio is not None and ratio.median <= _LIMIT
            rows.append(
                (f"{name}: {figure}", cell(spread(before)), cell(spread(after)), cell(ratio))
            )
            data[f"{name}: {figure}"] = {"base": before, "now": after, "ratio": plain(ratio)}
    judged = "all ratios are" if met else "NOT all ratios are"
    text = table(("median (range) over the rounds", "base", "now", "ratio"), rows)
    return f"{text}\n\n{judged} at most {_LIMIT}", data, met


def measure(tree: Path, benchmark: Benchmark) -> Figures:
    """Run the tree's own copy of a benchmark, with the tree's own package."""
    with tempfile.TemporaryDirectory(prefix="commits-") as folder:
        python = _interpreter(tree, Path(folder) / "venv")
        result = Path(folder) / "result.json"
        command = [str(python), "-m", f"benchmarks.{benchmark.arguments[0]}"]
        command += [*benchmark.arguments[1:], "--json", str(result)]
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        if not result.exists() or done.returncode < 0:
            raise SystemExit(f"{' '.join(command)} in {tree} failed:\n{done.stderr[-4000:]}")
        return benchmark.figures(json.loads(result.read_text()))


def _interpreter(tree: Path, folder: Path) -> Path:
    """An interpreter that imports ``slurm_forge`` from the tree, and all else as this one does."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    # In this order; path files of the other folder, such as an editable install, are not followed.
    (packages / "benchmark.pth").write_text(f"{tree}\n{ours}\n")
    return folder / "bin" / "python"


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A checkout of the revision beside this one, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="commits-base-") as folder:
        Path(folder).chmod(0o755)  # jobs of another user read it
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(_REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("base", metavar="BASE", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
