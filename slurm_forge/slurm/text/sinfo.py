"""What kinds of nodes each partition has: from ``sinfo``, which folds equal nodes into one line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.text.fields import to_optional
from slurm_forge.units import MIB

__all__ = ["SINFO_FORMAT", "GpuKind", "NodeGroup", "parse_sinfo"]

#: For ``sinfo --noheader --format``: no value can hold "|" but features, which are last.
SINFO_FORMAT = "%R|%D|%T|%c|%m|%G|%f"

#: ``gpu:a100:4(S:0-1)``, ``gpu:4``; the sockets in brackets do not matter here.
_GPU = re.compile(
    r"gpu(?::(?P<kind>[^:,()]{0,63}[A-Za-z_.][^:,()]{0,63}))?(?::(?P<count>[0-9]{1,4}))(?:\([^)]*\))?"
)
_LEADING = re.compile(r"(?P<number>[0-9]{1,12})\+?")


@dataclass(frozen=True, slots=True)
class GpuKind:
    """GPUs of one kind in a node; ``kind`` is Slurm's type, None where it has none."""

    kind: str | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """``count`` nodes of a partition that are alike.  Memory is in bytes; None is not said."""

    partition: str
    count: int
    state: str
    cpus: int | None = None
    memory: int | None = None
    gpus: tuple[GpuKind, ...] = ()
    features: tuple[str, ...] = ()


def parse_sinfo(text: str) -> tuple[NodeGroup, ...]:
    """Lines of ``sinfo --noheader --format=SINFO_FORMAT``, in sinfo's order."""
    groups = []
    for line in filter(str.strip, text.splitlines()):
        columns = [part.strip() for part in line.split("|", 6)]
        count = _number(columns[1]) if len(columns) == 7 else None
        if count is None or not columns[0]:
            raise SlurmCommandError(
                ("sinfo",),
                0,
                f"its answer was not understood: {line[:200]!r}",
                next_step="Run `sinfo` by hand; if its answer looks right, please report it to us.",
            )
        memory = _number(columns[4])
        groups.append(
            NodeGroup(
                partition=columns[0],
                count=count,
                state=columns[2],
                cpus=_number(columns[3]),
                memory=None if memory is None else memory * MIB,
                gpus=_gpus(columns[5]),
                features=tuple(
                    part.strip()
                    for part in (to_optional(columns[6]) or "").split(",")
                    if part.strip()
                ),
            )
        )
    return tuple(groups)


def _gpus(text: str) -> tuple[GpuKind, ...]:
    parts = re.split(r",(?![^()]*\))", to_optional(text) or "")
    found = (_GPU.fullmatch(part.strip()) for part in parts)
    return tuple(GpuKind(each["kind"], int(each["count"])) for each in found if each)


def _number(text: str) -> int | None:
    match = _LEADING.fullmatch(text)
    return None if match is None else int(match["number"])
