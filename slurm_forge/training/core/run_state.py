"""What a program has registered with its run, its progress, and what rank 0 logs about that."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from slurm_forge.errors import UnsupportedError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import EpochEnded, Logged
from slurm_forge.journal.events import Progress as ProgressSeen
from slurm_forge.vocabulary.decision import Decision, Incident
from slurm_forge.vocabulary.json_value import Json


@dataclass(slots=True)
class Registry:
    """Registered objects by name; the names are the keys in every checkpoint of the run."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Add one object, or a list of them under numbered names."""
        if value is None:
            return
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self.add(f"{name}.{index}", item)
            return
        if name in self.models or name in self.optimizers or name in self.others:
            raise UnsupportedError(
                f"{name!r} is registered twice",
                next_step="Give each object a name of its own: run.register(generator=…, …).",
            )
        if isinstance(value, nn.Module):
            self.models[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self.others[name] = value
        else:
            instead = "Register objects with both, or keep plain values in run.extra."
            if isinstance(value, DataLoader):
                instead = "Register torchdata's StatefulDataLoader, or pass it to run.batches()."
            raise UnsupportedError(
                f"{name!r} ({type(value).__name__}) has no state_dict and load_state_dict",
                next_step=instead,
            )

    def names(self, *, kinds: bool = True) -> list[Json]:
        """Every name in alphabetical order, with the kind of its object unless excluded.

        The stages of a pipeline may be modules of different kinds.
        """
        everything = {**self.models, **self.optimizers, **self.others}
        if not kinds:
            return list[Json](sorted(everything))
        return [f"{name} ({type(value).__name__})" for name, value in sorted(everything.items())]

    @property
    def may_hold_position(self) -> bool:
        """Whether any object is neither schedule nor scaler: it may hold a position in the data."""
        return any(not isinstance(each, LRScheduler | GradScaler) for each in self.others.values())

    @property
    def schedulers(self) -> list[Any]:
        """Learning-rate schedulers that advance once per step (not those that need a metric)."""
        return [
            other
            for other in self.others.values()
            if isinstance(other, LRScheduler) and not isinstance(other, ReduceLROnPlateau)
        ]

    @property
    def scaler(self) -> Any:
        """The gradient scaler, if one is registered."""
        return next((o for o in self.others.values() if isinstance(o, GradScaler)), None)

    def ddp(self) -> Iterable[DistributedDataParallel]:
        """Models wrapped in DistributedDataParallel."""
        return [m for m in self.models.values() if isinstance(m, DistributedDataParallel)]


@dataclass(slots=True)
class TrainingProgress:
    """Counts of steps and samples, which phases are done, and the program's own plain values."""

    step: int = 0
    consumed: int = 0
    #: Completed passes over the data; None if the checkpoint does not contain it.
    epoch: int | None = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    #: The highest usual loss, as observed by rank 0.
    highest_usual_loss: float | None = None
    phases: dict[str, int] = field(default_factory=dict)
    #: The program's own; a function is called for its value when a checkpoint is made.
    extra: dict[str, Any] = field(default_factory=dict)
    #: What this rank trained on in the last step, if samples have ids; not saved.
    sample_ids: tuple[Any, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "step": self.step,
            "consumed": self.consumed,
            "epoch": self.epoch,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_summit": self.highest_usual_loss,
            "phases": dict(self.phases),
            "extra": {k: value() if callable(value) else value for k, value in self.extra.items()},
        }

    def restart(self) -> None:
        """Count steps and samples from 0; the program's own values stay."""
        self.step = self.consumed = self.skipped = self.skipped_in_a_row = 0
        self.phases.clear()

    def restore(self, body: Mapping[str, Any]) -> None:
        """In place, because the program may hold a reference."""
        self.step = int(body["step"])
        self.consumed = int(body["consumed"])
        epoch = body.get("epoch")  # nor this
        self.epoch = None if epoch is None else int(epoch)
        self.skipped = int(body["skipped"])
        self.skipped_in_a_row = int(body["skipped_in_a_row"])
        highest = body.get("loss_summit")  # checkpoints from before have none
        self.highest_usual_loss = None if highest is None else float(highest)
        self.phases = {str(name): int(step) for name, step in body["phases"].items()}
        self.sample_ids = ()
        self.extra.clear()
        self.extra.update(body["extra"])


_Hook = Callable[..., Any]
_F = TypeVar("_F", bound=_Hook)

_NAMES = (
    "on_train_begin",
    "on_resume",
    "on_step_end",
    "on_eval_end",
    "on_save",
    "on_probe",
    "on_stop",
    "on_train_end",
)
#: Called on all ranks at the same place: a hook may compute something together.
_TOGETHER = frozenset({"on_train_begin", "on_resume", "on_train_end"})


@dataclass(slots=True)
class Hooks:
    """Lists of callables by name; each is called with keyword arguments it may ignore.

    A hook that raises ends the launch like any other error of the program: silence would hide it.
    """

    rank: int
    #: With whether they run on every rank.
    _hooks: dict[str, list[tuple[_Hook, bool]]] = field(default_factory=dict)
    _on_instability: list[Callable[[Incident], Decision | None]] = field(default_factory=list)

    def add(self, name: str, hook: _F, *, all_ranks: bool = False) -> _F:
        """Add a hook by its name (``on_save``); usable as a decorator through ``Run.on``."""
        if all_ranks and name not in _TOGETHER:
            raise ValueError(
                f"{name} runs on rank 0 only; all_ranks=True is for {', '.join(sorted(_TOGETHER))}"
            )
        if name == "on_instability":
            self._on_instability.append(hook)
        elif name in _NAMES:
            self._hooks.setdefault(name, []).append((hook, all_ranks))
        else:
            raise ValueError(
                f"no hook {name!r}; there are {', '.join((*_NAMES, 'on_instability'))}"
            )
        return hook

    def call(self, name: str, /, **arguments: Any) -> None:
        """Call every hook of that name: on rank 0, or on all ranks if that was requested."""
        for hook, all_ranks in self._hooks.get(name, ()):
            if all_ranks or self.rank == 0:
                hook(**arguments)

    @property
    def on_instability(self) -> bool:
        """Whether the program wants to be asked."""
        return bool(self._on_instability)

    def instability(self, incident: Incident) -> Decision | None:
        """The first decision that a hook returns, or None: then the policy decides."""
        if self.rank == 0:
            for hook in self._on_instability:
                decision = hook(incident)
                if decision is not None:
                    return decision
        return None


#: How often it is written; reading a value waits for the device, so not every step.
_EVERY_S = 5.0


class ProgressLogger:
    """Keeps the newest logged values; ``journal`` is None on every rank but the first."""

    def __init__(self, journal: JournalWriter | None, progress: TrainingProgress) -> None:
        self._journal = journal
        self._progress = progress
        #: The newest of each name with the step that it was logged at.
        self._latest: dict[str, tuple[int, Any]] = {}
        self._unwritten: dict[str, None] = {}
        self._next = 0.0

    def remember(self, values: dict[str, Any]) -> None:
        """Keep figures (numbers, or tensors of one element) until they are written."""
        step = self._progress.step
        for name, value in values.items():
            # Detached: what is only remembered must not keep a graph alive.
            detached = value.detach() if isinstance(value, torch.Tensor) else value
            self._latest[name] = (step, detached)
            self._unwritten[name] = None

    def of_this_step(self) -> dict[str, Any]:
        """What was logged since the last step ended."""
        step = self._progress.step
        return {name: value for name, (at, value) in self._latest.items() if at == step}

    def epochs(self, length: int, consumed_before: int) -> None:
        """Write down the epoch that the last step has ended, if it has; of so many samples each."""
        if not length:
            return
        epoch, self._progress.epoch = consumed_before // length, self._progress.consumed // length
        if self._progress.epoch == epoch:
            return
        self._write(
            EpochEnded(
                epoch=epoch,
                step=self._progress.step,
                samples=length,
                skipped_steps=self._progress.skipped,
            )
        )

    def write(self, *, now: bool = False) -> bool:
        """Write progress and what was remembered, if it is time or ``now``; whether it was."""
        if self._journal is None or (time.monotonic() < self._next and not now):
            return False
        self._next = time.monotonic() + _EVERY_S
        progress = self._progress
        self._write(ProgressSeen(step=progress.step, consumed=progress.consumed))
        values = {name: float(self._latest[name][1]) for name in self._unwritten}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if finite:
            self._write(Logged(step=progress.step, values=finite))
        self._unwritten.clear()
        return True

    def _write(self, event: ProgressSeen | Logged | EpochEnded) -> None:
        # A full disk must not end a training that could go on until there is room again.
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.write(event)
