"""Phrases about ranks that several verdicts use: names of ranks, states of processes."""

from __future__ import annotations

from collections.abc import Sequence

#: At most this many ranks are named in a line, followed by a note that there are more.
SHOWN = 8

#: By the kernel's letter.
FROZEN_WORDS = {
    "T": "its process is stopped (state T)",
    "D": "its process waits in the kernel and can't be interrupted (state D)",
    "Z": "its process is dead and not reaped (state Z)",
    "X": "its process is gone",
}


def some_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 2``, or the first of many."""
    rank_list = ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_list}"
