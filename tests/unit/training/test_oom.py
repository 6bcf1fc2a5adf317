"""Out of memory or not, and whose: by what PyTorch, its libraries and the kernel really say."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_forge.errors import CheckpointMissingError, ForgeError
from slurm_forge.training.core.error_report import cause_of
from slurm_forge.training.core.oom import (
    LoaderKilledError,
    Memory,
    memory_that_ran_out,
)
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.training.data.batches import BatchSource
from slurm_forge.training.data.loader import _death_of
from slurm_forge.vocabulary.cause import Cause
from tests.distributed.ranks import run_ranks

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
DEVICE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
]
HOST = [
    MemoryError(),
    RuntimeError(CPU_ALLOCATOR),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("unable to mmap 1024 bytes from file </x>: Cannot allocate memory (12)"),
]
OTHER = [
    RuntimeError("shape '[3]' is invalid for input of size 4"),
    ValueError("CUDA out of memory in a text of somebody's"),
    RuntimeError("CUDA error: device-side assert triggered"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", DEVICE, ids=str)
def test_the_accelerator_s_memory(error: BaseException) -> None:
    assert memory_that_ran_out(error) is Memory.DEVICE
    assert cause_of(error) is Cause.CUDA_OOM


@pytest.mark.parametrize("error", HOST, ids=repr)
def test_the_host_s_memory(error: BaseException) -> None:
    assert memory_that_ran_out(error) is Memory.HOST
    assert cause_of(error) is Cause.HOST_OOM


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_other_errors(error: BaseException) -> None:
    assert memory_that_ran_out(error) is None
    assert cause_of(error) not in (Cause.CUDA_OOM, Cause.HOST_OOM)


def test_what_this_torch_says_itself() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert cause_of(caught.value) is Cause.HOST_OOM


def test_an_error_raised_from_one_is_one_and_so_is_what_broke_while_it_was_handled() -> None:
    def handled(then: str) -> BaseException:
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                if then == "from":
                    raise ValueError("the model is too large") from error
                if then == "beside":
                    raise KeyError("cleaning up")  # noqa: B904
                raise CheckpointMissingError("x", next_step="y") from None
        except Exception as error:
            return error

    assert cause_of(handled("from")) is cause_of(handled("beside")) is Cause.CUDA_OOM
    assert cause_of(handled("hidden")) is Cause.CHECKPOINT_BAD
    endless = ValueError("a")
    endless.__cause__ = endless
    assert memory_that_ran_out(endless) is None


def test_a_killed_loader_worker_is_about_memory_where_the_kernel_says_so() -> None:
    told = _death_of(1, 77, -9, "oom_kill from 0 to 1 in /g")
    assert isinstance(told, LoaderKilledError)
    assert cause_of(told) is Cause.HOST_OOM
    assert "oom_kill from 0 to 1" in str(told)
    assert cause_of(_death_of(1, 77, -9, None)) is Cause.CRASH
    assert cause_of(_death_of(1, 77, -11, "oom_kill from 0 to 1 in /g")) is Cause.CRASH
    assert "/dev/shm" in str(_death_of(1, 77, -7, None))
    assert cause_of(_death_of(1, 77, 3, None)) is Cause.APP_ERROR


class Greedy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return len(bytearray(800 << 20))


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group of 300 MiB, where this machine lets us make one."""
    group = Path("/sys/fs/cgroup/memory") / f"forge-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
        with contextlib.suppress(OSError):
            (group / "memory.memsw.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no memory limit can be set here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_a_loader_worker_that_the_kernel_kills_is_told_from_one_that_somebody_kills(
    limited: Path,
) -> None:
    def body(rank: int) -> tuple[str, str]:
        (limited / "cgroup.procs").write_text(str(os.getpid()))
        source = BatchSource(
            Greedy(), SampleOrder(0, 8, 2), rank=0, ranks=1, micro_batch=2, num_workers=1
        )
        try:
            source.next_batch(interval=timedelta(milliseconds=20))
        except ForgeError as error:
            return cause_of(error).value, str(error)
        finally:
            source.close()
        return "", "nobody was killed"

    ((cause, text),) = run_ranks(1, body, init=False, timeout=60)
    assert cause == Cause.HOST_OOM.value, text
    assert "oom_kill from 0 to 1" in text
    assert limited.name in text
