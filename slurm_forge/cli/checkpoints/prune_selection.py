"""What a person's ``prune`` deletes: a decision on what is there, and the same rules as a run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_forge.journal import RunState
from slurm_forge.report.checkpoints import StoredCheckpoint
from slurm_forge.spec.job import CheckpointSpec
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.retention import Present, wanted
from slurm_forge.vocabulary.trust import Trust

_LEAST_WHOLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What is deleted, oldest first, what is kept, and what is skipped because it can't be read."""

    goes: tuple[StoredCheckpoint, ...]
    stays: tuple[StoredCheckpoint, ...]
    unreadable: tuple[StoredCheckpoint, ...]
    suspect: frozenset[CheckpointName]


def plan_prune(
    stored: Sequence[StoredCheckpoint], state: RunState, spec: CheckpointSpec, *, last: int | None
) -> PrunePlan:
    """Decide; ``stored`` is newest first.  ``last`` replaces the job's ``keep_last``.

    Stays in any case: the newest, the two newest that may be resumed from and are whole, the newest
    good one, what the job keeps for good, and everything while fewer than two are whole.
    """
    whole = [each for each in stored if each.manifest is not None]
    known = {each.name: each for each in state.known}

    def present(each: StoredCheckpoint) -> Present:
        entry = known.get(each.name)
        if entry is None:
            return Present(name=each.name)
        return Present(
            name=each.name,
            trust=entry.trust,
            time=entry.time or None,
            metric=entry.metric,
            epoch=entry.epoch,
        )

    suspect = frozenset(name for name, each in known.items() if each.trust is Trust.SUSPECT)
    usable = [each.name for each in whole if each.name not in suspect]
    keeps = set(
        wanted(
            [present(each) for each in whole],
            spec.rules if last is None else replace(spec.rules, last=last),
        )
    )
    keeps.update(each.name for each in whole[:1])
    keeps.update(usable[:_LEAST_WHOLE])
    enough = len(usable) >= _LEAST_WHOLE
    goes = [each for each in whole if each.name not in keeps] if enough else []
    return PrunePlan(
        goes=tuple(reversed(goes)),
        stays=tuple(each for each in whole if each not in goes),
        unreadable=tuple(each for each in stored if each.manifest is None),
        suspect=suspect,
    )
