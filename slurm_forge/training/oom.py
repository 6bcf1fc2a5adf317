"""Telling an out-of-memory error from every other one.  Needs no torch."""

from __future__ import annotations

__all__ = ["is_out_of_memory"]

#: Texts of allocators that raise a plain RuntimeError: torch's CPU allocator, cuBLAS, cuDNN, NCCL.
_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIP out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch may cure it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in names:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
