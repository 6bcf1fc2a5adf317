"""Where micro-batches are made: in this process, or in data-loader workers.

Both give the same micro-batches for the same samples.  Both remain responsive while they are waited
for: a ``Polling`` is called in between, and an exception it raises loses nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from slurm_forge.errors import ForgeError, UsageError
from slurm_forge.slurm.kernel import OomKills, killed_since, read_oom_kills
from slurm_forge.training.core.host_generators import (
    ALL_GENERATORS,
    HostGenerator,
    HostStates,
    SampleRandomness,
)
from slurm_forge.training.core.oom import LoaderKilledError
from slurm_forge.training.core.sample_order import SampleId
from slurm_forge.training.data.item_digest import item_digest
from slurm_forge.training.data.worker_shield import (
    children_deaf_from_birth,
    shield_worker,
)

#: The samples of one step: a list for each micro-batch.
StepIds = list[list[SampleId]]

#: Finished steps that wait for the training loop, besides the workers' own prefetching.
STEPS_READY = 2
#: How soon the fetching thread notices that it must end, in seconds.
_TICK_S = 0.1
#: How long a worker may take to end before a harder method is used, in seconds.
_PATIENCE_S = 0.2
#: Limits in seconds: a faster sample is worth selective seeding, a slower one is fetched no more
#: often than necessary; samples are fetched this long without a look at other work.
_QUICK_S, _SLOW_S, _AT_ONCE_S = 0.002, 0.05, 0.02
#: How often the first sample is fetched: each generator may appear only once the last is seeded.
_FETCHES = 5


class Polling:
    """Calls ``poll`` when about ``interval`` has passed since the last time."""

    def __init__(self, poll: Callable[[], None] | None, interval: timedelta) -> None:
        self._poll, self._interval = poll, interval.total_seconds()
        self._next = time.monotonic() + self._interval

    def is_due(self) -> bool:
        """Whether the interval has passed."""
        return self._poll is not None and time.monotonic() >= self._next

    def poll(self) -> None:
        """Call it now and begin a new interval."""
        if self._poll is not None:
            self._poll()
        self._next = time.monotonic() + self._interval

    def wait_s(self) -> float:
        """How long to wait at a time, in seconds."""
        return max(self._interval, 0.001)


class MicroBatchMaker:
    """Makes a micro-batch from sample ids: the dataset's samples, seeded one by one, collated.

    If samples are fast, only the generators that the dataset draws from are seeded.  A dataset that
    draws from none is asked for all samples at once, if it has ``__getitems__``; with randomness in
    it, the result would depend on which samples come together.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self.randomness = SampleRandomness(seed)
        self._collate_fn = collate_fn
        self._has_getitems = getattr(dataset, "__getitems__", None) is not None
        #: A collate function of the program's may draw, or use a seed, in any call: always seeded.
        self.seeds_collate = collate_fn is not default_collate
        self._at_once: int | None = None

    def __getitem__(self, ids: Sequence[SampleId]) -> Any:
        """The micro-batch of these samples; ``DataLoader`` workers call this."""
        before = self.randomness.generators.states()
        while True:
            try:
                samples = self.samples(ids)
            except Exception:
                if self.learned(before):
                    continue
                raise
            if not self.learned(before):
                return self.collate(ids, samples)

    def learned(self, before: HostStates, drawn: frozenset[HostGenerator] = frozenset()) -> bool:
        """Whether an unseeded generator was drawn from, since then or among ``drawn``.

        What was made must then be made again.
        """
        randomness = self.randomness
        if randomness.used == ALL_GENERATORS:
            return False
        if not randomness.generators.are_unchanged(before):
            drawn |= randomness.generators.drawn(before)
        return bool(drawn) and randomness.learn(drawn)

    @property
    def draws(self) -> bool:
        """Whether a micro-batch changes generators, as far as is known."""
        return bool(self.randomness.used) or self.seeds_collate

    def at_once(self, sample: SampleId) -> int:
        """How many such samples are fetched in about 20 ms."""
        if self._at_once is None:
            self._examine(sample)
        return self._at_once or 1

    def samples(self, ids: Sequence[SampleId]) -> list[Any]:
        """These samples, in order, each with its own randomness."""
        if self._at_once is None:
            self._examine(ids[0])
        dataset, randomness = self.dataset, self.randomness
        if randomness.used:
            samples = []
            for epoch, index in ids:
                randomness.begin(epoch, index)
                samples.append(dataset[index])
            return samples
        if not self._has_getitems:
            return [dataset[index] for _, index in ids]
        samples = list(dataset.__getitems__([index for _, index in ids]))
        if len(samples) != len(ids):
            raise UsageError(
                f"{type(self.dataset).__name__}.__getitems__ gave {len(samples)} samples for "
                f"{len(ids)} indices",
                next_step="Return one sample for each index, in order, or remove __getitems__.",
            )
        return samples

    def collate(self, ids: Sequence[SampleId], samples: list[Any]) -> Any:
        """Combine samples; collate functions draw random numbers, too (token masking)."""
        if self.seeds_collate:
            self.randomness.begin_collate(*ids[0])
        return self._collate_fn(samples)

    def _examine(self, sample: SampleId) -> None:
        """Learn which generators a sample depends on, by fetching it a few times.

        A slow one, or one that depends on the seed of a generator that it did not draw from (it may
        use the seed itself), gets all of them seeded: that costs 9 µs.
        """
        self._at_once = 1
        randomness, digests, quickest = self.randomness, list[str](), math.inf
        slowest = 0.0
        outside = randomness.generators.states()
        try:
            for seed in range(1, _FETCHES + 1):
                randomness.begin_otherwise(*sample, seed)
                before, began = randomness.generators.states(), time.perf_counter()
                item = self.dataset[sample[1]]
                took = time.perf_counter() - began
                quickest, slowest = min(quickest, took), max(slowest, took)
                if quickest > _SLOW_S:
                    break
                if self.learned(before):
                    digests.clear()
                else:
                    digests.append(item_digest(item))
            if self._has_getitems and not randomness.used:
                self._has_getitems = self._gives_same(sample, digests)
        except Exception:  # raised again by the following fetch
            digests.clear()
        finally:
            randomness.generators.put_back(outside)
        if quickest < _QUICK_S and len(digests) > 1 and len({"", *digests}) == 2:
            self._at_once += int(_AT_ONCE_S / max(slowest, 1e-6))
        else:
            randomness.use_all()

    def _gives_same(self, sample: SampleId, digests: list[str]) -> bool:
        """Whether ``__getitems__`` agrees with indexing: a subclass may change one of them."""
        rows = self.dataset.__getitems__([sample[1]])
        is_one = isinstance(rows, list | tuple) and len(rows) == 1
        return is_one and bool(digests) and item_digest(rows[0]) == digests[-1]


