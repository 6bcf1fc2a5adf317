"""What an accelerator and its software are, by name and version."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from slurm_forge.device.accelerator import is_accelerator, name_of
from slurm_forge.device.groups import nccl_version

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def device_versions(device: torch.device) -> dict[str, Callable[[], object]]:
    """Facts that a result may depend on, each asked for by a function that may fail.

    ``gpu`` is ``none`` on a CPU.  The keys stay what they were when CUDA was the only kind.
    """
    if not is_accelerator(device):
        return {"gpu": lambda: "none"}
    facts: dict[str, Callable[[], object]] = {"gpu": lambda: name_of(device)}
    if device.type == "cuda":
        hip = getattr(torch.version, "hip", None)
        facts |= {
            "cuda": lambda: f"ROCm {hip}" if hip else torch.version.cuda,
            "cudnn": torch.backends.cudnn.version,
            "nccl": nccl_version,
            "driver": lambda: driver_version(_NVIDIA_DRIVER.read_text("utf-8", "replace")),
        }
    elif device.type == "xpu":
        facts["xpu"] = lambda: getattr(torch.version, "xpu", None)
    return facts


def driver_version(text: str) -> str:
    """``550.54.15`` from what ``/proc/driver/nvidia/version`` says; empty if it does not."""
    match = re.search(r"\s([0-9]{2,}(?:\.[0-9]+)+)\s", text)
    return match[1] if match else ""
