"""Injected faults, at the places of a run where real ones happen.

Two places: ``boundary`` between two steps, and ``loss`` with every micro-batch's loss before its
backward.  A fault is recorded on disk (``StruckFaults``) before it strikes: a rank that kills
itself must find the record when it is restarted.  Without faults nothing is computed.

Also here: the record of faults that have struck in a run, one small file each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from slurm_forge.spec.faults import Fault, FaultKind, FaultTarget
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.core.sample_order import Windows
from slurm_forge.training.faults.strikes import (
    damage,
    hold_interpreter,
    hook_gradient,
    hook_out_of_memory,
    spoil_gradients,
    state_tensor,
    stop_loader_workers,
    wait_for_nobody,
)
from slurm_forge.vocabulary.plan import SampleWindow

if TYPE_CHECKING:
    from slurm_forge.training.core.run_state import Registry
    from slurm_forge.training.data.batches import Batch


import json
import re

from slurm_forge.errors import RunDirectoryError, UnsafeFileError
from slurm_forge.files import create_exclusive, make_private_directory, read_json

_SIGNALS = {
    FaultKind.TERM: Signals.SIGTERM,  # as a preemption sends it
    FaultKind.USR1: Signals.SIGUSR1,
    FaultKind.KILL: Signals.SIGKILL,
    FaultKind.STOP: Signals.SIGSTOP,
}
_SLOW_S = 5.0
_HANG_S = 60.0
_HOURS_S = 24 * 3600.0

AnyLoss = TypeVar("AnyLoss", torch.Tensor, Loss)


class FaultInjector:
    """The faults of one rank in one launch.  ``active`` is False if none can strike here.

    ``boundary`` and ``loss`` return at once then.  A transient fault strikes once per run, however
    often its step is repeated: in another launch, after a rollback, or while a step is replayed.
    ``directory`` is the run directory.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        *,
        rank: int,
        world_size: int,
        attempt: int,
        launch: int,
        directory: Path,
        say: Callable[[str], None] | None = None,
        send: Callable[[Signals], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        everything = tuple(fault for fault in faults if not fault.of_start)
        self._faults = tuple(
            f for f in everything if f.rank in (None, rank) and f.attempt in (None, attempt)
        )
        self.active = bool(self._faults)
        #: The first one that is given by samples, on whatever rank.
        self.of_samples = next((f for f in everything if f.samples is not None), None)
        self._rank, self._attempt = rank, attempt
        self._struck = StruckFaults(directory / FOLDER, launch=f"{attempt}.{launch}", rank=rank)
        self._say, self._send, self._sleep = say or _to_stderr, send or _to_myself, sleep
        self._registry: Registry | None = None
        self._handles: list[RemovableHandle] = []
        self._fresh = False
        self._replaying = self._probe_spoilt = False
        #: The fault that makes this rank slower in this step.
        self._dragging: Fault | None = None
        for fault in everything if rank == 0 else ():
            if fault.rank is not None and fault.rank >= world_size:
                self._say(f"{fault} can't strike: there are {world_size} ranks, counted from 0")

    def probe_spoilt(self) -> bool:
        """Whether the probe that is being issued is to be spoilt."""
        spoilt, self._probe_spoilt = self._probe_spoilt, False
        return spoilt

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """A step is recomputed to see whether it repeats: only deterministic faults strike."""
        visit = self._struck.visit
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False
            self._new_visit()
            # The step after it may have begun already, and begins anew.
            self._struck.visit, self._fresh = visit, True

    def boundary(self, step: int, registry: Registry | None = None) -> None:
        """Before a step's forward, after ``step`` steps: signals, exceptions, a changed state.

        Raises UnsupportedError if the state to be changed does not exist.
        """
        if not self.active:
            return
        self._registry = registry
        self._new_visit()
        self._fresh = True
        before, self._dragging = self._dragging, None
        for fault in self._faults:
            if fault.drags:
                if fault.comes(step=step, rank=self._rank, attempt=self._attempt):
                    self._dragging = fault
                    if before is not fault:
                        self._say(f"{fault} is injected from step {step} on")
                continue
            if fault.of_batch or not fault.comes(step=step, rank=self._rank, attempt=self._attempt):
                continue
            if fault.target is None:
                if self._strikes(fault, step):
                    self._do(fault, step)
                continue
            tensor = state_tensor(fault.target, registry)
            if self._strikes(fault, step):
                damage(tensor, fault.number)

    def loss(
        self,
        loss: AnyLoss,
        *,
        step: int,
        samples_first: int,
        samples: int,
        micro_batch: int,
        skipped: Sequence[SampleWindow] = (),
    ) -> AnyLoss:
        """The loss of the step's micro-batch number ``micro_batch``, changed if a fault strikes.

        It is of ``samples`` samples: those from position ``samples_first`` of the stream on that
        are in none of the ``skipped`` windows.
        """
        if not self.active:
            return loss
        if micro_batch == 0 and not self._fresh:
            self._new_visit()  # a loop without boundaries
        self._fresh = False
        for fault in self._faults:
            if not fault.of_batch or (fault.above is not None and samples <= fault.above):
                continue
            if not fault.comes(step=step, rank=self._rank, attempt=self._attempt):
                continue
            window = fault.samples
            if window is not None and not _holds(window, samples_first, samples, skipped):
                continue
            if self._strikes(fault, step):
                loss = self._spoil(fault, loss, step)
        return loss

    def gradients(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        step: int,
        norm: torch.Tensor | float | None = None,
    ) -> torch.Tensor | float | None:
        """Gradients that the program has computed by itself, before they are judged.

        Returns ``norm``, the program's norm of them, updated.
        """
        parameters = list(parameters) if self.active else []
        for fault in self._faults:
            if not fault.of_gradient:
                continue
            if not fault.comes(step=step, rank=self._rank, attempt=self._attempt):
                continue
            if not self._strikes(fault, step):
                continue
            factor = fault.loss_factor
            spoil_gradients(parameters, factor=factor, value=fault.number)
            if norm is not None:
                norm = (norm**2 + fault.number**2) ** 0.5 if factor is None else norm * factor
        return norm

    @property
    def drags(self) -> bool:
        """Whether this rank is to be slowed down in this step."""
        return self._dragging is not None

    def drag(self, seconds: float) -> None:
        """Prolong what took this long by a factor."""
        if self._dragging is not None and self._dragging.factor is not None:
            self._sleep((self._dragging.factor - 1) * seconds)

    def drag_trial(self, seconds: float) -> None:
        """The same for the trial, if the fault is a slow node."""
        if self._dragging is not None and self._dragging.target is FaultTarget.NODE:
            self.drag(seconds)

    def _strikes(self, fault: Fault, step: int) -> bool:
        """Whether it strikes now, and has not struck before."""
        if not fault.deterministic:
            try:
                if self._replaying or not self._struck.may(fault, step):
                    return False
            except OSError as error:
                self._say(f"{fault} is skipped, because it can't be recorded ({error})")
                return False
        self._say(f"{fault} is injected after step {step} on rank {self._rank}")
        return True

    def _spoil(self, fault: Fault, loss: AnyLoss, step: int) -> AnyLoss:
        tensor = loss.sum if isinstance(loss, Loss) else loss
        if fault.kind is FaultKind.OOM:
            self._keep(hook_out_of_memory(tensor, self._registry, self._sleep))
        elif fault.target is FaultTarget.GRAD:
            self._keep(hook_gradient(tensor, self._registry, fault.number))
        elif fault.loss_factor is not None:
            return _multiplied(loss, fault.loss_factor)
        else:
            self._do(fault, step)
        return loss

    def _do(self, fault: Fault, step: int) -> None:
        """Apply the fault to the process."""
        match fault.kind:
            case FaultKind.EXCEPTION:
                raise RuntimeError(f"an injected fault at step {step}")
            case FaultKind.SLOW:
                self._sleep(_SLOW_S if fault.seconds is None else fault.seconds)
            case FaultKind.HANG if fault.seconds is not None:
                self._sleep(fault.seconds)
            case FaultKind.HANG:
                while True:
                    self._sleep(_HANG_S)
            case FaultKind.LOCK:
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()  # nobody will ever release it
            case FaultKind.GIL:
                hold_interpreter(_HOURS_S if fault.seconds is None else fault.seconds)
            case FaultKind.COLLECTIVE:
                wait_for_nobody(self._rank)
            case FaultKind.DATA:
                stop_loader_workers()
            case FaultKind.WRONG:
                self._probe_spoilt = True
            case _:
                self._send(_SIGNALS[fault.kind])

    def _keep(self, handle: RemovableHandle | None) -> None:
        self._handles += [] if handle is None else [handle]

    def _new_visit(self) -> None:
        """A step begins, or begins again."""
        self._struck.new_visit()
        while self._handles:
            self._handles.pop().remove()  # of a parameter without a gradient


def first_sample(
    batch: Batch, micro_batch: int, *, rank: int, skipped: Sequence[SampleWindow] = ()
) -> int:
    """Position in the stream of the first sample of a rank's micro-batch number ``micro_batch``."""
    without = Windows(skipped)
    before = rank * batch.size + sum(batch.micro_sizes[:micro_batch])
    return without.at(without.kept_before(batch.first) + before)


def _holds(window: SampleWindow, first: int, count: int, skipped: Sequence[SampleWindow]) -> bool:
    """Whether one of the ``count`` samples from ``first`` on, without ``skipped``, is in it."""
    without = Windows(skipped)
    begin = without.kept_before(first)
    inside = without.kept_before(max(window.first, first)), without.kept_before(window.stop)
    return inside[0] < min(inside[1], begin + count)


def _multiplied(loss: AnyLoss, by: float) -> AnyLoss:
    if isinstance(loss, Loss):
        return replace(loss, sum=loss.sum * by)
    return loss * by


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"slurm_forge: {text}\n")
    sys.stderr.flush()


