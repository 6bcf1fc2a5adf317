"""A program that ignores SIGTERM.  It saves every few steps, and goes on from what it finds."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path


def main(folder: Path, steps: int) -> None:
    """Usage: deaf.py FOLDER STEPS."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder.mkdir(parents=True, exist_ok=True)
    saved = sorted(int(path.name.partition("-")[2]) for path in folder.glob("state-*"))
    step = saved[-1] if saved else 0
    while step < steps:
        time.sleep(0.1)
        step += 1
        print(f"step {step}", flush=True)
        if step % 10 == 0:
            (folder / f"state-{step}").touch()
    (folder / "result").write_text(f"{step}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
