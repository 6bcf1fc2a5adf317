"""When interpreters begin, and when they import torch: for every Python with us on its path.

It writes only where ``FORGE_BENCH_MARKS`` names a folder, and of the ranks only the first's.  The
lines are read by ``benchmarks.restart_phases``.
"""

import json
import os
import sys
import time

_FOLDER = os.environ.get("FORGE_BENCH_MARKS", "")
#: Modules whose first import is marked when it begins.
_MARKED = {"torch", "slurm_forge.training.rank.main", "slurm_forge.launch.supervisor.main"}


def _mark(what: str) -> None:
    line = json.dumps(
        [
            what,
            " ".join(sys.orig_argv[1:5]),
            time.time(),
            time.process_time(),
            int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            _parents_cpu(),
        ]
    )
    file = os.open(f"{_FOLDER}/interpreters.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode() + b"\n")
    os.close(file)


def _parents_cpu() -> float:
    """Processor time of whoever has started this process, such as torchrun."""
    with open(f"/proc/{os.getppid()}/stat") as file:  # noqa: PTH123  pathlib is not imported yet
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class _Marking:
    """A finder that finds nothing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _MARKED:
            _mark(f"import {name}")


if _FOLDER and os.environ.get("SLURM_PROCID", "0") == "0":
    _mark("interpreter")
    sys.meta_path.insert(0, _Marking)
    os.register_at_fork(before=lambda: _mark("fork"))
