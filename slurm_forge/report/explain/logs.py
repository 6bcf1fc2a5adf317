"""Which of the files of a run hold the output of an attempt, and which one tells most."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["output_of", "where"]

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


def where(output: Sequence[str], rank: int | None) -> str:
    """Where to look first: the file of ``rank`` (errors first), else any; empty if there is none.

    Of several files of which none is the rank's, their common beginning with a ``*``.
    """
    if rank is not None:
        of_rank = [path for path in output if re.search(rf"_{rank}_log\.(?:err|out)$", path)]
        if of_rank:
            return _errors_first(of_rank)[0]
    errors = [path for path in _errors_first(output) if path.endswith("_log.err")]
    if len(errors) > 1:
        folder, _, name = errors[0].rpartition("/")
        job = re.sub(r"_\d+_log\.err$", "", name)
        return f"{folder}/{job}_*_log.err" if folder else f"{job}_*_log.err"
    return _errors_first(output)[0] if output else ""


def _errors_first(paths: Sequence[str]) -> list[str]:
    return sorted(paths, key=lambda path: (not path.endswith("_log.err"), path))


def _name(path: str) -> str:
    return path.rpartition("/")[2]
