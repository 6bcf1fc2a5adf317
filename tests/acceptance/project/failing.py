"""Trainings in which something of the user's own is wrong."""

from __future__ import annotations

from pathlib import Path

from train import train

import slurm_forge as forge


def broken(run: forge.Run, steps: int = 20) -> None:
    """Raises until somebody makes the file ``mended`` beside it."""
    if not (Path(__file__).parent / "mended").exists():
        raise ValueError("the shards of the data are missing")
    train(run, steps=steps)
