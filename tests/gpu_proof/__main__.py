"""``python -m tests.gpu_proof``: what holds on this machine's accelerators; scripts/gpu-proof."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.accelerator.build import installed
from tests.gpu_proof.benchmarks import run_benchmarks
from tests.gpu_proof.nodes import run_across
from tests.gpu_proof.outcomes import (
    Check,
    Figure,
    Outcome,
    Proof,
    as_json,
    as_page,
    checks_of_junit,
)
from tests.gpu_proof.runs import run_scenarios

_ROOT = Path(__file__).parents[2]
PARTS = ("tests", "runs", "nodes", "benchmarks")
#: Of the time, at most, so that one part that hangs leaves the others their turn.
_SHARE = {"tests": 0.45, "runs": 0.6, "nodes": 0.7, "benchmarks": 1.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every part within the time, and write the page and the JSON file."""
    options = _parse(arguments)
    began = time.monotonic()
    if options.made_up:
        # torch imports it in every process that has its folder on the path.
        path = [str(installed()), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
    within = 60 * options.minutes
    machine = json.loads(
        subprocess.run(
            [sys.executable, "-m", "tests.gpu_proof.machine"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    devices = int(machine["devices"])
    if not devices:
        sys.stderr.write(
            "gpu-proof: torch sees no accelerator here: run it on a node that has one, with a "
            "torch built for it (FORGE_VENV names an environment that has it)\n"
        )
        return 2
    checks: list[Check] = []
    figures: list[Figure] = []
    environment = dict(os.environ)
    fused = machine["type"] == "cuda"

    def seconds_left(part: str) -> Callable[[], float]:
        return lambda: within * _SHARE[part] - (time.monotonic() - began)

    with tempfile.TemporaryDirectory(prefix="gpu-proof-", dir=options.folder or ".") as name:
        folder = Path(name).absolute()
        run: dict[str, Callable[[], tuple[list[Check], list[Figure]]]] = {
            "tests": lambda: (run_tests(folder, seconds_left("tests")()), []),
            "runs": lambda: run_scenarios(
                folder,
                devices=devices,
                environment=environment,
                seconds_left=seconds_left("runs"),
                fused=fused,
                preflight=not options.made_up,
            ),
            "nodes": lambda: run_across(
                folder,
                nodes=options.nodes,
                devices=devices,
                settings=options.set,
                environment=environment,
                seconds_left=seconds_left("nodes"),
                fused=fused,
            ),
            "benchmarks": lambda: run_benchmarks(
                folder,
                devices=devices,
                environment=environment,
                seconds_left=seconds_left("benchmarks"),
                rehearsal=options.made_up,
            ),
        }
        for part in options.only:
            sys.stdout.write(f"{part} …\n")
            sys.stdout.flush()
            found, more = run[part]()
            checks += found
            figures += more
            for check in found:
                sys.stdout.write(f"  {check.outcome.value:8}{check.name}  {check.detail}\n")
    proof = Proof(machine, checks, figures, time.monotonic() - began, options.made_up)
    words = " ".join(["scripts/gpu-proof", *(arguments or sys.argv[1:])])
    page = as_page(proof, command=words)
    options.page.write_text(page)
    options.json.write_text(json.dumps(as_json(proof), indent=1) + "\n")
    sys.stdout.write(f"\n{page}\nwritten to {options.page} and {options.json}\n")
    return 0 if proof.holds else 1


def run_tests(folder: Path, within_s: float) -> list[Check]:
    """Every test that is marked ``gpu``, by pytest in a process of its own."""
    file = folder / "junit.xml"
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    # Of the others pytest would import every one first; by default it removes what earlier calls of
    # anybody's have left in /tmp, which may take minutes.
    words += ["tests/accelerator", *_files_that_mark("gpu"), "--basetemp", str(folder / "tests")]
    ended = None
    try:
        ended = subprocess.run(
            [*words, "--junitxml", str(file)],
            check=False,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        found = checks_of_junit("tests", file.read_text())
    except subprocess.TimeoutExpired:
        return [Check("tests", "all", Outcome.FAILED, f"they did not end within {within_s:.0f} s")]
    except OSError:
        said = "" if ended is None else (ended.stdout + ended.stderr).strip()
        return [Check("tests", "all", Outcome.FAILED, said[-300:])]
    return found or [Check("tests", "all", Outcome.NOT_RUN, "pytest found no test marked gpu")]


def _files_that_mark(mark: str) -> list[str]:
    files = (_ROOT / "tests").rglob("test_*.py")
    return [str(file) for file in sorted(files) if f"mark.{mark}\n" in file.read_text("utf-8")]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-proof", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="more than 1: through Slurm, too")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the job on several nodes",
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=15.0, help="in all, at most")
    parser.add_argument("--made-up", action="store_true", help="rehearse, on a made-up device")
    parser.add_argument("--folder", type=Path, help="for the runs; seen by all nodes (here)")
    parser.add_argument("--page", type=Path, default=Path("gpu-proof.md"))
    parser.add_argument("--json", type=Path, default=Path("gpu-proof.json"))
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
