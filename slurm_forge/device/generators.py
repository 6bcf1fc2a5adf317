"""The random states of devices: those that dropout draws from."""

from __future__ import annotations

import torch

from slurm_forge.device.accelerator import in_use, is_accelerator, kind, module_of


def may_be_state(value: object) -> bool:
    """Whether it may be the state of a device, of this machine's or of another one's.

    A checkpoint keeps it under the type of the device, which this torch need not know: a backend of
    somebody else's gives it its name.
    """
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def current_state() -> tuple[str, torch.Tensor] | None:
    """Key and state of the current device, copied to the host; None where it isn't in use."""
    device = in_use()
    if device is None:
        return None
    return device.type, module_of(device).get_rng_state().clone()


def state_size(key: str) -> int | None:
    """Bytes of a state under this key on this machine; None where it has no such device."""
    device = kind()
    if device is None or device.type != key:
        return None
    return int(module_of(device).get_rng_state().numel())


def restore_state(state: torch.Tensor) -> None:
    """Put the current device into a state of its kind.

    Raises:
        RuntimeError: It is not one.
    """
    device = kind()
    if device is not None:
        module_of(device).set_rng_state(state.cpu())


def seed_device(seed: int) -> None:
    """Seed the current device, where it is in use."""
    device = in_use()
    if device is not None:
        module_of(device).manual_seed(seed)


def index_of(device: torch.device) -> int:
    """The index of a device, of the current one where it names none."""
    return int(module_of(device).current_device()) if device.index is None else device.index


def state_of(device: torch.device) -> torch.Tensor | None:
    """The state of one device, copied without waiting for it; None on a CPU."""
    if not is_accelerator(device):
        return None
    state: torch.Tensor = module_of(device).default_generators[index_of(device)].get_state()
    return state


def put_state(device: torch.device, state: torch.Tensor) -> None:
    """Give it back."""
    module_of(device).default_generators[index_of(device)].set_state(state)
