"""What is under test: our checkpoints, and beside them plain DCP in place and in fresh folders.

All are asked the same: save a value on every rank, say what a restart would train on.  The state
is made so that every part of it tells which save it belongs to.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write.save import (
    CheckpointWriter,
    save_checkpoint,
)
from slurm_forge.errors import CheckpointError, CheckpointMissingError, RanksLostError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import STAGE_PREFIX, TRASH_PREFIX, CheckpointName

WORLD = 2


class Mixture(Exception):
    """Parts of several saves were loaded, and nobody noticed."""


class Value:
    """A training state that holds one number, many times."""

    def __init__(self, value: float, *, big: bool) -> None:
        # Each rank writes more than 1 MiB of the big one: past the page cache.
        sizes = [(560, 560)] * 4 if big else [(8, 8)] * 3
        self.model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
        self.number = value
        self.set(value)

    def set(self, value: float) -> None:
        """In place, as an optimizer does it."""
        self.number = value
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def state_dict(self) -> dict[str, float]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.number = state["number"]

    def state(self, *ranks: int) -> TrainingState:
        rng = {f"rng/rank-{rank}/x": torch.full((64,), self.number + rank / 8) for rank in ranks}
        return TrainingState(
            models={"m": self.model}, objects={"o": self}, extra={"n": self.number}, rng=rng
        )

    def read(self) -> int:
        """The number; Mixture where there are several."""
        found = {float(x) for p in self.model.parameters() for x in p.detach().unique()}
        if found != {self.number}:
            raise Mixture(f"weights of {sorted(found)}, number {self.number}")
        return int(self.number)


class Engine(Protocol):
    """A way of saving.  All of it is collective except what says ``alone``."""

    def save(self, value: int) -> None:
        """Save; on disk on return."""

    def resume(self) -> int | None:
        """What a restart of these ranks would train on."""

    @staticmethod
    def resume_alone(root: Path, told: Callable[[str], None]) -> int | None:
        """What a restart would train on; tells what was passed over.  None: nothing was saved."""

    @staticmethod
    def next_attempt(root: Path, value: int) -> list[str]:
        """Save as the next attempt would, alone; what lies around afterwards that should not."""


class Forge:
    """slurm_forge's checkpoints: ``<root>/checkpoints``."""

    refusal: tuple[type[BaseException], ...] = (CheckpointError,)
    lost: tuple[type[BaseException], ...] = (RanksLostError,)

    def __init__(
        self,
        root: Path,
        rank: int,
        *,
        big: bool = False,
        background: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.big = rank, big
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.store = CheckpointStore(root / "checkpoints", "run")
        self.background = background
        self.writer = CheckpointWriter(self.store, group=self.group, background=background)
        self.value = Value(0, big=big)
        self.rejected: list[str] = []

    def save(self, value: int, *, background: bool = False, prune: bool = False) -> None:
        self.value.set(value)

        def after(end: object) -> None:
            # As in training: at the end of a flight, on its thread, by rank 0.
            if prune and self.rank == 0 and not isinstance(end, CheckpointError):
                self.prune(1)

        flight = self.writer.begin(
            self.value.state(self.rank),
            name=CheckpointName.new(step=value, attempt=1, launch=1),
            reason="test", fence=no_fence, background=background, after=after,
        )  # fmt: skip
        if background:
            # Training goes on, in place; where the other rank is gone it notices that, too.
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(torch.ones(1))
            self.value.set(99)
        flight.result()

    def prune(self, keep: int) -> tuple[str, ...]:
        return self.store.prune(
            lambda names: names[:keep], no_fence, current=(1, 1)
        ).problems  # fmt: skip

    def resume(self) -> int | None:
        target = Value(-1, big=self.big)
        loaded = resume(
            self.store, target.state(self.rank), group=self.group,
            on_reject=lambda name, why: self.rejected.append(f"{name.step}: {why}"), patience=0.2,
        )  # fmt: skip
        return None if loaded is None else _whole(target, loaded)

    @staticmethod
    def resume_alone(root: Path, told: Callable[[str], None]) -> int | None:
        store = CheckpointStore(root / "checkpoints", "run")
        big = _is_big(store)
        target = Value(-1, big=big)
        loaded = resume(
            store, target.state(*range(WORLD)), group=None,
            on_reject=lambda name, why: told(f"step {name.step}: {why}"), patience=0.0,
        )  # fmt: skip
        return None if loaded is None else _whole(target, loaded)

    @staticmethod
    def next_attempt(root: Path, value: int) -> list[str]:
        store = CheckpointStore(root / "checkpoints", "run")
        save_checkpoint(
            store, Value(value, big=_is_big(store)).state(0),
            name=CheckpointName.new(step=value, attempt=2, launch=1),
            reason="test", group=None, fence=no_fence,
        )  # fmt: skip
        pruned = store.prune(lambda names: names[:2], no_fence, current=(2, 1))
        left = [
            path.name
            for path in store.directory.iterdir()
            if path.name.startswith((STAGE_PREFIX, TRASH_PREFIX))
        ]
        return left + list(pruned.problems)


def no_fence() -> None:
    """Nobody else is alive."""


def _is_big(store: CheckpointStore) -> bool:
    """Whether what lies there was saved from the big state."""
    return any(p.stat().st_size > 1 << 20 for p in store.directory.glob("*/rank-*.data"))


def _whole(target: Value, loaded: Any) -> int:
    value = target.read()
    parts = {float(loaded.extra["n"]), float(loaded.manifest.step)}
    for key, tensor in loaded.rng.items():
        rank = int(key.split("/")[1].removeprefix("rank-"))
        parts.update((tensor - rank / 8).unique().tolist())
    if parts != {float(value)}:
        raise Mixture(f"weights of {value}, the rest of {sorted(parts)}")
    return value


class _Dcp:
    """Plain DCP; the loader takes the newest folder that has its ``.metadata``."""

    refusal: tuple[type[BaseException], ...] = (Exception, dcp.CheckpointException)
    lost: tuple[type[BaseException], ...] = ()
    fresh: bool

    def __init__(
        self, root: Path, rank: int, *, big: bool = False, background: object = None
    ) -> None:
        self.root, self.rank = root, rank
        self.value = Value(0, big=big)

    def save(self, value: int) -> None:
        self.value.set(value)
        _dcp_save(self._folder(self.root, value), self.value, self.rank)

    def resume(self) -> int | None:
        dist.barrier()
        return self.resume_alone(self.root, lambda _: None)

    @classmethod
    def resume_alone(cls, root: Path, told: Callable[[str], None]) -> int | None:
        folders = sorted((p.parent for p in root.glob("*/.metadata")), reverse=True)
        if not folders:
            if any(root.iterdir()):
                raise CheckpointMissingError("no .metadata anywhere", next_step="")
            return None
        target = Value(-1, big=False)
        state: dict[str, Any] = {"m": target.model.state_dict(), "number": torch.zeros(1)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folders[0])
        target.model.load_state_dict(state["m"])
        target.number = float(state["number"])
        return target.read()

    @classmethod
    def next_attempt(cls, root: Path, value: int) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _dcp_save(cls._folder(root, value), Value(value, big=False), 0)
        return []

    @classmethod
    def _folder(cls, root: Path, value: int) -> Path:
        return root / (f"step-{value}" if cls.fresh else "checkpoint")


def _dcp_save(folder: Path, value: Value, rank: int) -> None:
    state: dict[str, Any] = {"m": value.model.state_dict(), "number": torch.tensor([value.number])}
    state[f"rng-{rank}"] = torch.full((64,), value.number)
    dcp.save(state, checkpoint_id=folder)


class DcpInPlace(_Dcp):
    """Every save into the same folder, which ``dcp.save`` allows by default."""

    fresh = False


class DcpFresh(_Dcp):
    """Every save into a folder of its own."""

    fresh = True
