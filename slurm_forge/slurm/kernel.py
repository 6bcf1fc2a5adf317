"""What the kernel counted about memory, for the control group that this process is in.

Slurm gives every job a group with a limit; whoever goes beyond it is killed without a word, and
the only trace that is left inside of the job is a counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
#: Where version 1 mounts the memory controller, and version 2, alone or beside it, any.
_V1 = PurePosixPath("sys/fs/cgroup/memory")
_V2 = (PurePosixPath("sys/fs/cgroup"), PurePosixPath("sys/fs/cgroup/unified"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the kernel has killed for memory so far; ``None`` where it does not say.

    ``group``: in this process's control group; ``machine``: on the whole node (both since Linux
    4.13).  ``at_limit``: how often the group was at its limit (version 1 only), which says less.
    ``source`` is the file that ``group`` was read from.
    """

    group: int | None = None
    machine: int | None = None
    at_limit: int | None = None
    source: str = ""


def killed_since(before: OomKills, now: OomKills) -> str | None:
    """What the counters say about a process that was killed in between; None: it wasn't memory.

    A kill on the node may have been another job's, so it counts only where the group's own
    counter can't be read; being at the limit only where nobody counts kills.
    """
    if before.group is not None and now.group is not None:
        if now.group > before.group:
            return f"oom_kill from {before.group} to {now.group} in {now.source}"
        return None
    if before.machine is not None and now.machine is not None:
        if now.machine > before.machine:
            return f"oom_kill from {before.machine} to {now.machine} in /proc/vmstat"
        return None
    if before.at_limit is not None and now.at_limit is not None and now.at_limit > before.at_limit:
        return f"memory.failcnt from {before.at_limit} to {now.at_limit}"
    return None


def parse_counters(text: str) -> dict[str, int]:
    """``name number`` per line, as in memory.events, memory.oom_control and /proc/vmstat."""
    counters: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdecimal():
            counters[name] = int(value)
    return counters


def memory_groups(cgroup: str) -> tuple[PurePosixPath, ...]:
    """Folders that may be this process's memory group, from the text of ``/proc/self/cgroup``."""
    return controller_groups(cgroup, "memory", (_V1,))


def controller_groups(
    cgroup: str, controller: str, v1: Sequence[PurePosixPath]
) -> tuple[PurePosixPath, ...]:
    """Folders that may be this process's group for a controller, the likeliest first.

    ``cgroup`` is the text of ``/proc/self/cgroup``, ``v1`` where version 1 mounts the controller.
    In a container the path is that of the host, and what is mounted is the group itself.
    """
    groups: list[PurePosixPath] = []
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = PurePosixPath(path.lstrip("/"))
        if ".." in below.parts:
            below = PurePosixPath()
        if controller in controllers.split(","):
            groups[:0] = [place for root in v1 for place in (root / below, root)]
        elif number == "0" and not controllers:
            groups += [place for root in _V2 for place in (root / below, root)]
    return tuple(dict.fromkeys(groups))


def read_oom_kills(root: Path = _ROOT) -> OomKills:
    """The counters as they are now; never raises."""
    groups = memory_groups(_text(root / "proc/self/cgroup"))
    machine = parse_counters(_text(root / "proc/vmstat")).get("oom_kill")
    at_limit = _number(root / group / "memory.failcnt" for group in groups)
    for group in groups:
        for name in ("memory.oom_control", "memory.events"):
            kills = parse_counters(_text(root / group / name)).get("oom_kill")
            if kills is not None:
                source = f"/{group / name}"
                return OomKills(group=kills, machine=machine, at_limit=at_limit, source=source)
    return OomKills(machine=machine, at_limit=at_limit)


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that /proc/meminfo calls available; None where it does not say."""
    for line in _text(root / "proc/meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "MemAvailable:" and words[1].isdecimal():
            return int(words[1]) * 1024
    return None


def read_memory_limit(root: Path = _ROOT) -> tuple[int | None, int | None]:
    """Limit on this process's memory in bytes, and what is used of it; None where there is none.

    The lowest limit of its group and of those above counts: Slurm sets it for jobs and steps, and
    a task has a group of its own below them.
    """
    groups = memory_groups(_text(root / "proc/self/cgroup"))
    mounts = (_V1, *_V2)
    levels = (
        root / level
        for group in groups
        for level in (group, *group.parents)
        if any(level == mount or mount in level.parents for mount in mounts)
    )
    lowest, used = None, None
    for level in dict.fromkeys(levels):
        limit = _number(level / name for name in ("memory.limit_in_bytes", "memory.max"))
        here = _number(level / name for name in ("memory.usage_in_bytes", "memory.current"))
        # Version 1 says "no limit" with a number near 2^63.
        if limit is not None and limit < 1 << 60 and (lowest is None or limit < lowest):
            lowest, used = limit, here
        elif lowest is None and used is None:
            used = here
    return lowest, used


def _number(paths: Iterable[Path]) -> int | None:
    texts = (_text(path).strip() for path in paths)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
