"""``python -m tests.crash``: the crash matrix, as a table; see scripts/crash-matrix."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.crash import shim
from tests.crash.sabotage import SABOTAGE


def main(arguments: list[str]) -> int:
    """Parse, become a process with the shim under it, run."""
    parser = argparse.ArgumentParser(prog="crash-matrix", description=__doc__)
    parser.add_argument("--json", type=Path, help="every injection and what came of it")
    parser.add_argument("--injections", type=int, default=2000, help="at least so many of ours")
    parser.add_argument("--jobs", type=int, default=max(os.cpu_count() or 2, 2))
    parser.add_argument("--path", action="append", help="only these paths (may be repeated)")
    parser.add_argument("--kind", action="append", help="only these kinds, such as REPEATED")
    parser.add_argument("--folder", type=Path, help="where the disks of the cases lie")
    parser.add_argument("--sample", type=int, help="so many cases, spread over calls and kinds")
    parser.add_argument("--no-dcp", action="store_true", help="without plain DCP beside it")
    parser.add_argument(
        "--sabotage", choices=list(SABOTAGE), help="break slurm_forge first: the matrix must see it"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not shim.loaded():
        folder = Path(tempfile.mkdtemp(prefix="forge-crash-shim-"))
        shim.load_and_run("tests.crash", arguments, shim.build(folder))
    shim.remove_build()
    from tests.crash import run

    return run.run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
