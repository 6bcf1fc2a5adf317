"""Which files hold the output of an attempt, and which of them says most."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_LOCAL = "local-"
#: Of a file that somebody has compressed to keep it.
COMPRESSED = ".gz"
_OF_RANK = re.compile(r"[0-9_]{1,40}_([0-9]{1,7})_log\.(?:err|out)")
_OF_BATCH = re.compile(r".{1,300}-[0-9]{1,10}\.out")


def output_of(job: str, logs: Sequence[str]) -> tuple[str, ...]:
    """The files among ``logs`` that the attempts of ``job`` wrote to.

    ``name-<job>.out`` is the batch script's, ``<job>_<rank>_log.err`` (and ``.out``) submitit's.
    """
    if not job:
        return ()
    number = re.escape(job.removeprefix(_LOCAL))
    own = re.compile(rf"(?:.*-{number}\.out|{number}_(?:\d+_)?log\.(?:err|out))")
    return tuple(path for path in logs if own.fullmatch(_name(path)))


def outputs_of(jobs: Iterable[str], logs: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """The files of each of the jobs of a run.

    The file of a task of a sweep has the id that Slurm gave the task alone, which is not the one
    that names it: such a job has the files of batch scripts that no other job has.
    """
    files = {job: output_of(job, logs) for job in jobs}
    known = {path for paths in files.values() for path in paths}
    rest = tuple(p for p in logs if p not in known and _OF_BATCH.fullmatch(_name(p)))
    return {job: paths or (rest if "_" in job else ()) for job, paths in files.items()}


def rank_of(path: str) -> int | None:
    """The only rank whose output is in the file, by its name; None if there are several."""
    match = _OF_RANK.fullmatch(_name(path))
    return None if match is None else int(match[1])


def where(output: Sequence[str], rank: int | None, *, errors: bool = True) -> str:
    """Where to look first: the file of ``rank``, else any; empty if there is none.

    With ``errors`` what it wrote to stderr first, else to stdout.  Of several files of which none
    is the rank's, their common beginning with a ``*``.
    """
    ending = "_log.err" if errors else "_log.out"
    ordered = sorted(output, key=lambda path: (not path.endswith(ending), path))
    if rank is not None:
        of_rank = [path for path in ordered if rank_of(path) == rank]
        if of_rank:
            return of_rank[0]
    if sum(path.endswith(ending) for path in ordered) > 1:
        return re.sub(r"_\d+_log\.(err|out)$", r"_*_log.\1", ordered[0])
    return ordered[0] if ordered else ""


def _name(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(COMPRESSED)
