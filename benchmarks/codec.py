"""What a line of the control channel costs, and what its codec adds to the start of a process.

    python -m benchmarks.codec [--rounds 5] [--calls 5000] [--json FILE]

Processor time, so that other load does not count.  The lines are those of the golden file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.tables import Machine, Spread, spread, table, write_json
from slurm_forge.control.messages import protocol

_LINES = Path(__file__).resolve().parents[1] / "tests/golden/files/control.jsonl"
#: What comes every second, or whenever all ranks agree on a step.
_FREQUENT = ("beat", "pulse", "at", "paced", "publish")
#: A rank and what is started beside it; the agent preloads everything, pydantic too.
_PROCESSES = {
    "rank": "slurm_forge.training.rank.main",
    "agent": "slurm_forge.training.agent.main",
    "monitor": "slurm_forge.training.monitor.main",
    "shield": "slurm_forge.launch.supervisor.signal_shield",
}


@dataclass(frozen=True, slots=True)
class LineCost:
    """A message's line, and microseconds of processor time to read and to write it."""

    bytes: int
    decode_us: Spread
    encode_us: Spread


def per_call_us(call: Callable[[], object], calls: int, rounds: int) -> Spread:
    """Microseconds of processor time for one call, over the rounds."""
    call()

    def once() -> float:
        began = time.process_time()
        for _ in range(calls):
            call()
        return (time.process_time() - began) / calls * 1e6

    return spread(once() for _ in range(rounds)) or Spread(0, 0, 0, 0)


def import_ms(module: str, rounds: int) -> Spread:
    """Milliseconds of processor time until a fresh interpreter has imported the module."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return used * 1e3

    once()  # compiles
    return spread(once() for _ in range(rounds)) or Spread(0, 0, 0, 0)


def main() -> int:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    messages = {}
    for line in _LINES.read_bytes().splitlines():
        word = json.loads(line)["m"]
        if word in _FREQUENT:
            message = protocol.decode(line)
            decode = per_call_us(partial(protocol.decode, line), asked.calls, asked.rounds)
            encode = per_call_us(partial(protocol.encode, message), asked.calls, asked.rounds)
            messages[word] = LineCost(len(line), decode, encode)
    starts = {name: import_ms(module, asked.rounds) for name, module in _PROCESSES.items()}
    machine = Machine.measured(load, began)
    rows = [
        (word, str(each.bytes), each.decode_us.text(1), each.encode_us.text(1))
        for word, each in messages.items()
    ]
    print(table(("message", "bytes", "decode us", "encode us"), rows))
    print()
    print(
        table(
            ("process", "import, cpu ms"), [(name, each.text(0)) for name, each in starts.items()]
        )
    )
    print(f"\n{machine.text()}")
    write_json(
        asked.json,
        {
            "machine": asdict(machine),
            "messages": {word: asdict(each) for word, each in messages.items()},
            "import_ms": {name: asdict(each) for name, each in starts.items()},
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
