"""Copy a state into the arena: at memory speed, and no slower while others compute.

torch copies a large tensor on all of its threads and waits for the last of them; with training on
the same cores that means a wait of milliseconds per tensor.  Here a few threads each take the next
piece.  torch's own number of threads is not changed: it belongs to the program and can affect its
results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from slurm_forge.device.accelerator import on_accelerator
from slurm_forge.errors import CheckpointError

#: Below this size torch copies on the calling thread.
_SMALL = 64 << 10
_PIECE = 8 << 20
#: The writer is notified after this many bytes.
_STRETCH = 32 << 20
_MOST_THREADS = 4


class Filling:
    """How far the arena is filled, from its beginning; another thread writes it out."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._until = 0
        self._promised: tuple[int, Callable[[], None]] | None = None
        self._error: BaseException | None = None

    def reach(self, until: int) -> None:
        """The first ``until`` bytes are filled."""
        with self._condition:
            self._until = until
            self._condition.notify_all()

    def promise(self, until: int, arrive: Callable[[], None]) -> None:
        """The first ``until`` bytes are filled once ``arrive``, called by the waiter, returns."""
        with self._condition:
            self._promised = (until, arrive)
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more bytes will be filled."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def wait(self, until: int) -> None:
        """Return when the first ``until`` bytes are filled; raise the error passed to ``fail``."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._until >= until or self._promised or self._error is not None
            )
            if isinstance(self._error, Exception):
                raise self._error
            if self._error is not None:  # the waiter must inform others, so it is not unwound
                raise CheckpointError(
                    f"the copy was interrupted by {type(self._error).__name__}",
                    next_step="The checkpoint before it is untouched.",
                ) from self._error
            if self._until < until and self._promised is not None:
                self._promised[1]()
                self._until = self._promised[0]


class Copier:
    """Copies lists of tensors of equal shapes and dtypes; keeps its threads."""

    def __init__(self) -> None:
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="forge-copy")

    def copy(
        self,
        into: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        ends: Sequence[int],
        filling: Filling,
    ) -> None:
        """Copy one after another; ``ends`` are the fill levels of the arena after each.

        Copies from a device may still be in progress on its current stream: ``filling`` gets no
        level beyond the first of them.
        """
        begin = size = 0
        on_host = True
        for number, source in enumerate(sources):
            size += source.nbytes
            if size < _STRETCH and number + 1 < len(sources):
                continue
            stretch = slice(begin, number + 1)
            on_host = self._stretch(into[stretch], sources[stretch]) and on_host
            if on_host:
                filling.reach(ends[number])
            begin, size = number + 1, 0

    def _stretch(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
        """Copy a few; whether all of them are complete."""
        rest_into, rest, pieces = [], [], []
        for target, source in zip(into, sources, strict=True):
            if source.nbytes > _SMALL and _is_plain(source):
                target_bytes, source_bytes = _bytes(target), _bytes(source)
                pieces += [
                    (target_bytes[at : at + _PIECE], source_bytes[at : at + _PIECE])
                    for at in range(0, len(target_bytes), _PIECE)
                ]
            else:
                rest_into.append(target)
                rest.append(source)
        running = [self._threads.submit(np.copyto, *piece) for piece in pieces]
        if rest:
            with torch.no_grad():
                # Otherwise nothing would signal that a copy is complete.
                late = all(source.is_cpu or on_accelerator(source) for source in rest)
                torch._foreach_copy_(rest_into, rest, non_blocking=late)
        for each in running:
            each.result()
        return not any(on_accelerator(source) for source in rest)


def _is_plain(source: torch.Tensor) -> bool:
    """Whether its values are contiguous in host memory as they are."""
    lazy = source.is_conj() or source.is_neg()
    return source.is_cpu and source.is_contiguous() and not lazy


def _bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    view: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
        tensor.detach().reshape(-1).view(torch.uint8).numpy()
    )
    return view
