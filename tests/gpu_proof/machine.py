"""``python -m tests.gpu_proof.machine``: what this machine computes with, as JSON.

In a process of its own: to ask a driver for its devices forbids to use them in a forked child.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import slurm_forge
from slurm_forge.device.accelerator import count, device_at, kind
from slurm_forge.device.groups import backends_for
from slurm_forge.device.identity import device_versions

_ROOT = Path(__file__).parents[2]


def facts() -> dict[str, str]:
    """The device, its software, and what of slurm_forge is proven; ``devices`` is their number."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "device": "no accelerator",
        "devices": str(count()),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "slurm_forge": f"{slurm_forge.__version__} at {_commit()}",
    }
    if kind() is not None:
        device = device_at(0)
        for name, ask in device_versions(device).items():
            try:
                found["device" if name == "gpu" else name] = str(ask())
            except Exception as error:  # a fact that can't be had is no failure of the proof
                found[name] = f"unknown ({error})"
        found["type"] = device.type
        found["process group"] = backends_for(device)
    return found


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        check=False,
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    return asked.stdout.strip() or "an unknown commit"


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
