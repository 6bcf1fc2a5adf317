"""What kinds of nodes each partition has: from ``sinfo``, which folds equal nodes into one line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.text.fields import to_optional

#: For ``sinfo --noheader --format``: no value can hold "|" but features, which are last.
SINFO_FORMAT = "%R|%G|%f"

#: ``gpu:a100:4(S:0-1)``, ``gpu:4``; the sockets in brackets do not matter here.
_GPU = re.compile(
    r"gpu(?::(?P<kind>[^:,()]{0,63}[A-Za-z_.][^:,()]{0,63}))?(?::(?P<count>[0-9]{1,4}))(?:\([^)]*\))?"
)


@dataclass(frozen=True, slots=True)
class GpuKind:
    """GPUs of one kind in a node; ``kind`` is Slurm's type, None where it has none."""

    kind: str | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

    partition: str
    gpus: tuple[GpuKind, ...] = ()
    features: tuple[str, ...] = ()


def parse_sinfo(text: str) -> tuple[NodeGroup, ...]:
    """Lines of ``sinfo --noheader --format=SINFO_FORMAT``, in sinfo's order."""
    groups = []
    for line in filter(str.strip, text.splitlines()):
        columns = [part.strip() for part in line.split("|", 2)]
        if len(columns) != 3 or not columns[0]:
            raise SlurmCommandError(
                ("sinfo",),
                0,
                f"its answer was not understood: {line[:200]!r}",
                next_step="Run `sinfo` by hand; if its answer looks right, please report it to us.",
            )
        groups.append(
            NodeGroup(
                partition=columns[0],
                gpus=_gpus(columns[1]),
                features=tuple(
                    part.strip()
                    for part in (to_optional(columns[2]) or "").split(",")
                    if part.strip()
                ),
            )
        )
    return tuple(groups)


def _gpus(text: str) -> tuple[GpuKind, ...]:
    parts = re.split(r",(?![^()]*\))", to_optional(text) or "")
    matches = (_GPU.fullmatch(part.strip()) for part in parts)
    return tuple(GpuKind(each["kind"], int(each["count"])) for each in matches if each)
