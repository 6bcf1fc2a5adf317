"""The habits of a Hugging Face Trainer, in small: checkpoint-N folders, and a flag to resume.

Saves every ``--save_steps`` and at SIGTERM (``enable_jit_checkpoint``), then exits 0 either way.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path

asked: list[int] = []


def on_term(number: int, frame: object) -> None:
    """The next step saves and leaves."""
    asked.append(number)


def save(folder: Path, step: int, total: int) -> None:
    """As transformers does: in place, with a mark in it until it is whole."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    mark = checkpoint / "checkpoint-is-incomplete.txt"
    mark.touch()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"step": step, "total": total}))
    mark.unlink()


def main() -> None:
    """Add up the numbers of the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--resume_from_checkpoint", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_term)
    step = total = 0
    if args.resume_from_checkpoint is not None:
        state = json.loads((args.resume_from_checkpoint / "trainer_state.json").read_text())
        step, total = state["step"], state["total"]
        print(f"resumed at {step}", flush=True)
    while step < args.max_steps:
        time.sleep(0.1)
        step += 1
        total += step
        print(f"{{'step': {step}}}", flush=True)
        if asked or step % args.save_steps == 0:
            save(args.output_dir, step, total)
        if asked:
            return
    (args.output_dir / "all_results.json").write_text(json.dumps({"total": total}))


if __name__ == "__main__":
    main()
