"""What a person's ``prune`` deletes: a decision on what is there, and the same rules as a run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_forge.journal import RunState
from slurm_forge.report.checkpoints import Found
from slurm_forge.spec.job import CheckpointSpec
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.retention import Present, wanted
from slurm_forge.vocabulary.trust import Trust

__all__ = ["PrunePlan", "plan_prune"]

_LEAST_WHOLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What goes, oldest first, what stays, and what is not touched because it can't be read."""

    goes: tuple[Found, ...]
    stays: tuple[Found, ...]
    unreadable: tuple[Found, ...]
    suspect: frozenset[CheckpointName]


def plan_prune(
    found: Sequence[Found], state: RunState, asked: CheckpointSpec, *, last: int | None
) -> PrunePlan:
    """Decide; ``found`` is newest first.  ``last`` stands for the job's ``keep_last`` where given.

    Stays in any case: the newest, the two newest that may be resumed from and are whole, the newest
    good one, what the job keeps for good, and everything while fewer than two are whole.
    """
    whole = [each for each in found if each.manifest is not None]
    known = {each.name: each for each in state.known}

    def present(each: Found) -> Present:
        mine = known.get(each.name)
        if mine is None:
            return Present(name=each.name)
        return Present(name=each.name, trust=mine.trust, time=mine.time or None, metric=mine.metric)

    suspect = frozenset(name for name, each in known.items() if each.trust is Trust.SUSPECT)
    usable = [each.name for each in whole if each.name not in suspect]
    kept = set(
        wanted(
            [present(each) for each in whole],
            asked.rules if last is None else replace(asked.rules, last=last),
        )
    )
    kept.update(each.name for each in whole[:1])
    kept.update(usable[:_LEAST_WHOLE])
    enough = len(usable) >= _LEAST_WHOLE
    goes = [each for each in whole if each.name not in kept] if enough else []
    return PrunePlan(
        goes=tuple(reversed(goes)),
        stays=tuple(each for each in whole if each not in goes),
        unreadable=tuple(each for each in found if each.manifest is None),
        suspect=suspect,
    )