class InProcess:
    """Makes micro-batches on request, without affecting the caller's randomness."""

    def __init__(self, make: MicroBatchMaker, steps: Iterator[StepIds], *, pin: bool) -> None:
        self._make, self._steps, self._pin = make, steps, pin
        self._next_ids: StepIds | None = None
        #: The caller's generators, and those before the micro-batch in progress.
        self._before = self._clean = make.randomness.generators.states()
        #: What was drawn from for the micro-batch in progress, up to the last poll.
        self._drawn: frozenset[HostGenerator] = frozenset()

    def start(self) -> None:
        """Nothing to start."""

    def next_step(self, pace: Polling) -> tuple[StepIds, list[Any]]:
        """The next step's sample ids and micro-batches; polls between samples."""
        if self._next_ids is None:
            self._next_ids = next(self._steps)
        ids, randomness = self._next_ids, self._make.randomness
        parts: list[Any] = []
        work = self._work(ids, parts)
        while True:
            self._before = self._clean = randomness.generators.states()
            interrupted = True
            try:
                for _ in work:
                    if pace.is_due():
                        break
                else:
                    interrupted = False
            finally:
                # At the end of a micro-batch nothing else was drawn from.
                if interrupted or self._make.draws:
                    self._drawn |= randomness.generators.put_back(self._before)
            if not interrupted:
                break
            pace.poll()  # with the caller's random state, which may be saved in there
        self._next_ids = None
        return ids, parts

    def close(self) -> None:
        """Nothing to end."""

    def _work(self, ids: StepIds, parts: list[Any]) -> Iterator[None]:
        """Make the micro-batches into ``parts``, with a pause after each sample."""
        for some in ids:
            batch = yield from self._micro_batch(some)
            parts.append(pin_memory(batch) if self._pin else batch)  # type: ignore[no-untyped-call]

    def _micro_batch(self, ids: Sequence[SampleId]) -> Generator[None, None, Any]:
        make = self._make
        while True:
            self._drawn = frozenset()
            if make.draws:  # otherwise they are as before the step
                self._clean = make.randomness.generators.states()
            samples: list[Any] = []
            try:
                size = make.at_once(ids[0])
                for first in range(0, len(ids), size):
                    samples += make.samples(ids[first : first + size])
                    yield
            except Exception:
                if make.learned(self._clean, self._drawn):
                    continue
                raise
            if not make.learned(self._clean, self._drawn):
                return make.collate(ids, samples)


