"""What is found out once a probe has failed, beside its verdict.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slurm_forge.recovery.monitor.probe_verdict import Found
from slurm_forge.recovery.monitor.rank_phrases import (
    SHOWN,
    some_ranks,
)
from slurm_forge.recovery.monitor.stalls import Look
from slurm_forge.vocabulary.cause import Evidence

__all__ = ["with_stacks"]


def with_stacks(found: Found, looks: Mapping[int, Look]) -> Found:
    """The verdict with what the others were doing, and where the stacks are kept."""
    waiting = [
        rank
        for rank, look in sorted(looks.items())
        if rank not in found.ranks and look.where is not None and look.where.together
    ]
    lines = list(found.evidence)
    for rank in found.ranks[:SHOWN]:
        look = looks.get(rank)
        if look is not None and look.where is not None and look.where.top:
            lines.append(Evidence(f"rank {rank}", look.where.top))
    if waiting:
        calls = {look.where.call for look in looks.values() if look.where is not None}
        where = " and ".join(sorted(calls - {""}))
        lines.append(Evidence("others", f"{some_ranks(waiting)} waiting in {where}"))
    files = tuple(looks[r].file for r in (found.ranks or sorted(looks)) if _file(looks, r))
    files = files or tuple(look.file for look in looks.values() if look.file)[:1]
    if files:
        lines.append(Evidence("stacks", files[0]))
    return replace(found, evidence=tuple(lines), files=files)


def _file(looks: Mapping[int, Look], rank: int) -> bool:
    return rank in looks and bool(looks[rank].file)
