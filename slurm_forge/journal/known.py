"""The checkpoints that history knows of, and how far each is trusted: decisions on values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from slurm_forge.journal.events import CheckpointCommitted
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.trust import Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCheckpoint:
    """One that was committed and not deleted since.  ``why`` says what its trust rests on.

    ``time`` in seconds since 1970; 0 and no size where a judgement is all that is known of it.
    What a person said (``by_person``) is changed by nobody but a person.
    """

    name: CheckpointName
    trust: Trust = Trust.WRITTEN
    why: str = ""
    time: float = 0.0
    size: int = 0
    seconds: float = 0.0
    blocked_s: float = 0.0
    epoch: int | None = None
    #: What ``keep_best`` goes by, under its name.
    metric: float | None = None
    metric_name: str = ""
    #: The loss of the first micro-batch behind it, and how many samples were in it.
    reference_loss: float | None = None
    reference_samples: int = 0
    by_person: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """Where an attempt went on: what was there when it resumed, and the step it began at."""

    attempt: int
    step: int
    candidates: frozenset[CheckpointName]

    def excludes(self, name: CheckpointName) -> bool:
        """Whether an older attempt published ``name`` after this one had gone its own way."""
        if name.attempt >= self.attempt or name in self.candidates:
            return False
        return not self.candidates or name > min(self.candidates)


#: By their names as text, in the order in which they became known.
Known: TypeAlias = tuple[KnownCheckpoint, ...]


#: The same by their names, while records are folded: what follows changes it in place.
KnownByName: TypeAlias = "dict[CheckpointName, KnownCheckpoint]"


def commit(
    known: KnownByName, name: CheckpointName, event: CheckpointCommitted, time: float
) -> None:
    """A checkpoint was published; a judgement that came before its line stays."""
    checkpoint = KnownCheckpoint(
        name=name,
        trust=Trust.SUSPECT if event.findings else Trust.WRITTEN,
        why="; ".join(event.findings),
        time=time,
        size=event.size,
        seconds=event.seconds,
        blocked_s=event.blocked_s,
        epoch=event.epoch,
    )
    earlier = known.pop(name, None)
    if earlier is not None:
        checkpoint = replace(
            checkpoint,
            trust=earlier.trust,
            why=earlier.why,
            by_person=earlier.by_person,
            metric=earlier.metric,
            metric_name=earlier.metric_name,
            reference_loss=earlier.reference_loss,
            reference_samples=earlier.reference_samples,
            seconds=event.seconds or earlier.seconds,
            blocked_s=event.blocked_s or earlier.blocked_s,
        )
    known[name] = checkpoint


def judge(
    known: KnownByName, name: CheckpointName, trust: Trust, why: str, *, by_person: bool
) -> None:
    """A judgement; of two automatic ones the stronger stays: good is not merely verified."""
    each = known.setdefault(name, KnownCheckpoint(name=name))
    if each.by_person and not by_person:
        return
    weaker = trust is Trust.VERIFIED and each.trust in (Trust.GOOD, Trust.SUSPECT)
    if weaker or (not by_person and each.trust is Trust.SUSPECT):
        return
    # Reading every block back is no opinion: it does not bind what is found out later.
    opinion = by_person and trust is not Trust.VERIFIED
    known[name] = replace(each, trust=trust, why=why, by_person=opinion)


def measure(known: KnownByName, name: CheckpointName | None, metric: str, value: float) -> None:
    """The metric that the job keeps the best one by."""
    if name is not None and name in known:
        known[name] = replace(known[name], metric=value, metric_name=metric)


def keep_reference_loss(
    known: KnownByName, name: CheckpointName | None, loss: float, samples: int
) -> None:
    """The loss of the first micro-batch behind it."""
    if name is not None and name in known:
        known[name] = replace(known[name], reference_loss=loss, reference_samples=samples)


def forget(known: KnownByName, names: Iterable[CheckpointName]) -> None:
    """Those are gone."""
    for name in names:
        known.pop(name, None)


def doubt_after_instability(known: KnownByName, onset: int, cause: Cause) -> None:
    """What an instability whose first bad step was ``onset`` leaves to be trusted.

    Where there is a good one, good ones only: the trouble begins before it shows.  Where there is
    none yet, those from before the onset are all there is.
    """
    trusted = [each for each in known.values() if each.trust is not Trust.SUSPECT]
    earned = any(each.trust is Trust.GOOD and each.name.step < onset for each in trusted)
    for each in trusted:
        if each.by_person:
            continue
        if each.name.step >= onset:
            why = f"written after the onset of {cause.value} at step {onset}"
        elif earned and each.trust is not Trust.GOOD:
            why = f"not known to be good yet when {cause.value} began at step {onset}"
        else:
            continue
        known[each.name] = replace(each, trust=Trust.SUSPECT, why=why)


def roll_back(known: KnownByName, target: CheckpointName) -> None:
    """Training goes on from ``target``: what is younger is not resumed from any more."""
    for each in [each for each in known.values() if each.name.step > target.step]:
        if not each.by_person and each.trust is not Trust.SUSPECT:
            why = f"rolled back past it, to step {target.step}"
            known[each.name] = replace(each, trust=Trust.SUSPECT, why=why)


def committed(known: Known, name: CheckpointName, event: CheckpointCommitted, time: float) -> Known:
    """As ``commit``, of values."""
    return _changed(known, lambda by_name: commit(by_name, name, event, time))


def judged(known: Known, name: CheckpointName, trust: Trust, why: str, *, by_person: bool) -> Known:
    """As ``judge``, of values."""
    return _changed(known, lambda by_name: judge(by_name, name, trust, why, by_person=by_person))


def measured(known: Known, name: CheckpointName, metric: str, value: float) -> Known:
    """As ``measure``, of values."""
    return _changed(known, lambda by_name: measure(by_name, name, metric, value))


def with_reference_loss(known: Known, name: CheckpointName, loss: float, samples: int) -> Known:
    """As ``keep_reference_loss``, of values."""
    return _changed(known, lambda by_name: keep_reference_loss(by_name, name, loss, samples))


def pruned(known: Known, names: Iterable[CheckpointName]) -> Known:
    """As ``forget``, of values."""
    return _changed(known, lambda by_name: forget(by_name, names))


def _changed(known: Known, change: Callable[[KnownByName], None]) -> Known:
    by_name = {each.name: each for each in known}
    change(by_name)
    return tuple(by_name.values())


def newest_usable(known: Known) -> KnownCheckpoint | None:
    """What would be resumed from if everything on disk is whole."""
    usable = [each for each in known if each.trust is not Trust.SUSPECT]
    return max(usable, key=lambda each: each.name, default=None)
