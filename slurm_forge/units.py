"""Durations and memory sizes: the texts that Slurm and our users write, and exact values.

Every parser raises ``ValueError`` with a sentence for the user; whoever knows the file and the
line turns it into a ``ConfigError``.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal

KIB = 1024
MIB = 1024 * KIB

#: Words for "no limit" (sbatch and scontrol man pages, ``--time``).
_UNLIMITED = frozenset({"unlimited", "infinite", "-1"})

# [0-9] and not \d: the latter also takes digits of other scripts.  Nine digits can't overflow a
# timedelta in seconds, minutes or hours, six can't in days.
_DASHED = re.compile(
    r"(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,9})(?::(?P<minutes>[0-9]{1,9})"
    r"(?::(?P<seconds>[0-9]{1,9}(?:\.[0-9]{1,6})?))?)?"
)
_COLONS = re.compile(
    r"(?:(?P<hours>[0-9]{1,9}):(?=[0-9]+:))?(?P<minutes>[0-9]{1,9})"
    r"(?::(?P<seconds>[0-9]{1,9}(?:\.[0-9]{1,6})?))?"
)
_UNIT_STEPS = re.compile(
    r"(?:(?P<days>[0-9]{1,6}(?:\.[0-9]{1,9})?)d)?"
    r"(?:(?P<hours>[0-9]{1,9}(?:\.[0-9]{1,9})?)h)?"
    r"(?:(?P<minutes>[0-9]{1,9}(?:\.[0-9]{1,9})?)m)?"
    r"(?:(?P<seconds>[0-9]{1,9}(?:\.[0-9]{1,9})?)s)?"
)
_MEMORY = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,9})?)(?P<unit>[KMGTP]?)", re.IGNORECASE)
_MEMORY_LONG = re.compile(r"([0-9.]+) ?([KMGTP])i?B", re.IGNORECASE)
_MEMORY_UNITS = {"K": KIB, "M": MIB, "G": 1024**3, "T": 1024**4, "P": 1024**5}
#: Decimal, as networks are sold and as nccl-tests prints; capitals count: b is a bit.
_BANDWIDTH = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?P<unit>[MGT](?:B|bit)/s)")
_BANDWIDTH_UNITS = {
    f"{prefix}{unit}/s": size // bits
    for prefix, size in (("M", 10**6), ("G", 10**9), ("T", 10**12))
    for unit, bits in (("B", 1), ("bit", 8))
}
_MICROSECONDS = {"days": 86_400_000_000, "hours": 3_600_000_000, "minutes": 60_000_000}


def parse_slurm_duration(text: str) -> timedelta | None:
    """Value of a duration as Slurm writes and reads it; ``None`` is "no limit".

    ``30`` is minutes, then ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM``, ``D-HH:MM:SS``,
    ``UNLIMITED`` and ``INFINITE`` (sbatch man page, ``--time``); sacct's fractions of a second
    are kept.  Raises ``ValueError`` for anything else, also for ``INVALID`` and ``NOT_SET``.
    """
    stripped = text.strip()
    if stripped.lower() in _UNLIMITED:
        return None
    match = _DASHED.fullmatch(stripped) or _COLONS.fullmatch(stripped)
    if match is None:
        raise ValueError(
            f"{_shown(text)} is not a Slurm duration (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, "
            "D-HH:MM:SS or UNLIMITED)"
        )
    return _total(match)


def format_slurm_duration(value: timedelta | None) -> str:
    """Text of a duration for ``sbatch --time``: ``HH:MM:SS``, ``D-HH:MM:SS`` or ``UNLIMITED``.

    A fraction of a second is rounded up: a limit is never shortened.
    """
    if value is None:
        return "UNLIMITED"
    seconds = -(-_microseconds(value) // 1_000_000)
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def parse_duration(value: object) -> timedelta:
    """Value of a duration in our own files: ``60s``, ``10m``, ``1h30m``, ``2d``, ``48:00:00``.

    The colon and dash forms mean what they mean to Slurm.  A number without a unit is refused
    with ``ValueError``, because Slurm would read minutes and most people mean seconds.
    """
    if isinstance(value, timedelta):
        _microseconds(value)
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f'{_shown(value)} is not a duration; write it like "10m" or "48:00:00"')
    if not isinstance(value, str) or re.fullmatch(r"[0-9]+(\.[0-9]+)?", value.strip()):
        bare = str(value).strip()
        clock = ""
        if isinstance(value, int) and value >= 3600 and value % 60 == 0:
            written = f"{value // 3600}:{value % 3600 // 60:02d}:00"
            clock = f' (YAML 1.1 reads {written} without quotes as {bare}: then write "{written}")'
        raise ValueError(
            f'{_shown(value)} has no unit; write "{bare}s" for seconds or "{bare}m" for minutes'
            f"{clock}"
        )
    stripped = value.strip()
    match = _UNIT_STEPS.fullmatch(stripped.lower()) if stripped else None
    if match is None and (":" in stripped or "-" in stripped):
        match = _DASHED.fullmatch(stripped) or _COLONS.fullmatch(stripped)
    if match is None:
        raise ValueError(
            f"{_shown(value)} is not a duration; write it like "
            '"60s", "10m", "1h30m", "2d" or "48:00:00"'
        )
    return _total(match)


def format_duration(value: timedelta) -> str:
    """Shortest exact text that ``parse_duration`` reads back as the same value."""
    microseconds = _microseconds(value)
    parts: list[str] = []
    for unit, size in _MICROSECONDS.items():
        count, microseconds = divmod(microseconds, size)
        if count:
            parts.append(f"{count}{unit[0]}")
    if microseconds or not parts:
        seconds, fraction = divmod(microseconds, 1_000_000)
        parts.append(f"{seconds}.{fraction:06d}".rstrip("0").rstrip(".") + "s")
    return "".join(parts)


def words_for_duration(value: timedelta) -> str:
    """Exact, for a sentence: ``120 s``, ``30 min``, ``48 h``, ``1h30m``."""
    seconds = value.total_seconds()
    if seconds <= 300:
        return f"{seconds:g} s"
    for name, size, most in (("d", 86400, 1e9), ("h", 3600, 72), ("min", 60, 100)):
        count, rest = divmod(seconds, size)
        if not rest and count <= most and (name != "d" or count > 1):
            return f"{count:.0f} {name}"
    return format_duration(value)


def parse_memory(value: object) -> int:
    """Bytes in a memory size: ``1500M``, ``4G``, ``1.5T``; without a unit MiB, as in Slurm.

    Units are powers of 1024 (sbatch man page, ``--mem``); ``0`` is Slurm's word for all memory
    of the node.  Raises ``ValueError`` for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f'{_shown(value)} is not a memory size; write it like "1500M" or "4G"')
    text = str(value).strip()
    match = _MEMORY.fullmatch(text)
    if match is None:
        long = _MEMORY_LONG.fullmatch(text)
        hint = f'"{long[1]}{long[2].upper()}"' if long else '"1500M" or "4G"'
        raise ValueError(f"{_shown(value)} is not a memory size; write it like {hint}")
    unit = _MEMORY_UNITS[match["unit"].upper() or "M"]
    return int(-(-(Decimal(match["number"]) * unit) // 1))


def format_memory(size: int) -> str:
    """Slurm's text for ``size`` bytes, in the largest unit that is exact, never in less than KiB.

    Part of a KiB is rounded up: a limit is never lowered.
    """
    if size < 0:
        raise ValueError(f"a memory size is never negative: {size}")
    if size == 0:
        return "0"
    kib = -(-size // KIB)
    for unit in "KMG":
        if kib % 1024 or unit == "G":
            return f"{kib}{unit}"
        kib //= 1024
    raise AssertionError("the loop ends at G")


def parse_bandwidth(value: object) -> int:
    """Bytes per second in ``180 GB/s``, ``1.2 TB/s`` or ``400 Gbit/s``; units are powers of 1000.

    Raises ``ValueError`` for anything else, also for a bare number.
    """
    match = _BANDWIDTH.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f'{_shown(value)} is not a bandwidth; write it like "180 GB/s" or "400 Gbit/s"'
        )
    bandwidth = int(Decimal(match["number"]) * _BANDWIDTH_UNITS[match["unit"]])
    if not bandwidth:
        raise ValueError(f"{_shown(value)} is no bandwidth; leave it out where it is not known")
    return bandwidth


def format_bandwidth(value: float) -> str:
    """Text of bytes per second that ``parse_bandwidth`` reads back, exact for whole bytes."""
    whole = round(value)
    for unit in ("TB/s", "GB/s"):
        if whole >= _BANDWIDTH_UNITS[unit]:
            break
    else:
        unit = "MB/s"
    number = Decimal(whole) / _BANDWIDTH_UNITS[unit]
    # Never with an exponent; twelve digits behind the point would be more than is read back.
    if number != round(number, 9):
        unit, number = "MB/s", Decimal(whole) / _BANDWIDTH_UNITS["MB/s"]
    text = f"{number:f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def _total(match: re.Match[str]) -> timedelta:
    fields = {name: Decimal(text) for name, text in match.groupdict().items() if text is not None}
    microseconds = fields.get("seconds", Decimal(0)) * 1_000_000
    for name, size in _MICROSECONDS.items():
        microseconds += fields.get(name, Decimal(0)) * size
    if microseconds % 1:
        raise ValueError(f"{_shown(match[0])} is finer than a microsecond")
    # From a whole number: a float would lose microseconds in long durations.
    return timedelta(microseconds=int(microseconds))


def _microseconds(value: timedelta) -> int:
    if value < timedelta(0):
        raise ValueError(f"a duration is never negative: {value}")
    return value // timedelta(microseconds=1)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 60 else text[:57] + "…"
