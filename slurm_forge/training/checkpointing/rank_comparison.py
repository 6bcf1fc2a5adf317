"""Compares ranks outside of saves: after a load, after the first step, and before the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.write.replica_check import RankFacts
from slurm_forge.checkpoint.write.replicas import RankMismatch
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.errors import CheckpointError, RanksLostError, UnsupportedError
from slurm_forge.store.manifest import Manifest
from slurm_forge.training.checkpointing.sample_check import (
    ModelInputs,
    samples_report,
    wrong_samples,
)
from slurm_forge.training.core.run_state import Registry, TrainingProgress
from slurm_forge.training.data.source_state import DataState


class RankComparison:
    """One object per launch and rank."""

    def __init__(self, writer: CheckpointWriter, ranks: Ranks, data: DataState) -> None:
        self._writer = writer
        #: Digests of what the models are given, for samples without ids.
        self.inputs: ModelInputs | None = None
        self._ranks = ranks
        self._data = data
        #: The checkpoint that was loaded, until it is compared with the ranks' memory.
        self.loaded: Manifest | None = None
        #: Whether the state after the last load differs from what was saved.
        self.load_differs = False

    def watch_inputs(self, registry: Registry, progress: TrainingProgress) -> None:
        """Start to digest what the models are given, if there are several ranks."""
        if self._ranks.size > 1 and self.inputs is None:
            self.inputs = ModelInputs(lambda: progress.step)
            self.inputs.watch(registry.models)

    def facts(self, progress: TrainingProgress, *, ids: bool = False) -> RankFacts:
        """Return this rank's report about its samples; ``ids``: with the id of each."""
        if progress.sample_ids or self._data.layout.stage:
            # Ids tell more.  Later stages of a pipeline are given activations, not samples.
            self.inputs = None
        inputs = None if self.inputs is None else self.inputs.report()
        sampler = self._data.shared(progress.step).get("digest")
        report = samples_report(
            progress, self._data.layout, ids=ids, inputs=inputs, sampler=sampler
        )
        return RankFacts(report, wrong_samples)

    def compare(
        self,
        state: TrainingState,
        progress: TrainingProgress,
        *,
        unsound: Callable[[], Sequence[str]],
        ids: bool,
    ) -> RankMismatch | None:
        """Compare the replicas, the samples, and the state that was just loaded.

        Collective; waits for the device.  A state that is not finite (``unsound``) differs between
        ranks as well, and is no mismatch: it is handled as an instability.
        """
        manifest, self.loaded = self.loaded, None
        if self._ranks.size == 1 and manifest is None:
            return None
        facts = self.facts(progress, ids=ids)
        try:
            found = self._writer.compare(state, step=progress.step, facts=facts, manifest=manifest)
        except RanksLostError:
            raise
        except CheckpointError as error:  # no storage was touched: the program is to be corrected
            raise UnsupportedError(error.message, next_step=error.next_step) from error
        if manifest is not None:
            self.load_differs = found.as_saved is False
        if found.mismatch is None:
            return None

        def any_of(reports: Sequence[Any]) -> bool:
            return any(reports)

        finite = not self._ranks.agree(None, bool(unsound()), any_of, doing="Judging a difference")
        return found.mismatch if finite else None