def _to_myself(number: Signals) -> None:
    os.kill(os.getpid(), number)


#: In the run directory: one small file for every fault that has struck.
FOLDER = "injected"
_LIMIT = 1 << 16
_UNFIT = re.compile(r"[^A-Za-z0-9@.=+-]")


class StruckFaults:
    """The memory of transient faults: each strikes once at each of its steps, across restarts.

    All ranks of one ``launch`` share a fault: the first one creates the file, and the others find
    their own launch in it.  A *visit* is one execution of a step: within it the answer is constant,
    so that either all micro-batches of a step are struck, or none.
    """

    def __init__(self, folder: Path, *, launch: str, rank: int) -> None:
        self._folder, self._launch, self._rank = folder, launch, rank
        #: The answers of this visit.
        self.visit: dict[str, bool] = {}
        self._spent: set[str] = set()

    def new_visit(self) -> None:
        """A step begins, or begins again."""
        self.visit = {}

    def may(self, fault: Fault, step: int) -> bool:
        """Whether it strikes now, after ``step`` steps; if so, it is recorded on disk.

        Raises OSError if it can't be recorded: such a fault must not strike, since it would do so
        again and again.
        """
        name = _UNFIT.sub("_", str(fault)) + (f".at-{step}" if fault.times > 1 else "")
        if name not in self.visit:
            self.visit[name] = name not in self._spent and self._claim(name, fault, step)
            self._spent.add(name)
        return self.visit[name]

    def _claim(self, name: str, fault: Fault, step: int) -> bool:
        make_private_directory(self._folder)
        path = self._folder / f"{name}.json"
        body = {
            "fault": str(fault),
            "step": step,
            "launch": self._launch,
            "first_rank": self._rank,
            "time": round(time.time(), 3),
        }
        if create_exclusive(path, json.dumps(body).encode()):
            return True
        try:
            return read_json(path, _LIMIT).get("launch") == self._launch
        except (UnsafeFileError, RunDirectoryError):
            return False