class WorkerPool:
    """Makes the micro-batches in worker processes of a torch ``DataLoader``.

    A thread takes them from the loader into a short queue.  The training loop waits at that queue,
    where it can be woken, and not in the loader, where it can't.
    """

    def __init__(
        self,
        make: MicroBatchMaker,
        steps: Iterator[StepIds],
        *,
        pin: bool,
        num_workers: int,
        prefetch_factor: int,
        worker_init_fn: Callable[[int], None] | None,
        multiprocessing_context: str | None,
    ) -> None:
        self._owner = os.getpid()
        self._steps = steps
        self._issued: deque[StepIds] = deque()
        self._ready: queue.Queue[tuple[StepIds, list[Any]] | BaseException] = queue.Queue(
            STEPS_READY
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._died_at: float | None = None
        self._kills = OomKills()
        self._iterator: Any = None
        # Also if Python's default is the fork server (3.14): that one dies of a signal to all
        # processes of a step, and the exit statuses of the workers are lost with it.
        self._start_method = multiprocessing_context or "fork"
        self._loader: DataLoader[Any] = DataLoader(
            make,  # type: ignore[arg-type]  # a dataset by its __getitem__
            batch_size=None,
            sampler=self._issue(),
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin,
            prefetch_factor=prefetch_factor,
            timeout=_TICK_S,
            worker_init_fn=WorkerStart(worker_init_fn),
            multiprocessing_context=self._start_method,
            # Without one, creating the iterator draws from the training loop's global generator.
            generator=torch.Generator(),
        )

    def start(self) -> None:
        """Start the workers and the fetching thread, unless they are running."""
        if self._thread is not None:
            return
        self._kills = read_oom_kills()
        with children_deaf_from_birth(self._start_method):
            self._iterator = iter(self._loader)
        # torch would raise in the main thread, at any instruction, when a worker ends; the fetching
        # thread and next_step notice it, too, and raise where data was requested.
        _remove_worker_pids(id(self._iterator))
        self._iterator._worker_pids_set = False
        self._thread = threading.Thread(target=self._fill, name="forge-batches", daemon=True)
        self._thread.start()

    def next_step(self, pace: Polling) -> tuple[StepIds, list[Any]]:
        """The next step's sample ids and micro-batches; polls while it waits."""
        self.start()
        while self._failure is None:
            try:
                item = self._ready.get(timeout=pace.wait_s())
            except queue.Empty:
                self._failure = self._overdue_death()
                pace.poll()
                continue
            if not isinstance(item, BaseException):
                return item
            self._failure = self._death() or item
        raise self._failure

    def close(self) -> None:
        """End thread and workers in well under a second, whatever they are doing."""
        if os.getpid() != self._owner:
            return  # a forked copy of this object, possibly collected there: not its workers
        self._stop.set()
        iterator, self._iterator = self._iterator, None
        if self._thread is None or iterator is None:
            return
        self._failure = self._failure or ForgeError(
            "the batches were closed", next_step="Make a new BatchSource."
        )
        if threading.current_thread() is not self._thread:  # which may collect the last reference
            self._thread.join(_TICK_S + _PATIENCE_S)
        end_workers(iterator, sound=not self._thread.is_alive())

    def _issue(self) -> Iterator[list[SampleId]]:
        """The ids that the loader passes to its workers, one micro-batch each, in order."""
        for step in self._steps:
            self._issued.append(step)
            yield from step

    def _fill(self) -> None:
        """The fetching thread: from the loader into the queue, until stopped or an error."""
        item: tuple[StepIds, list[Any]] | BaseException
        iterator = self._iterator
        while not self._stop.is_set():
            try:
                first = self._take(iterator)
                ids = self._issued.popleft()
                item = ids, [first, *(self._take(iterator) for _ in ids[1:])]
            except _StoppedError:
                return
            except BaseException as error:
                item = error
            while not self._stop.is_set():
                with contextlib.suppress(queue.Full):
                    self._ready.put(item, timeout=_TICK_S)
                    break
            if isinstance(item, BaseException):
                return

    def _take(self, iterator: Any) -> Any:
        while not self._stop.is_set():
            try:
                return next(iterator)
            except RuntimeError as error:
                # The loader can be called again after its own timeout, so the thread stays awake.
                if not str(error).startswith("DataLoader timed out"):
                    raise
            pinning = getattr(iterator, "_pin_memory_thread", None)
            if pinning is not None and not pinning.is_alive():
                raise ForgeError(
                    "the loader's thread for pinned memory died",
                    next_step="Its message is above; pin_memory=False does without it.",
                )
        raise _StoppedError

    def _overdue_death(self) -> ForgeError | None:
        """A worker's death that the fetching thread did not report.

        A worker killed in the middle of a message leaves that thread reading for ever.
        """
        death = self._death()
        if death is None:
            return None
        self._died_at = self._died_at or time.monotonic()
        return death if time.monotonic() - self._died_at > 10 * _TICK_S else None

    def _death(self) -> ForgeError | None:
        workers = () if self._iterator is None else self._iterator._workers
        for number, worker in enumerate(workers):
            if worker.exitcode:
                memory = killed_since(self._kills, read_oom_kills())
                return _death_of(number, worker.pid, worker.exitcode, memory)
        return None


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker runs first.  A class, not a closure: other start methods pickle it."""

    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        """As ``worker_init_fn``."""
        shield_worker(worker_id)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, MicroBatchMaker):
            # Programs expect to find their own dataset there; the information is frozen.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.then is not None:
            self.then(worker_id)


def end_workers(iterator: Any, *, sound: bool = True) -> None:
    """End the workers of a loader's iterator in well under a second, whatever they are doing.

    torch's own way may wait for 10 s per worker, or for ever.  ``sound``: nobody reads from it.
    """
    if iterator._worker_pids_set:
        # torch would raise in the main thread, at any instruction, when a worker ends.
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    sound = sound and all(worker.is_alive() for worker in iterator._workers)
    pinning = getattr(iterator, "_pin_memory_thread", None)
    if pinning is not None:
        iterator._pin_memory_thread_done_event.set()
        iterator._worker_result_queue.put((None, None))
        pinning.join(_PATIENCE_S)
    if sound:
        # Only if all are alive: one that died may hold the lock of this event.
        iterator._workers_done_event.set()
        for indices in iterator._index_queues:
            indices.put(None)
        _wait(iterator._workers)
    for end in ("terminate", "kill"):
        for worker in iterator._workers:
            if worker.is_alive():
                getattr(worker, end)()
        _wait(iterator._workers)
    iterator._shutdown = True  # its own finalizer has nothing left to do
    for pipe in (*iterator._index_queues, iterator._worker_result_queue):
        pipe.cancel_join_thread()
        pipe.close()


class _StoppedError(Exception):
    """The fetching thread is to end."""


def _as_it_is(value: Any) -> Any:
    return value


def _wait(workers: Sequence[Any]) -> None:
    """Wait a little for all of them to end, and no longer than necessary."""
    deadline = time.monotonic() + _PATIENCE_S
    while running := [worker.sentinel for worker in workers if worker.is_alive()]:
        if not connection.wait(running, max(deadline - time.monotonic(), 0.0)):
            return


def _death_of(number: int, pid: int | None, code: int, memory: str | None) -> ForgeError:
    """``memory``: the kernel's counters of out-of-memory kills since the workers started."""
    who, advice = f"data-loader worker {number} (pid {pid})", "Its own message, if any, is above."
    if code > 0:
        return ForgeError(f"{who} ended with exit status {code}", next_step=advice)
    try:
        how = f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        how = f"was killed by signal {-code}"
    for_memory = -code == signal.SIGKILL and memory is not None
    if for_memory:
        how = f"{how} because memory ran out ({memory})"
    if -code == signal.SIGKILL:
        advice = "Usually the host ran out of memory: use fewer num_workers or ask for more --mem."
    elif -code == signal.SIGBUS:
        advice = "Usually /dev/shm is full: use fewer num_workers, or make it larger."
    return LoaderKilledError(f"{who} {how}", next_step=advice, for_memory=for_memory)
