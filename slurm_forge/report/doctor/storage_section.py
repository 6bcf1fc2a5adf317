"""What ``doctor`` found of the folder of runs, and how often it advises to save.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.launch.render.prediction import PreemptionForecast
from slurm_forge.recovery.live_findings import Mark
from slurm_forge.recovery.policy.prediction import ResumesFrom
from slurm_forge.recovery.policy.save_interval import (
    ASSUMED,
    Advice,
)
from slurm_forge.report.doctor.sections import Remark, ReportSection, clock_difference
from slurm_forge.report.purge import PurgeRule, purge_outlook
from slurm_forge.report.text import clean, plural, span
from slurm_forge.site.model import Storage
from slurm_forge.store.mounts import Mount
from slurm_forge.store.quota import Quota, QuotaAnswer
from slurm_forge.store.room import FreeSpace
from slurm_forge.store.trying import Locks, Tried
from slurm_forge.units import words_for_duration

_LITTLE = 10 << 30
_FEW_FILES = 10_000
_SLOW_S = 1.0
#: What acdirmax is where it is not set (nfs(5)).
_NFS_LISTING_S = 60
#: Scratch of one host: compute nodes do not see it.
_OF_ONE_HOST = frozenset({"tmpfs", "ramfs", "overlay", "ext4", "ext3", "xfs", "btrfs", "zfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """The folder of runs, or the nearest one above it that exists.  None is "not known"."""

    folder: str
    exists: bool = True
    mount: Mount | None = None
    free_space: FreeSpace | None = None
    quota: QuotaAnswer | None = None
    tried: Tried | None = None
    purge: Storage | None = None
    #: The newest checkpoint's size of this user's runs there, in bytes.
    checkpoint: int | None = None


def storage_section(facts: StorageFacts) -> ReportSection:
    """Room, quota, purge, locks, and what is different about the file system."""
    return ReportSection(
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


def _kind(facts: StorageFacts) -> Iterator[Remark]:
    if not facts.exists:
        yield Remark(Mark.OK, "the folder does not exist yet; its parent was checked.")
    mount = facts.mount
    if mount is None:
        yield Remark(Mark.NOTE, "its file system could not be determined.")
        return
    where = f"{clean(mount.kind, 20)}, mounted at {clean(mount.point, 120)}"
    if mount.is_read_only:
        yield Remark(
            Mark.PROBLEM,
            f"{where}: read-only.",
            "Choose another folder: --runs DIR or SLURM_FORGE_RUNS.",
        )
    elif mount.over_network:
        yield Remark(Mark.OK, f"{where}.")
    elif mount.kind in _OF_ONE_HOST:
        yield Remark(
            Mark.WARNING,
            f"{where}: usually local to one host, in which case compute nodes do not see it.",
            "slurm-forge doctor --live tries it from a compute node.",
        )
    else:
        yield Remark(Mark.NOTE, f"{where}: whether compute nodes see it is unknown.")
    yield from _options(mount)


def _options(mount: Mount) -> Iterator[Remark]:
    """What its mount options change about what runs rest on."""
    oldest = _NFS_LISTING_S if mount.oldest_listing_s is None else mount.oldest_listing_s
    if mount.opens_from_cache:
        yield Remark(
            Mark.WARNING,
            f"this NFS is mounted with nocto: what another host has appended to a file may be "
            f"missed for {oldest} s, so status lags, and a restart may overlook the last lines of "
            "a journal. Claims, STOP and checkpoints are looked up on the server all the same.",
            "Ask the administrators to mount it without nocto, or choose another folder: --runs "
            "DIR or SLURM_FORGE_RUNS.",
        )
    elif mount.caches_attributes:
        yield Remark(
            Mark.NOTE,
            f"this NFS caches attributes: commands such as ls show what another host has written "
            f"up to {oldest} s late. Runs ask the server where it counts.",
        )
    if mount.gives_up:
        yield Remark(
            Mark.WARNING,
            "this NFS is mounted soft: calls fail while the server is busy, and may have been done "
            "all the same. A save that fails is repeated at the next interval.",
            "Ask the administrators to mount it with hard, which is the default.",
        )
    if mount.has_local_locks:
        yield Remark(
            Mark.NOTE,
            "locks hold on one host only, by its mount options. Nothing critical depends on them; "
            "two commands on two hosts may do the same work twice.",
        )


def _room(facts: StorageFacts) -> Iterator[Remark]:
    free_space = facts.free_space
    if free_space is None:
        return
    if free_space.size is not None:
        needed = 2 * (facts.checkpoint or 0)
        text = f"{_size(free_space.size)} free"
        if free_space.size < max(needed, 64 << 20):
            yield Remark(
                Mark.PROBLEM,
                f"{text}{_too_little(facts.checkpoint)}.",
                "Make room, or keep fewer checkpoints (checkpoint.keep_last).",
            )
        else:
            mark = Mark.WARNING if free_space.size < _LITTLE else Mark.OK
            yield Remark(mark, f"{text}.")
    if free_space.files is not None:
        few = free_space.files < _FEW_FILES
        step = "Delete files on this file system, or ask for more inodes." if few else ""
        yield Remark(
            Mark.WARNING if few else Mark.OK, f"{_count(free_space.files)} inodes free.", step
        )


def _too_little(checkpoint: int | None) -> str:
    if checkpoint is None:
        return ": hardly any checkpoint fits"
    return f", and a checkpoint here takes {_size(checkpoint)}: saves fail"


def _quota(facts: StorageFacts) -> Iterator[Remark]:
    answer = facts.quota
    if answer is None:
        return
    if answer.problem:
        yield Remark(
            Mark.NOTE, f"quota: {clean(answer.command, 80)}: {clean(answer.problem, 160)}."
        )
        return
    if not answer.quotas:
        yield Remark(Mark.OK, f"no quota ({clean(answer.command, 80)}).")
    for quota in answer.quotas:
        yield _one_quota(quota, facts.checkpoint)


def _one_quota(quota: Quota, checkpoint: int | None) -> Remark:
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
        return Remark(Mark.PROBLEM, text, "Delete what you do not need, or ask for a larger quota.")
    close = quota.left is not None and quota.left < _LITTLE
    few = quota.files_left is not None and quota.files_left < _FEW_FILES
    return Remark(Mark.WARNING if close or few else Mark.OK, text)


def _tried(tried: Tried | None) -> Iterator[Remark]:
    if tried is None:
        return
    if tried.problem is not None:
        yield Remark(
            Mark.PROBLEM,
            f"a file can't be written there: {clean(tried.problem, 200)}.",
            "Choose another folder: --runs DIR or SLURM_FORGE_RUNS.",
        )
        return
    if tried.publish_s is not None:
        slow = tried.publish_s > _SLOW_S
        yield Remark(
            Mark.WARNING if slow else Mark.OK,
            f"exclusive creation, fsync and rename work: {span(tried.publish_s)} for a small file.",
        )
    yield from clock_difference(
        tried.clock_ahead_s,
        "the file system's",
        "No decision depends on that; the times shown are off by as much.",
    )
    match tried.locks:
        case Locks.WORK:
            yield Remark(Mark.OK, "locks hold between processes of this host.")
        case Locks.NONE | Locks.DO_NOT_HOLD:
            yield Remark(
                Mark.NOTE,
                f"locks: {tried.locks.value}. Nothing critical depends on them; two commands at "
                "the same time may do the same work twice.",
            )
        case _:
            yield Remark(Mark.NOTE, f"locks: {tried.locks.value}.")


def _purge(storage: Storage | None) -> Iterator[Remark]:
    if storage is None:
        return
    if storage.purge_after is None:
        yield Remark(
            Mark.OK, f"the site file calls it {clean(storage.role, 40)}and lists no purge."
        )
        return
    rule = PurgeRule(storage.purge_after, storage.purge_basis or "")
    yield Remark(Mark.NOTE, purge_outlook(rule))


def checkpoint_section(advice: Advice, places: tuple[PreemptionForecast, ...]) -> ReportSection:
    """How often to save, and the figures behind it."""
    remarks = [Remark(Mark.OK, _advice(advice))]
    bare = [
        each.partition or each.qos or "?"
        for each in places
        if each.refused is None
        and each.prediction.mode is not None
        and each.prediction.resumes_from is ResumesFrom.PERIODIC
    ]
    if bare:
        names = ", ".join(clean(name, 40) for name in bare[:6]) + (", …" if len(bare) > 6 else "")
        remarks.append(
            Remark(
                Mark.NOTE,
                f"without enough notice only periodic checkpoints protect a run: {names}. Work "
                "since the last one is repeated.",
            )
        )
    return ReportSection("checkpoints", told=tuple(remarks))


def _advice(advice: Advice) -> str:
    every = _words(advice.every)
    if not advice.saves or advice.blocked is None or advice.durable is None:
        where = f"{plural(advice.runs, 'run')} here" if advice.runs else "no runs here yet"
        return (
            f"every {every}: nothing was measured ({where}). With every_minutes: auto, the "
            "default, a run adapts to the saves that it measures."
        )
    return (
        f"every {every}: {plural(advice.saves, 'save')} in {plural(advice.runs, 'run')} here took "
        f"{span(advice.durable.total_seconds())} at most and blocked training for "
        f"{span(advice.blocked.total_seconds())}; {_interrupted(advice)}. every_minutes: auto does "
        "the same."
    )


def _interrupted(advice: Advice) -> str:
    """How often runs were interrupted; without interruptions, an assumption marked as one."""
    running, between = (span(each.total_seconds()) for each in (advice.running, advice.between))
    if advice.interruptions == 0:
        more = span(ASSUMED.total_seconds())
        return f"no interruption in {running}; one in {between} is assumed, {more} more"
    return f"{plural(advice.interruptions, 'interruption')} in {running}, one in about {between}"


def _words(value: timedelta) -> str:
    seconds = round(value.total_seconds())
    rounded = timedelta(seconds=seconds if seconds < 300 else round(seconds / 60) * 60)
    return words_for_duration(rounded)


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
