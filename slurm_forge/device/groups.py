"""Process groups by the device: which backend carries tensors of a device, and its options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions

from slurm_forge.device.accelerator import is_accelerator

_HOST_BACKEND = "gloo"


def backend_for(device: torch.device) -> str:
    """What torch uses for a type of device: ``nccl`` (RCCL on ROCm, too), ``xccl``, ``gloo``.

    The table is torch's own, to which a backend of somebody else's adds itself
    (``dist.Backend.register_backend(…, devices=…)``).

    Raises:
        RuntimeError: No backend is registered for this type.
    """
    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise RuntimeError(
            f"torch.distributed knows no backend for devices of type {device.type}: import the "
            "package that registers it before the run starts"
        )
    return backend


def backends_for(device: torch.device) -> str:
    """The same for a group that carries tensors of the host, too: ``cpu:gloo,cuda:nccl``."""
    if not is_accelerator(device):
        return _HOST_BACKEND
    return f"cpu:{_HOST_BACKEND},{device.type}:{backend_for(device)}"


def bound_device(device: torch.device) -> torch.device | None:
    """The ``device_id`` of a process group: its communicator is made at once, for this device.

    None where torch would then refuse the groups of gloo beside it: it looks for the device in
    these, too, and gloo has no others than CUDA's (``_new_process_group_helper``).
    """
    known_to_gloo = dist.Backend.backend_capability[_HOST_BACKEND]
    return device if is_accelerator(device) and device.type in known_to_gloo else None


def small_group(
    device: torch.device, *, timeout: timedelta, ctas: int, description: str
) -> dist.ProcessGroup:
    """A communicator of its own that takes few of the device's processors while it is under way.

    Collective over all ranks.  ``ctas`` is for NCCL (``min_ctas`` and ``max_ctas``, NCCL 2.17);
    others have no such option.  Written from torch's source, untried on a GPU.
    """
    backend = backend_for(device)
    options: Any = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.min_ctas = options.config.max_ctas = ctas
    group: dist.ProcessGroup = dist.new_group(
        backend=backend, timeout=timeout, pg_options=options, group_desc=description
    )
    return group


def standalone_group(store: Store, rank: int, size: int, backend: str, timeout: timedelta) -> Any:
    """A group that is registered nowhere, for a trial before training.

    Returns:
        What has the collectives of a ``ProcessGroup``: torch's stubs give backends no such type.
    """
    if backend == _HOST_BACKEND:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    registered = dist.Backend._plugins.get(backend.upper())
    if registered is not None:
        return _registered(registered, store, rank, size, timeout)
    made: Callable[..., Any] = getattr(dist, f"ProcessGroup{backend.upper()}")
    return made(store, rank, size)


def _registered(plugin: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """What a package has registered, by either of the two ways that torch lets it be made."""
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.timeout = store, timeout
    options.group_rank, options.group_size = rank, size
    return plugin.creator_fn(options, None)


def time_collectives(group: dist.ProcessGroup) -> None:
    """Have the backend record when each collective began and ended there, if it can (NCCL)."""
    with contextlib.suppress(AttributeError, RuntimeError):
        group._enable_collectives_timing()  # type: ignore[attr-defined]


def seconds_on_device(work: dist.Work) -> float | None:
    """How long a collective took there, where that was recorded."""
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        return float(work._get_duration()) / 1e3 or None  # type: ignore[attr-defined]
    return None


def abort_group(group: dist.ProcessGroup) -> None:
    """End what is under way in a group, which takes no more collectives; every rank calls it.

    It may wait for the others (NCCL).  Nothing where this torch or the backend can't.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        group.abort()


def nccl_version() -> str:
    """Of the library that torch was built with: NCCL's, or RCCL's on ROCm."""
    parts: tuple[object, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(part) for part in parts)
