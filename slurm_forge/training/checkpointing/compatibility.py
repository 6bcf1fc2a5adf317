"""What a launch is made with, compared with what its checkpoint was made with.

Rank 0 compares; a refusal reaches all ranks together.  Other differences are only reported, and
training continues: clusters change drivers and nodes at any time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.training_state import fresh_parts
from slurm_forge.errors import CheckpointRejectedError, MismatchError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import OptionsReplaced, ResumeCompared
from slurm_forge.recovery.fingerprint import (
    Difference,
    Fingerprint,
    compare,
    job_facts,
    refused,
)
from slurm_forge.recovery.job_changes import accepted, arguments_changed, unmet_batch
from slurm_forge.source.work_tree import GitRevision
from slurm_forge.spec import JobSpec
from slurm_forge.spec.entry import source_file
from slurm_forge.spec.safeguards import Policy
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.manifest import Manifest
from slurm_forge.training.checkpointing import environment_fingerprint as environment
from slurm_forge.training.checkpointing.constructed_options import ConstructedOptions
from slurm_forge.training.checkpointing.structure import (
    Structure,
    differences,
    option_differences,
)
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.data.dataset_fingerprint import (
    DataVersion,
    data_facts,
)
from slurm_forge.vocabulary.job_change import JobChange
from slurm_forge.vocabulary.json_value import Json

_MOST_LINES = 30


class CompatibilityCheck:
    """One per rank and launch.  ``journal`` is None on every rank but the first."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        device: torch.device,
        folder: Path,
        variables: Mapping[str, str],
        code: GitRevision | None,
        changes: Sequence[JobChange] | None,
        registry: Registry,
        group: dist.ProcessGroup | None,
        journal: JournalWriter | None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._folder = folder
        self._variables = variables
        self._code = code
        self._is_revised = changes is not None
        self._changes = changes or ()
        self._registry = registry
        self._ranks = Ranks(group)
        self._journal = journal
        self._facts = Fingerprint()
        self._data: dict[str, DataVersion] = {}
        self._structure: Structure | None = None
        self._constructed: ConstructedOptions | None = None
        self._described = False
        self._about: dict[str, Json] | None = None
        self._manifest: Manifest | None = None
        self._reported_lines: list[str] = []
        #: On rank 0: whether anything differs that may affect the loss.
        self.changed = False

    def know(self, facts: Fingerprint) -> None:
        """Record facts that the program provides: what determines its samples."""
        self._facts |= facts

    def data(self, name: str, version: DataVersion) -> None:
        """Record the program's training data (examined on rank 0 only)."""
        self._data[name] = version
        self._facts |= data_facts(self._data)

    def describe(self, *, several_stages: bool = False) -> None:
        """Before a checkpoint is loaded, which restores the saved options of optimizers.

        With several pipeline stages rank 0 has only one: registered objects are then not described.
        """
        if self._is_revised:
            self._constructed = ConstructedOptions.of(self._registry)
        if self._journal is None:
            return
        registry = self._registry
        if not several_stages:
            with contextlib.suppress(Exception):  # what can't be described is not compared
                self._structure = Structure.of(
                    registry.models, registry.optimizers, registry.others
                )
        self._described = several_stages or self._structure is not None
        self._facts |= job_facts(self._spec) | environment.collect(
            device=self._device,
            folder=self._folder,
            variables=self._variables,
            code=self._code,
            program=self._program(),
        )

    def _program(self) -> Path | None:
        """The file of the entry; for a script that attaches, the script."""
        if self._spec.entry is not None:
            return source_file(self._spec.entry, self._folder)
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        return None if script is None else Path(script)

    def about(self) -> Mapping[str, Json]:
        """For the manifest; empty on other ranks.  Computed once, after the first step."""
        if self._journal is None or not self._described:
            return {}
        if self._about is None:
            structure: dict[str, Json] = {}
            if self._structure is not None:
                self._structure = self._structure.with_modes(self._registry.models)
                structure = {"structure": self._structure.to_json()}
            self._about = {
                "environment": self._facts.to_json(),
                **structure,
                "data": {name: version.to_json() for name, version in self._data.items()},
            }
        return self._about

    def compare(self, manifest: Manifest) -> None:
        """Report the differences from when the checkpoint was written.  Collective.

        Raises MismatchError on all ranks if the job refuses to continue with them.
        """
        self._manifest = manifest
        refusal: dict[str, Any] = self._ranks.agree(
            None, None, lambda _: self._compared(manifest), doing="Comparing with the checkpoint"
        )
        if refusal:
            raise MismatchError(refusal["refused"], next_step=refusal["next_step"])

    def compare_again(self) -> None:
        """Like ``compare``, for facts that come later (``run.restore`` before ``run.batches``)."""
        if self._manifest is not None:
            self.compare(self._manifest)

    def replace_options(self, manifest: Manifest, *, fresh: bool) -> None:
        """After a load: let the options that the program constructs now replace the loaded ones.

        Only if the run's arguments were changed deliberately since the checkpoint was written.
        Every rank has all inputs of this decision, so nothing is exchanged.  ``fresh``: the
        optimizers are not those of the checkpoint, and what this launch did to them is undone.
        """
        if fresh:
            if self._constructed is not None:
                self._constructed.reset(self._registry)
            return
        saved = Structure.from_json(manifest.about.get("structure"))
        if saved is None or self._constructed is None or not self._replaces_options(manifest):
            return
        lines = self._constructed.replace_loaded(self._registry, saved)
        if lines and self._journal is not None:
            event = OptionsReplaced(
                checkpoint=str(manifest.name), step=manifest.step, options=lines[:_MOST_LINES]
            )
            with contextlib.suppress(OSError):
                self._journal.write(event)

    def _replaces_options(self, manifest: Manifest) -> bool:
        """Whether arguments changed deliberately since the checkpoint; the same on all ranks."""
        before = Fingerprint.from_json(manifest.about.get("environment")).facts
        now = job_facts(self._spec).facts
        return bool(self._changes) and arguments_changed(before, now, self._changes)

    def misfit(self, error: MismatchError, store: CheckpointStore) -> MismatchError:
        """Why a checkpoint does not fit what is registered, in readable lines.  Collective.

        The unchanged error if it is unknown what was registered then.
        """
        lines = self._ranks.agree(
            None, None, lambda _: list(self._misfits(store)), doing="Comparing with the checkpoint"
        )
        if not lines:
            return error
        return MismatchError(
            f"the checkpoint does not fit what is registered: {'; '.join(lines)} ({error.message})",
            next_step="Build and register everything as it was when it was written.  To take over "
            f"the weights alone: slurm-forge fork {self._spec.name} --name NEW --fresh optimizer",
        )

    def _compared(self, manifest: Manifest) -> Json:
        """The refusal, if there is one."""
        about: Mapping[str, Any] = manifest.about
        deviations = compare(
            Fingerprint.from_json(about.get("environment")),
            self._facts,
            self._spec.environment,
            lambda difference: accepted(difference, self._changes),
        )
        reason = refused(deviations)
        lines = [*map(str, deviations), *self._structure_lines(manifest), *self._data_lines(about)]
        self.changed = bool(lines)
        if lines and lines != self._reported_lines and self._journal is not None:
            self._reported_lines = lines
            event = ResumeCompared(
                checkpoint=str(manifest.name),
                differences=tuple(lines[:_MOST_LINES]),
                refused=reason is not None,
            )
            with contextlib.suppress(OSError):  # rank 0 alone must not fail over a note about it
                self._journal.write(event)
        if reason is None:
            return self._unmet()
        return {
            "refused": f"not what step {manifest.step} was written with: {reason}",
            "next_step": self._way_out(deviations),
        }

    def _unmet(self) -> Json:
        """The refusal of a batch-size change that the program does not follow."""
        wanted = unmet_batch(self._facts.facts, self._changes)
        if wanted is None:
            return {}
        used = self._facts.facts["sampling.global_batch"]
        return {
            "refused": f"the batch size was changed to {wanted}, and run.batches() gets {used}",
            "next_step": "Change the arguments that it follows from, or write down what it is: "
            f"slurm-forge change {self._spec.name} --global-batch {used}",
        }

    def _way_out(self, deviations: Sequence[Difference]) -> str:
        """What lets the run continue with the first refused difference."""
        run = self._spec.name
        first = next(each for each in deviations if each.policy is Policy.REFUSE)
        part = first.key.partition(".")[0]
        command = f"--set environment.{part}=warn"
        if first.key == "sampling.global_batch":
            command = f"--global-batch {first.now}"
        ways = f"Restore it; or, to go on with it: slurm-forge change {run} {command}"
        if part in ("sampling", "data"):
            ways += (
                "; or begin other data in a new run from this checkpoint: "
                f"slurm-forge fork {run} --name NEW --fresh data"
            )
        return ways

    def _misfits(self, store: CheckpointStore) -> tuple[str, ...]:
        for name in store.candidates():
            with contextlib.suppress(CheckpointRejectedError):
                return self._structure_lines(store.verify_manifest(name))
        return ()

    def _structure_lines(self, manifest: Manifest) -> tuple[str, ...]:
        saved = Structure.from_json(manifest.about.get("structure"))
        if saved is None or self._structure is None:
            return ()
        lines = differences(saved, self._structure)
        if "optimizer" in fresh_parts(manifest.state) or self._replaces_options(manifest):
            return lines
        restored = option_differences(saved, self._structure)
        return tuple(
            f"{line} (the saved value stays)" if line in restored else line for line in lines
        )

    def _data_lines(self, about: Mapping[str, Any]) -> list[str]:
        """What changed in the data, file by file: the facts only show that it did."""
        saved: Mapping[str, Any] = about.get("data") or {}
        lines = []
        for name, now in self._data.items():
            was = DataVersion.from_json(saved.get(name))
            if was is not None:
                lines += [f"data {name}: {line}" for line in was.differences(now)]
        return lines
