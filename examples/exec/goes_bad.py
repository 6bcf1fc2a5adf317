"""A program whose loss becomes NaN once, at step 30 of its first start.

usage: goes_bad.py OUT STEPS [CHECKPOINT]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Train, from the checkpoint if one is given."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    rank = os.environ.get("SLURM_PROCID", "0")
    out.mkdir(parents=True, exist_ok=True)
    first, good = 1, True
    if len(sys.argv) > 3:
        first = int(sys.argv[3].rpartition("-")[2]) + 1
        good = Path(sys.argv[3]).read_text() == "good"
    first_time = out / f"bad-{rank}"
    for step in range(first, steps + 1):
        time.sleep(0.1)
        if step == 30 and not first_time.exists():
            good = False
            first_time.touch()
        if step % 10 == 0 and rank == "0":
            (out / f"c-{step}").write_text("good" if good else "bad")
        sys.stdout.write(f"step {step} loss {1 / step if good else float('nan'):.4f}\n")
        with (out / f"steps-{rank}").open("a") as log:
            log.write(f"{step} {os.getpid()}\n")
    (out / f"result-{rank}").write_text("good" if good else "bad")


if __name__ == "__main__":
    main()
