"""Check once, before the first step, that all ranks run the same program on the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.errors import UnsupportedError
from slurm_forge.vocabulary.json_value import Json


def require_identical(ranks: Ranks, facts: Mapping[str, Json], *, next_step: str) -> None:
    """Raise UnsupportedError on all ranks if ``facts`` differs between any two.  Collective.

    Ranks that differ would train on the wrong samples, or wait for each other for ever.
    """
    difference = ranks.agree(None, dict(facts), _difference, doing="Comparing arguments")
    if difference:
        raise UnsupportedError(f"the ranks differ: {difference}", next_step=next_step)


def _difference(reports: Sequence[Mapping[str, Json]]) -> str:
    first = reports[0]
    for rank, other in enumerate(reports):
        for name in first:
            if other[name] != first[name]:
                return f"{name} is {first[name]} on rank 0 and {other[name]} on rank {rank}"
    return ""
