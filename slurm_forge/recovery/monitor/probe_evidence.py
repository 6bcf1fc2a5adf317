"""Evidence that is added to a failed probe's verdict.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slurm_forge.recovery.monitor.probe_verdict import ProbeFailure
from slurm_forge.recovery.monitor.rank_phrases import (
    SHOWN,
    some_ranks,
)
from slurm_forge.recovery.monitor.stalls import Look
from slurm_forge.vocabulary.cause import Evidence


def with_stacks(failure: ProbeFailure, looks: Mapping[int, Look]) -> ProbeFailure:
    """The verdict, with what the other ranks were doing and where their stacks are stored."""
    waiting = [
        rank
        for rank, look in sorted(looks.items())
        if rank not in failure.ranks and look.where is not None and look.where.together
    ]
    lines = list(failure.evidence)
    for rank in failure.ranks[:SHOWN]:
        look = looks.get(rank)
        if look is not None and look.where is not None and look.where.top:
            lines.append(Evidence(f"rank {rank}", look.where.top))
    if waiting:
        calls = {look.where.call for look in looks.values() if look.where is not None}
        where = " and ".join(sorted(calls - {""}))
        lines.append(Evidence("others", f"{some_ranks(waiting)} waiting in {where}"))
    files = tuple(looks[r].file for r in (failure.ranks or sorted(looks)) if _file(looks, r))
    files = files or tuple(look.file for look in looks.values() if look.file)[:1]
    if files:
        lines.append(Evidence("stacks", files[0]))
    return replace(failure, evidence=tuple(lines), files=files)


def _file(looks: Mapping[int, Look], rank: int) -> bool:
    return rank in looks and bool(looks[rank].file)
