"""Which of the files of a run hold the output of an attempt, and which one tells most."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LOCAL = "local-"


def output_of(job: str, logs: Sequence[str]) -> tuple[str, ...]:
    """The files among ``logs`` that the attempts of ``job`` wrote to.

    ``name-<job>.out`` is the batch script's, ``<job>_<rank>_log.err`` (and ``.out``) submitit's.
    """
    if not job:
        return ()
    number = re.escape(job.removeprefix(_LOCAL))
    own = re.compile(rf"(?:.*-{number}\.out|{number}_(?:\d+_)?log\.(?:err|out))")
    return tuple(path for path in logs if own.fullmatch(_name(path)))


def where(output: Sequence[str], rank: int | None, *, errors: bool = True) -> str:
    """Where to look first: the file of ``rank``, else any; empty if there is none.

    With ``errors`` what it wrote to stderr first, else to stdout.  Of several files of which none
    is the rank's, their common beginning with a ``*``.
    """
    ending = "_log.err" if errors else "_log.out"
    ordered = sorted(output, key=lambda path: (not path.endswith(ending), path))
    if rank is not None:
        of_rank = [path for path in ordered if re.search(rf"_{rank}_log\.(?:err|out)$", path)]
        if of_rank:
            return of_rank[0]
    if sum(path.endswith(ending) for path in ordered) > 1:
        return re.sub(r"_\d+_log\.(err|out)$", r"_*_log.\1", ordered[0])
    return ordered[0] if ordered else ""


def _name(path: str) -> str:
    return path.rpartition("/")[2]
