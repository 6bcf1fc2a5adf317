"""Recognize out-of-memory errors, and whose memory ran out.  Needs no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import Enum

from slurm_forge.errors import ForgeError


class Memory(str, Enum):
    """Whose memory: each has another remedy."""

    #: The accelerator's: only a smaller micro-batch helps.
    DEVICE = "device"
    #: The node's: more of it, fewer loader workers, or (training on CPUs) a smaller micro-batch.
    HOST = "host"


class LoaderKilledError(ForgeError):
    """A data-loader worker was killed by a signal; ``for_memory``: by the kernel, for memory."""

    def __init__(self, message: str, *, next_step: str, for_memory: bool) -> None:
        super().__init__(message, next_step=next_step)
        self.for_memory = for_memory


#: Texts of plain RuntimeErrors.  From PyTorch, cuBLAS, cuDNN, cuSOLVER, cuFFT, and NCCL (which only
#: forwards CUDA's message).
_DEVICE_TEXTS = (
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # Creating a handle needs memory, and no other reason is common.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "HIPBLAS_STATUS_NOT_INITIALIZED",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]: out of memory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)
_HOST_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "unable to allocate shared memory",
    "Cannot allocate memory",
)
#: Limit for chains of causes: programs build no longer ones.
_DEEPEST = 16


def memory_that_ran_out(error: BaseException) -> Memory | None:
    """Which memory an exception, or what it was raised from, is about; None for other errors.

    An exception raised while an out-of-memory error was being handled is a consequence of it.
    """
    return next((kind for each in _chain(error) if (kind := _kind(each)) is not None), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_DEEPEST):
        if current is None:
            return
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )


def _kind(error: BaseException) -> Memory | None:
    if isinstance(error, LoaderKilledError):
        return Memory.HOST if error.for_memory else None
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return Memory.HOST
    if "OutOfMemoryError" in {kind.__name__ for kind in type(error).__mro__}:
        return Memory.DEVICE
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if any(words in text for words in _DEVICE_TEXTS):
        return Memory.DEVICE
    return Memory.HOST if any(words in text for words in _HOST_TEXTS) else None
