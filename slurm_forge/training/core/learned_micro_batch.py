"""Rank 0's memory of which micro-batch fits: queried before a run begins, updated during it.

    learning = Learning(run_directory, registry, asked=8, ranks=4, device=device)
    most = learning.suggest(plan.micro_batch, fresh=True)      # agreed over ranks by the caller
    learning.worked(micro_batch, steps)                        # now and then; writes at most once
    learning.failed(8, 4)                                      # made smaller without a new launch

Nothing here raises: a failed read or write becomes a note for people, and the run continues.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.device.accelerator import name_of
from slurm_forge.errors import ForgeError
from slurm_forge.recovery.policy import micro_batch as rules
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.learned import BegunFile, LearnedFiles, MicroBatchNote
from slurm_forge.training.core.run_state import Registry

#: After this many steps of one launch a micro-batch is known to fit.
_HEALTHY_STEPS = 20


class LearnedMicroBatch:
    """What is known for this model on this hardware; one object per launch, on rank 0 only.

    ``requested`` is the micro-batch that the program requests.
    """

    def __init__(
        self,
        run: RunDirectory,
        registry: Registry,
        *,
        requested: int,
        ranks: int,
        device: torch.device,
        mesh: Sequence[tuple[str, int]] = (),
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._files, self._begun = LearnedFiles.beside(run), BegunFile(run)
        self._requested, self._now = requested, now
        hardware = name_of(device)
        kind = _wrapper(registry)
        self._about = f"{run.name}: {kind}, {ranks} ranks, {hardware}, micro-batch {requested}"
        spread = [f"{name} {size}" for name, size in mesh]
        self._key = _key(fingerprint(registry), hardware, str(ranks), str(requested), kind, *spread)
        self._settled = False
        self._notes: list[str] = []

    def notes(self) -> list[str]:
        """Lines for people that have not been shown yet."""
        lines, self._notes = self._notes, []
        return lines

    def suggest(self, plan: int | None, *, fresh: bool) -> int:
        """The most samples per forward pass for this launch, limited by the plan, too.

        A run keeps its initial value until its plan reduces it: a micro-batch that changed at every
        start would change the last bits of the sums.  ``fresh``: nothing is trained yet.
        """
        requested = self._requested
        with self._forgiving():
            stored = self._begun.read(self._key)
            if stored is None and fresh and plan is None:
                stored = self._begin()
            requested = stored or requested
            if plan is not None and plan < requested:
                self._ran_out(requested, plan)
        return min(requested, self._requested if plan is None else plan)

    def worked(self, micro_batch: int, steps: int) -> None:
        """This many steps of this launch were made with it, without running out of memory."""
        if self._settled or steps < _HEALTHY_STEPS:
            return
        self._settled = True
        with self._forgiving():
            before = self._read()
            after = rules.worked(before, micro_batch, self._requested, self._now())
            if after is None and before is not None:
                self._files.forget(self._key)
                self._notes.append(f"micro-batch {micro_batch} fits (again): nothing to remember")
            elif after is not None and after != before:
                self._write(after)

    def failed(self, micro_batch: int, smaller: int) -> None:
        """Memory ran out with ``micro_batch``; this launch continues with ``smaller``."""
        self._settled = False
        with self._forgiving():
            self._ran_out(micro_batch, smaller)

    def _begin(self) -> int:
        """What a new run begins with."""
        learned, now = self._read(), self._now()
        proposal = rules.propose(self._requested, learned, now)
        self._begun.write(self._key, proposal)
        if learned is None:
            return proposal
        if proposal > learned.micro_batch:
            self._write(rules.try_begins(learned, now))
            self._notes.append(
                f"micro-batch {proposal} is tried again: more than {learned.micro_batch} ran out "
                f"of memory on {learned.since:%Y-%m-%d}"
            )
        elif proposal < self._requested:
            self._notes.append(
                f"micro-batch {proposal} instead of {self._requested}: more ran out of memory on "
                f"{learned.since:%Y-%m-%d} (to forget it: rm {self._files.path(self._key)})"
            )
        return proposal

    def _ran_out(self, micro_batch: int, smaller: int) -> None:
        self._write(rules.ran_out(self._read(), micro_batch, smaller, self._now()))
        self._begun.write(self._key, smaller)

    def _read(self) -> rules.Learned | None:
        note = None
        with self._forgiving():  # a damaged file counts as none
            note = self._files.read(self._key)
        if note is None:
            return None
        return rules.Learned(
            micro_batch=note.micro_batch, proven=note.proven, since=note.since, tries=note.tries
        )

    def _write(self, learned: rules.Learned) -> None:
        note = MicroBatchNote(
            micro_batch=learned.micro_batch,
            proven=learned.proven,
            since=learned.since,
            tries=learned.tries,
            about=self._about,
        )
        self._files.write(self._key, note)

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ForgeError) as error:
            self._notes.append(f"what is known about micro-batches is left alone: {error}")


def fingerprint(registry: Registry) -> str:
    """A hash over name, shape and dtype of every parameter; the same on every rank."""
    digest = hashlib.sha256()
    for name, model in sorted(registry.models.items()):
        for part, tensor in model.named_parameters():
            digest.update(f"{name}.{part} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()


def _wrapper(registry: Registry) -> str:
    """How the models are distributed over ranks."""
    kinds = {_kind(model) for model in registry.models.values()}
    return "+".join(sorted(kinds)) or "no model"


def _kind(model: nn.Module) -> str:
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    sharded = any(hasattr(tensor, "placements") for tensor in model.parameters())
    return "sharded" if sharded else "plain"


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
