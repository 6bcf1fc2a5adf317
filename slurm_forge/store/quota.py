"""How much a user may still write, where the file system has quotas.

Facts: from what ``lfs quota``, ``quota`` and ``mmlsquota`` print; a line of theirs that can't be
read is no quota, never a guess.  Sources: lfs-quota(1), quota(1), mmlsquota's documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import unquote

from slurm_forge.slurm.process import Runner
from slurm_forge.store.mounts import Mount
from slurm_forge.units import KIB

_PATIENCE = timedelta(seconds=5)
_NUMBER = re.compile(r"\[?(?P<number>[0-9]{1,18})\]?\*?")
_PERSON = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What is used and allowed on one file system; None is no limit.

    Bytes and files.  Beyond the soft limit writing goes on for a grace time only.
    """

    filesystem: str
    used: int
    soft: int | None = None
    hard: int | None = None
    files: int | None = None
    files_soft: int | None = None
    files_hard: int | None = None

    @property
    def left(self) -> int | None:
        """Bytes until the nearer of the limits; None without one."""
        limits = [limit for limit in (self.soft, self.hard) if limit is not None]
        return max(0, min(limits) - self.used) if limits else None

    @property
    def files_left(self) -> int | None:
        """Files until the nearer of the limits; None without one."""
        limits = [limit for limit in (self.files_soft, self.files_hard) if limit is not None]
        return max(0, min(limits) - self.files) if limits and self.files is not None else None


@dataclass(frozen=True, slots=True)
class QuotaAnswer:
    """What was asked, and the quotas; ``problem`` is why there are none, else empty."""

    command: str
    quotas: tuple[Quota, ...] = ()
    problem: str = ""


def parse_quota(text: str) -> tuple[Quota, ...]:
    """Rows of ``lfs quota`` and ``quota``: name, then blocks and files: used, soft, hard, grace.

    Blocks are KiB.  A long name stands on a line of its own; ``*`` marks what is over its limit,
    brackets what not all servers have told.
    """
    quotas = []
    for name, fields in _quota_rows(text):
        numbers = [_number(each) for each in fields]
        if len(numbers) < 3 or any(number is None for number in numbers[:3]):
            continue
        used, soft, hard = (number or 0 for number in numbers[:3])
        # quota(1) leaves the grace out where there is none, unless it is told otherwise (-p).
        rest = fields[4:] if len(fields) >= 7 else fields[3:]
        of_files = [_number(each) for each in rest[:3]]
        known = len(of_files) == 3 and all(number is not None for number in of_files)
        files, files_soft, files_hard = of_files if known else (None, None, None)
        quotas.append(
            Quota(
                filesystem=name,
                used=used * KIB,
                soft=soft * KIB or None,
                hard=hard * KIB or None,
                files=files,
                files_soft=files_soft or None,
                files_hard=files_hard or None,
            )
        )
    return tuple(quotas)


def parse_mmlsquota(text: str) -> tuple[Quota, ...]:
    """Rows of ``mmlsquota -Y``: colons, percent-encoded, a header that names the columns; KiB."""
    names: list[str] = []
    quotas = []
    for line in text.splitlines():
        columns = line.split(":")
        if columns[:1] != ["mmlsquota"] or len(columns) < 3:
            continue
        if columns[2] == "HEADER":
            names = columns
            continue
        row = dict(zip(names, columns, strict=False))
        used = _number(row.get("blockUsage", ""))
        if used is None or row.get("quotaType") not in (None, "USR"):
            continue
        quotas.append(
            Quota(
                filesystem=unquote(row.get("filesystemName", "")),
                used=used * KIB,
                soft=_limit(row, "blockQuota", KIB),
                hard=_limit(row, "blockLimit", KIB),
                files=_number(row.get("filesUsage", "")),
                files_soft=_limit(row, "filesQuota", 1),
                files_hard=_limit(row, "filesLimit", 1),
            )
        )
    return tuple(quotas)


def ask_quota(
    mount: Mount | None,
    user: str,
    runner: Runner,
    environment: Mapping[str, str],
    find: Callable[[str], str | None],
) -> QuotaAnswer | None:
    """The user's quotas on the file system; None where there is nothing to ask.

    ``find`` gives the path of a program, None where it is not installed.
    """
    if mount is None or not _PERSON.fullmatch(user) or user.startswith("-"):
        return None
    program, words, parse = _command(mount, user)
    path = find(program)
    if path is None:
        missing = f"{program} is not installed here" if mount.kind in ("lustre", "gpfs") else ""
        return QuotaAnswer(program, problem=missing) if missing else None
    command = " ".join((program, *words))
    try:
        done = runner((path, *words), _PATIENCE, {**environment, "LC_ALL": "C"})
    except OSError as error:
        return QuotaAnswer(command, problem=str(error.strerror or error))
    if done.returncode is None:
        return QuotaAnswer(command, problem="no answer within 5 s")
    # Their exit status also says that somebody is over quota: what they print counts.
    quotas = parse(done.stdout)
    complaint = " ".join(done.stderr.split())[:200]
    if quotas:
        return QuotaAnswer(command, quotas)
    if done.returncode != 0:
        return QuotaAnswer(command, problem=complaint or "it failed")
    # What has rows that can't be read is no promise that there is no quota.
    odd = next((line for line in done.stdout.splitlines() if _says_something(line)), None)
    problem = "" if odd is None else f"its answer was not understood: {' '.join(odd.split())[:80]}"
    return QuotaAnswer(command, problem=problem)


def _says_something(line: str) -> bool:
    """Whether a line is more than a heading: those of quota and lfs, and of mmlsquota -Y."""
    words = line.strip()
    # Those of groups and filesets are not the user's.
    others = words.startswith("mmlsquota:") and re.search(":(HEADER|GRP|FILESET):", words)
    return bool(words) and not others and not words.startswith(("Disk quotas", "Filesystem"))


def _command(
    mount: Mount, user: str
) -> tuple[str, tuple[str, ...], Callable[[str], tuple[Quota, ...]]]:
    if mount.kind == "lustre":
        return "lfs", ("quota", "-u", user, mount.point), parse_quota
    if mount.kind == "gpfs":
        name = mount.source.removeprefix("/dev/")
        return (
            "mmlsquota",
            ("-Y", "-u", user, *([name] if _PERSON.fullmatch(name) else [])),
            parse_mmlsquota,
        )
    return "quota", ("-w", "-p", "-f", mount.point), parse_quota


def _quota_rows(text: str) -> Iterator[tuple[str, list[str]]]:
    pending: str | None = None
    for line in text.splitlines():
        fields = line.split()
        if (
            not fields
            or line.startswith(("Disk quotas", "Some errors"))
            or fields[0] == "Filesystem"
        ):
            pending = None
            continue
        if len(fields) == 1 and _number(fields[0]) is None:
            pending = fields[0]
        elif pending is not None and _number(fields[0]) is not None:
            yield pending, fields
            pending = None
        elif len(fields) > 3 and _number(fields[0]) is None:
            yield fields[0], fields[1:]
            pending = None


def _number(text: str) -> int | None:
    match = _NUMBER.fullmatch(text)
    return None if match is None else int(match["number"])


def _limit(row: Mapping[str, str], key: str, unit: int) -> int | None:
    # 0 means that there is none.
    return (_number(row.get(key, "")) or 0) * unit or None
