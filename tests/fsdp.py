"""FSDP2's ``fully_shard`` on CPUs, on torch 2.6, too."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed import fsdp

fully_shard: Any = fsdp.fully_shard

if not hasattr(torch.cpu.Stream, "record_event"):
    # Torch 2.6 gives FSDP2 what it calls of a stream on accelerators alone; and on CPUs autograd
    # takes parameters that are gathered a second time for changed ones.
    fully_shard = functools.partial(fsdp.fully_shard, reshard_after_forward=False)

    def _record_event(stream: Any) -> torch.cpu.Event:
        return torch.cpu.Event()

    def _wait_event(stream: Any, event: Any) -> None: ...

    torch.cpu.Stream.record_event = _record_event
    torch.cpu.Stream.wait_event = _wait_event
