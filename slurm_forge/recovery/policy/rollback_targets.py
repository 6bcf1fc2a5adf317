"""The targets of rollbacks: good checkpoints from before the trouble, newest first."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.journal.fold import onset_of
from slurm_forge.journal.state import RunState
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.decision import Incident
from slurm_forge.vocabulary.trust import Trust


@dataclass(frozen=True, slots=True)
class RollbackTarget:
    """The checkpoint to go back to; None if nothing was ever saved: training starts over.

    ``further``: it is an older one than the last time.
    """

    name: CheckpointName | None
    further: bool = False

    @property
    def step(self) -> int:
        """The step that training resumes from."""
        return 0 if self.name is None else self.name.step


def again(state: RunState, incident: Incident) -> bool:
    """Whether this is the trouble of the last rollback: it began at the same place, or before.

    If training has got past that place since, up to a good checkpoint, it is another trouble.
    """
    if state.rollback is None:
        return False
    onset = onset_of(state, incident)
    place = state.rollback.place
    return onset is None or place is None or onset <= place


def next_start(state: RunState) -> RollbackTarget:
    """Where a start would resume now."""
    refusal = state.refusals()
    names = (each.name for each in state.known if refusal(each.name) is None)
    return RollbackTarget(max(names, default=None))


def may_be_used(state: RunState, incident: Incident) -> tuple[CheckpointName, ...]:
    """Checkpoints that can be gone back to after an incident, newest first, one per step.

    Good ones if there are any; else all from before the onset.  A rollback never passes what a
    person has promoted: a start would resume from it.
    """
    onset = onset_of(state, incident)
    refusal = state.refusals()
    usable = [
        each
        for each in state.known
        if refusal(each.name) is None
        and (onset is None or each.name.step < onset or each.by_person)
    ]
    good = [each for each in usable if each.trust is Trust.GOOD]
    names: list[CheckpointName] = []
    for each in sorted(good or usable, key=lambda each: each.name, reverse=True):
        if not names or each.name.step < names[-1].step:
            names.append(each.name)
            if each.by_person:
                break
    return tuple(names)


def target_of(state: RunState, incident: Incident, depth: int = 0) -> RollbackTarget | str:
    """The target of a rollback, ``depth`` good checkpoints before the newest, or why there is none.

    For the same trouble it is one further back than the last time, if there is one.
    """
    names = may_be_used(state, incident)
    if not names:
        if state.known or state.gone or state.committed_step is not None:
            return "no checkpoint from before it may be used (slurm-forge checkpoints list)"
        return RollbackTarget(None)
    last = None if state.rollback is None else state.rollback.target
    if last is not None and again(state, incident):
        older = [name for name in names if name.step < last.step]
        if older:
            return RollbackTarget(older[0], further=True)
        return RollbackTarget(names[-1])
    return RollbackTarget(names[min(depth, len(names) - 1)])
