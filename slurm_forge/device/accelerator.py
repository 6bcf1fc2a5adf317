"""Which accelerator there is, which of its devices a rank takes, and whether it is in use."""

from __future__ import annotations

from typing import Any

import torch

#: Types whose work is done when the call returns, as far as this package is concerned: MPS has no
#: Slurm.
_HOST = frozenset({"cpu", "meta", "mps"})
_CPU = torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Whether work for this device is queued, and done later than the call that asks for it."""
    return device.type not in _HOST


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on such a device."""
    return tensor.device.type not in _HOST


def module_of(device: torch.device) -> Any:
    """The device module: ``torch.cuda``, ``torch.xpu``, or that of a registered backend.

    Raises:
        RuntimeError: No module is registered for this type.
    """
    return torch.get_device_module(device)


def built_for() -> tuple[torch.device, ...]:
    """The types that this torch computes on beside the CPU, without an index; the preferred first.

    No driver is asked for a device.  The current accelerator of ``torch.accelerator`` is found in
    torch 2.6 by asking CUDA's, after which no child may use it (pytorch issue 144152).
    """
    types = [name for name in ("cuda", "xpu") if getattr(torch, name)._is_compiled()]
    registered = torch._C._get_privateuse1_backend_name()
    if hasattr(torch, registered):
        types.append(registered)
    return tuple(map(torch.device, types))


def kind() -> torch.device | None:
    """The type of accelerator that this machine has, without an index; None where it has none.

    Not before a fork whose child is to use it: unless NVML answers, CUDA's driver is asked, which
    forbids that (torch/accelerator/__init__.py).
    """
    return next((each for each in built_for() if module_of(each).is_available()), None)


def count() -> int:
    """How many devices are visible."""
    device = kind()
    return 0 if device is None else int(module_of(device).device_count())


def device_at(index: int) -> torch.device:
    """The device of a local rank; devices are shared where there are more ranks than devices.

    Raises:
        RuntimeError: There is no accelerator.
    """
    device = kind()
    if device is None:
        raise RuntimeError("there is no accelerator: ask kind() first")
    return torch.device(device.type, index % count())


def choose_device(local_rank: int) -> torch.device:
    """This rank's device, made the current one; the CPU where there is no accelerator."""
    if kind() is None:
        return _CPU
    device = device_at(local_rank)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Have this thread use the device; nothing on a CPU."""
    if is_accelerator(device):
        module_of(device).set_device(device)


def in_use() -> torch.device | None:
    """The type of accelerator that this process has initialised; None where it has not.

    To ask a generator would initialise it, which costs memory and forbids forking.
    """
    return next((each for each in built_for() if module_of(each).is_initialized()), None)


def is_usable_here() -> bool:
    """Whether this process may use a device: not where it was forked from one that had begun to.

    No driver is asked: one that may not be used says that there is no device.
    """
    return not any(module_of(each)._is_in_bad_fork() for each in built_for())


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued; errors of the device are raised here.  Nothing on a CPU."""
    if is_accelerator(device):
        module_of(device).synchronize(device)


def name_of(device: torch.device) -> str:
    """What the driver calls it; ``cpu`` for a CPU."""
    if not is_accelerator(device):
        return device.type
    return str(module_of(device).get_device_name(device))


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a graph, so that nothing may wait or copy to the host."""
    if not is_accelerator(device):
        return False
    capturing = getattr(module_of(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def exactness_of(device: torch.device) -> str:
    """The type whose precision a float32 loss has: autocast and TF32 leave bfloat16's."""
    return "bfloat16" if is_accelerator(device) else "float32"


def widest_float(device: torch.device) -> torch.dtype:
    """float64, where the device computes with it: MPS does not."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_device(device: torch.device) -> torch.device:
    """Where float64 can be kept: the device, or the host instead of MPS."""
    return _CPU if device.type == "mps" else device
