"""``torch.sim``: by the names of ``torch.cuda``, and what tests do to the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

_ops = torch.ops.sim


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


# -- devices -----------------------------------------------------------------------------------


def is_available() -> bool:
    """Asks the driver, after which no child may use the device, as ``torch.cuda`` does."""
    return _ops.is_available()


def device_count() -> int:
    """Asks no driver, as ``torch.cuda`` does not where NVML answers."""
    return _ops.device_count()


def is_initialized() -> bool:
    return _ops.is_initialized() and device_count() > 0


def init() -> None:
    _ops.init()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _ops.in_bad_fork()


def current_device() -> int:
    init()
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Any) -> None:
    if _index(device) >= 0:
        init()
        torch._C._accelerator_setDeviceIndex(_index(device))


class device:
    """The current device inside of it."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device) if device is not None else -1
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *args: object) -> None:
        set_device(self._before)


def get_device_name(device: Any = None) -> str:
    init()
    _ops.budget(_index(device))  # a device that is lost has no name
    return "Simulated accelerator"


def synchronize(device: Any = None) -> None:
    init()
    torch._C._accelerator_synchronizeDevice(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# -- streams and events ------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of its own."""

    def __new__(cls, device: Any = None, priority: int = 0, **of: Any) -> Stream:
        if of:
            return super().__new__(cls, priority=priority, **of)
        return super().__new__(cls, device=f"sim:{_index(device)}", priority=priority)


#: Not a subclass: torch's events measure time to others of their own type alone.
Event = partial(torch.Event, "sim")


def current_stream(device: Any = None) -> torch.Stream:
    init()
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=20)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream()
    there = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(there)
        set_stream(before)


def is_current_stream_capturing() -> bool:
    return False


# -- random numbers ----------------------------------------------------------------------------


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        if not 0 <= index < device_count():
            raise IndexError(index)
        return _ops.default_generator(index)

    def __len__(self) -> int:
        return device_count()


default_generators = _Generators()


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    init()
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "sim") -> None:
    init()
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    init()
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generators[index].manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


# -- memory ------------------------------------------------------------------------------------


def memory_stats(device: Any = None) -> dict[str, int]:
    init()
    names = (
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "reserved_bytes.all.peak",
        "allocation.all.current",
        "num_alloc_retries",
        "num_ooms",
    )
    return dict(zip(names, _ops.memory(_index(device)), strict=True))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    init()
    total = _ops.budget(_index(device))
    return total - memory_reserved(device), total


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _ops.reset_peaks(_index(device))


def empty_cache() -> None:
    if is_initialized():
        torch._C._accelerator_emptyCache()


def memory_snapshot() -> list[dict[str, Any]]:
    return [
        {
            "device": index,
            "blocks": [{"size": size, "state": "active_allocated"} for size in _ops.blocks(index)],
        }
        for index in range(device_count())
    ]


# -- what tests do to it -----------------------------------------------------------------------


class Counts(NamedTuple):
    """Since ``reset_counts``: kernels, times that the host waited, copies to and from the host."""

    launches: int
    waits: int
    copies_async: int
    copies_waiting: int


def counts(device: Any = None) -> Counts:
    return Counts(*_ops.counts(_index(device)))


def wait_reasons(device: Any = None) -> list[str]:
    """What the host waited for, each time."""
    return _ops.reasons(_index(device))


reset_counts = _ops.reset_counts
#: Seconds that an idle stream waits before it begins, unless somebody waits for it.
set_latency = _ops.set_latency
#: Seconds that each kernel begins later, at most, by chance: another order of streams each time.
set_jitter = _ops.set_jitter
#: Work that hangs on the current stream, until ``release_hangs``.
hang = _ops.hang
release_hangs = _ops.release_hangs
show_devices = _ops.show_devices
stop = _ops.stop


def set_budget(size: int, device: Any = None) -> None:
    """How many bytes the device has."""
    _ops.set_budget(_index(device), size)


@contextmanager
def held() -> Iterator[None]:
    """The device begins no more work inside; a wait of this thread is an error."""
    _ops.hold(True)
    try:
        yield
    finally:
        _ops.hold(False)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Any wait of this thread is an error inside."""
    _ops.forbid_waits(True)
    try:
        yield
    finally:
        _ops.forbid_waits(False)


#: By CUDA's numbers and words (cudaError_t).
FAULTS = {
    "ecc": (214, "uncorrectable ECC error encountered"),
    "assert": (710, "device-side assert triggered"),
    "launch": (719, "unspecified launch failure"),
    "lost": (999, "unknown error"),
}


def inject(fault: str | None) -> None:
    """Once the current stream comes to it, the device fails for good, or the kernel hangs."""
    if fault == "hang":
        hang()
    elif fault is not None:
        _ops.fail(*FAULTS[fault])
