"""What ``doctor`` found of the folder of runs, and how often it advises to save.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.launch.render.prediction import Foreseen
from slurm_forge.recovery.policy.prediction import ResumesFrom
from slurm_forge.recovery.policy.save_interval import (
    ASSUMED,
    Advice,
)
from slurm_forge.report.doctor.sections import (
    Mark,
    Section,
    Told,
    clock_difference,
)
from slurm_forge.report.purge import PurgeRule, purge_outlook
from slurm_forge.report.text import clean, plural, span
from slurm_forge.site.model import Storage
from slurm_forge.store.mounts import Mount
from slurm_forge.store.quota import Quota, QuotaAnswer
from slurm_forge.store.room import Room
from slurm_forge.store.trying import Locks, Tried
from slurm_forge.units import words_for_duration

__all__ = ["StorageFacts", "checkpoint_section", "storage_section"]

_LITTLE = 10 << 30
_FEW_FILES = 10_000
_SLOW_S = 1.0
#: Scratch of one host: compute nodes do not see it.
_OF_ONE_HOST = frozenset({"tmpfs", "ramfs", "overlay", "ext4", "ext3", "xfs", "btrfs", "zfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """The folder of runs, or the nearest one above it that exists.  None is "not known"."""

    folder: str
    exists: bool = True
    mount: Mount | None = None
    room: Room | None = None
    quota: QuotaAnswer | None = None
    tried: Tried | None = None
    purge: Storage | None = None
    #: The newest checkpoint's size of this user's runs there, in bytes.
    checkpoint: int | None = None


def storage_section(facts: StorageFacts) -> Section:
    """Room, quota, purge, locks, and what is different about the file system."""
    return Section(
        "storage",
        clean(facts.folder, 200),
        (
            *_kind(facts),
            *_room(facts),
            *_quota(facts),
            *_tried(facts.tried),
            *_purge(facts.purge),
        ),
    )


def _kind(facts: StorageFacts) -> Iterator[Told]:
    if not facts.exists:
        yield Told(Mark.OK, "the folder is not there yet; the one above it was looked at.")
    mount = facts.mount
    if mount is None:
        yield Told(Mark.NOTE, "which file system it lies on can't be told here.")
        return
    where = f"{clean(mount.kind, 20)}, mounted at {clean(mount.point, 120)}"
    if mount.is_read_only:
        yield Told(
            Mark.PROBLEM,
            f"{where}: read-only.",
            "Choose another folder: --runs DIR or SLURM_FORGE_RUNS.",
        )
    elif mount.over_network:
        yield Told(Mark.OK, f"{where}.")
    elif mount.kind in _OF_ONE_HOST:
        yield Told(
            Mark.WARNING,
            f"{where}: usually one host's own, and then compute nodes do not see it.",
            "slurm-forge doctor --live tries it from a compute node.",
        )
    else:
        yield Told(Mark.NOTE, f"{where}: whether compute nodes see it can't be told from here.")
    if mount.caches_attributes:
        yield Told(
            Mark.NOTE,
            "this NFS caches attributes: what another host has written may be seen up to a minute "
            "late. Runs do not wait for files, and a file that a person touches (STOP, SAVE) is "
            "seen as late.",
        )


def _room(facts: StorageFacts) -> Iterator[Told]:
    room = facts.room
    if room is None:
        return
    if room.size is not None:
        needed = 2 * (facts.checkpoint or 0)
        text = f"{_size(room.size)} free"
        if room.size < max(needed, 64 << 20):
            yield Told(
                Mark.PROBLEM,
                f"{text}{_too_little(facts.checkpoint)}.",
                "Make room, or keep fewer checkpoints (checkpoint.keep_last).",
            )
        else:
            mark = Mark.WARNING if room.size < _LITTLE else Mark.OK
            yield Told(mark, f"{text}.")
    if room.files is not None:
        few = room.files < _FEW_FILES
        step = "Delete files on this file system, or ask for more inodes." if few else ""
        yield Told(Mark.WARNING if few else Mark.OK, f"{_count(room.files)} inodes free.", step)


def _too_little(checkpoint: int | None) -> str:
    if checkpoint is None:
        return ": hardly any checkpoint fits"
    return f", and a checkpoint here takes {_size(checkpoint)}: saves fail"


def _quota(facts: StorageFacts) -> Iterator[Told]:
    answer = facts.quota
    if answer is None:
        return
    if answer.problem:
        yield Told(Mark.NOTE, f"quota: {clean(answer.command, 80)}: {clean(answer.problem, 160)}.")
        return
    if not answer.quotas:
        yield Told(Mark.OK, f"no quota ({clean(answer.command, 80)}).")
    for quota in answer.quotas:
        yield _one_quota(quota, facts.checkpoint)


def _one_quota(quota: Quota, checkpoint: int | None) -> Told:
    parts = [f"{_size(quota.used)} used"]
    if quota.left is not None:
        parts.append(f"{_size(quota.left)} left")
    if quota.files is not None:
        parts.append(f"{_count(quota.files)} files")
    if quota.files_left is not None:
        parts.append(f"{_count(quota.files_left)} more files allowed")
    text = f"quota of {clean(quota.filesystem, 120)}: {', '.join(parts)}."
    full = quota.left is not None and quota.left < max(2 * (checkpoint or 0), 64 << 20)
    if full or quota.files_left == 0:
        return Told(Mark.PROBLEM, text, "Delete what you do not need, or ask for a larger quota.")
    close = quota.left is not None and quota.left < _LITTLE
    few = quota.files_left is not None and quota.files_left < _FEW_FILES
    return Told(Mark.WARNING if close or few else Mark.OK, text)


def _tried(tried: Tried | None) -> Iterator[Told]:
    if tried is None:
        return
    if tried.problem is not None:
        yield Told(
            Mark.PROBLEM,
            f"a file can't be written there: {clean(tried.problem, 200)}.",
            "Choose another folder: --runs DIR or SLURM_FORGE_RUNS.",
        )
        return
    if tried.publish_s is not None:
        slow = tried.publish_s > _SLOW_S
        yield Told(
            Mark.WARNING if slow else Mark.OK,
            f"exclusive creation, fsync and rename work: {span(tried.publish_s)} for a small file.",
        )
    yield from clock_difference(
        tried.clock_ahead_s,
        "the file system's",
        "No decision rests on that; times that are told are off by as much.",
    )
    match tried.locks:
        case Locks.WORK:
            yield Told(Mark.OK, "locks hold between processes of this host.")
        case Locks.NONE | Locks.DO_NOT_HOLD:
            yield Told(
                Mark.NOTE,
                f"locks: {tried.locks.value}. Nothing that must not go wrong rests on them; two "
                "commands at the same time may do the same work twice.",
            )
        case _:
            yield Told(Mark.NOTE, f"locks: {tried.locks.value}.")


def _purge(storage: Storage | None) -> Iterator[Told]:
    if storage is None:
        return
    if storage.purge_after is None:
        yield Told(
            Mark.OK, f"the site file calls it {clean(storage.role, 40)}, and knows no purge."
        )
        return
    rule = PurgeRule(storage.purge_after, storage.purge_basis or "")
    yield Told(Mark.NOTE, purge_outlook(rule))


def checkpoint_section(advice: Advice, places: tuple[Foreseen, ...]) -> Section:
    """How often to save, and what that rests on."""
    told = [Told(Mark.OK, _advice(advice))]
    bare = [
        each.partition or each.qos or "?"
        for each in places
        if each.refused is None
        and each.prediction.mode is not None
        and each.prediction.resumes_from is ResumesFrom.PERIODIC
    ]
    if bare:
        names = ", ".join(clean(name, 40) for name in bare[:6]) + (", …" if len(bare) > 6 else "")
        told.append(
            Told(
                Mark.NOTE,
                f"without (enough) notice only periodic checkpoints protect: {names}. What lies "
                "between two of them is computed again.",
            )
        )
    return Section("checkpoints", told=tuple(told))


def _advice(advice: Advice) -> str:
    every = _words(advice.every)
    if not advice.saves or advice.blocked is None or advice.durable is None:
        looked = f"{plural(advice.runs, 'run')} here" if advice.runs else "no run here yet"
        return (
            f"every {every}: nothing was measured ({looked}). With every_minutes: auto, the "
            "default, a run measures its saves and goes by that."
        )
    return (
        f"every {every}: {plural(advice.saves, 'save')} in {plural(advice.runs, 'run')} here took "
        f"{span(advice.durable.total_seconds())} at most and held training up for "
        f"{span(advice.blocked.total_seconds())}; {_interrupted(advice)}. every_minutes: auto does "
        "the same."
    )


def _interrupted(advice: Advice) -> str:
    """How often runs were interrupted; what is assumed, where they were not, is told as that."""
    running, between = (span(each.total_seconds()) for each in (advice.running, advice.between))
    if advice.interruptions == 0:
        more = span(ASSUMED.total_seconds())
        return f"no interruption in {running}; one in {between} is assumed, {more} more"
    return f"{plural(advice.interruptions, 'interruption')} in {running}, one in about {between}"


def _words(value: timedelta) -> str:
    seconds = round(value.total_seconds())
    whole = timedelta(seconds=seconds if seconds < 300 else round(seconds / 60) * 60)
    return words_for_duration(whole)


def _size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def _count(value: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if value >= 10 * size:
            return f"{value // size} {word}"
    return str(value)
