"""Whether ranks train on the samples that are theirs: disjoint, or equal inside a model group.

Each rank reports a digest of the samples of its last step in an exchange that a save has anyway;
the ids themselves only in the first one of a launch, where an overlap in part is found, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.run_state import TrainingProgress
from slurm_forge.vocabulary.json_value import Json

#: Ids of one rank that the first exchange carries at most.
_MOST_IDS = 4096
_SHOWN = 3


def samples_report(progress: TrainingProgress, layout: RankLayout, *, ids: bool) -> Json:
    """What this rank says of the samples of its last step; ``ids``: one by one."""
    samples = progress.sample_ids
    digest = hashlib.blake2b(repr(samples).encode(), digest_size=8).hexdigest()
    return {
        "data_rank": layout.data_rank,
        "count": len(samples),
        "consumed": progress.consumed,
        "digest": digest,
        "ids": [_to_json(each) for each in samples[:_MOST_IDS]] if ids else [],
    }


def wrong_samples(reports: Sequence[Any]) -> str:
    """What is wrong with the samples that ranks report; empty where nothing is.

    Ranks without samples of a known identity (batches of the program's own) are not compared.
    """
    known = [(rank, each) for rank, each in enumerate(reports) if each and each["count"]]
    by_data_rank: dict[int, tuple[int, Mapping[str, Any]]] = {}
    by_digest: dict[str, int] = {}
    owners: dict[str, int] = {}
    for rank, each in known:
        other, first = by_data_rank.setdefault(each["data_rank"], (rank, each))
        if other != rank:
            if any(first[fact] != each[fact] for fact in ("digest", "count", "consumed")):
                return (
                    f"ranks {other} and {rank} belong to one model-parallel group (data-parallel "
                    f"rank {each['data_rank']}) and trained on different samples in the last step: "
                    f"{first['count']} up to position {first['consumed']}, and {each['count']} up "
                    f"to position {each['consumed']}; pass the mesh to run.batches(mesh=…)"
                )
            continue
        twin = by_digest.setdefault(each["digest"], rank)
        if twin != rank:
            return _same(twin, rank, f"all {each['count']} samples")
        shared = [text for text in map(str, each["ids"]) if owners.setdefault(text, rank) != rank]
        if shared:
            some = ", ".join(shared[:_SHOWN])
            return _same(owners[shared[0]], rank, f"{len(shared)} samples ({some})")
    return ""


def _same(one: int, two: int, what: str) -> str:
    return (
        f"ranks {one} and {two} trained on the same samples in the last step: {what}; give each "
        "data-parallel rank a part of its own, as run.batches(dataset) does"
    )


def _to_json(sample: object) -> Json:
    if isinstance(sample, tuple):
        return [_to_json(part) for part in sample]
    return sample if isinstance(sample, int | str) else str(sample)
