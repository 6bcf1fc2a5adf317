"""``checkpoints list``: what lies on disk beside what the journal knows.  Fields are JSON keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from slurm_forge.journal import KnownCheckpoint, RunState, RunStatus
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint on disk.  ``manifest`` is None where it can't be read; ``problem`` says why."""

    name: CheckpointName
    manifest: Manifest | None = None
    problem: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What an interrupted save or deletion left behind: ``kind`` is ``stage`` or ``trash``."""

    name: str
    kind: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLine:
    """One checkpoint.  ``where``: ``disk``, ``unreadable`` (for the reason ``why``), or ``gone``.

    ``trust`` is ``unknown`` if the journal doesn't mention it.  ``time`` in seconds since
    1970; ``save_s`` is None if its duration is unknown.  ``next``: a start now would
    resume from it if every block of it is as it was written.
    """

    name: str
    step: int
    attempt: int
    launch: int
    where: str
    trust: str
    why: str
    time: float | None
    size: int
    save_s: float | None
    reason: str
    world_size: int | None
    next: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsListed:
    """The checkpoints of a run, newest first, and what else lies there."""

    run: str
    path: str
    checkpoints: tuple[CheckpointLine, ...]
    leftovers: tuple[Leftover, ...]


def resumed_next(state: RunState, stored: Sequence[StoredCheckpoint]) -> CheckpointName | None:
    """What a start would resume from now; ``stored`` has the newest first."""
    refusal = state.refusals()
    for each in stored:
        if each.manifest is not None and refusal(each.name) is None:
            return each.name
    return None


def newest_step(state: RunState, on_disk: Collection[CheckpointName] | None) -> int | None:
    """The step of the newest checkpoint: on disk, or by the journal where nobody has looked."""
    if on_disk is None:
        return state.committed_step
    return max((name.step for name in on_disk), default=None)


def missing_checkpoint(
    state: RunState, on_disk: Collection[CheckpointName] | None
) -> CheckpointName | None:
    """The newest checkpoint of the journal, where it is deleted and the journal does not know."""
    if on_disk is None or state.status is RunStatus.FINISHED:
        return None
    newest = max((known.name for known in state.known), default=None)
    return None if newest in on_disk else newest


def list_checkpoints(
    run: str,
    path: str,
    state: RunState,
    stored: Sequence[StoredCheckpoint],
    leftovers: Sequence[Leftover],
) -> CheckpointsListed:
    """Put together what is there (newest first) and what is known."""
    # A finished run is not started again.
    next_ = None if state.status is RunStatus.FINISHED else resumed_next(state, stored)
    by_name, refusal = {each.name: each for each in state.known}, state.refusals()
    lines = [_present(each, by_name.get(each.name), refusal(each.name), next_) for each in stored]
    lines += _gone(state, {each.name for each in stored})
    return CheckpointsListed(
        run=run, path=path, checkpoints=tuple(lines), leftovers=tuple(leftovers)
    )


def _present(
    stored: StoredCheckpoint,
    known: KnownCheckpoint | None,
    refusal: str | None,
    next_: CheckpointName | None,
) -> CheckpointLine:
    name, manifest = stored.name, stored.manifest
    why = stored.problem or refusal or ("" if known is None else known.why)
    time = None if manifest is None else manifest.created_at.timestamp()
    return CheckpointLine(
        name=str(name),
        step=name.step,
        attempt=name.attempt,
        launch=name.launch,
        where="disk" if manifest is not None else "unreadable",
        trust="unknown" if known is None else known.trust.value,
        why=why,
        time=time if time is not None else (known.time or None if known is not None else None),
        size=stored.size,
        save_s=None if known is None or not known.time else known.seconds,
        reason=_reason(manifest, known),
        world_size=None if manifest is None else manifest.world_size,
        next=name == next_,
    )


def _reason(manifest: Manifest | None, known: KnownCheckpoint | None) -> str:
    parts = [] if manifest is None else [manifest.reason]
    if known is not None and known.metric is not None:
        parts.append(f"{known.metric_name} {known.metric:.6g}")
    return ", ".join(parts)


def _gone(state: RunState, present: set[CheckpointName]) -> Iterator[CheckpointLine]:
    for known in sorted(state.known, key=lambda each: each.name, reverse=True):
        name = known.name
        if name in present:
            continue
        yield CheckpointLine(
            name=str(name),
            step=name.step,
            attempt=name.attempt,
            launch=name.launch,
            where="gone",
            trust=known.trust.value,
            why=known.why,
            time=known.time or None,
            size=known.size,
            save_s=known.seconds if known.time else None,
            reason="",
            world_size=None,
            next=False,
        )
