"""A made-up accelerator: ``torch.device("sim")``, and ``simccl`` for collectives.

torch imports it by itself where it is on the path (``TORCH_DEVICE_BACKEND_AUTOLOAD``).
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from datetime import timedelta
from pathlib import Path

import torch

_HERE = Path(__file__).parent


def register() -> None:
    """Have torch know it; once per process."""
    if "torch.sim" in sys.modules:
        return
    # Its symbols are the other library's, too.
    ctypes.CDLL(str(_HERE / "_backend.so"), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(_HERE / "_backend.so"))
    torch.utils.rename_privateuse1_backend("sim")
    from simdev import device_module

    sys.modules["torch.sim"] = device_module
    torch._register_device_module("sim", device_module)
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(torch.ops.sim.stop)
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("simccl", _make_group, devices=["sim"])


def _make_group(
    store: torch.distributed.Store, rank: int, size: int, timeout: timedelta
) -> torch.distributed.ProcessGroup:
    from simdev import _group

    # gloo's own limit comes later than that of the watchdog, which is the one to speak.
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout * 2 + timedelta(hours=1))
    return _group.make_group(rank, size, timeout, gloo)
