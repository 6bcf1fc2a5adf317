"""The options of sbatch that the fake takes, from its command line or from ``#SBATCH`` lines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import NoReturn

from slurm_forge.slurm.text.directives import read_directives
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.units import parse_memory, parse_slurm_duration


class Refused(Exception):
    """What Slurm writes when it says no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a job asks for; None and empty: nothing said."""

    name: str | None = None
    partition: str | None = None
    nodes: int = 1
    time_limit: timedelta | None = None
    memory: int | None = None
    requeue: bool | None = None
    no_kill: bool = False
    hold: bool = False
    begin: timedelta = timedelta(0)
    #: (``afterany``, job) each; all of them must be fulfilled.
    dependencies: tuple[tuple[str, str], ...] = ()
    excluded: tuple[str, ...] = ()
    nodelist: tuple[str, ...] = ()
    array: tuple[int, ...] = ()
    #: How many tasks of it may run at a time (``%1``).
    throttle: int | None = None
    comment: str | None = None
    #: Name of the signal, whether for the batch shell, and how long before the end.
    signal: tuple[str, bool, timedelta] | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"sbatch: error: {message}")


@cache
def _parser() -> argparse.ArgumentParser:
    # Anything unknown is an error: an option that does nothing would make a test lie.
    parser = _Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    parser.add_argument("-J", "--job-name")
    parser.add_argument("-p", "--partition")
    parser.add_argument("-N", "--nodes", default="1")
    parser.add_argument("-t", "--time")
    parser.add_argument("--mem")
    parser.add_argument("--requeue", action="store_true", default=None)
    parser.add_argument("--no-requeue", dest="requeue", action="store_false")
    parser.add_argument("-k", "--no-kill", action="store_true")
    parser.add_argument("-H", "--hold", action="store_true")
    parser.add_argument("-b", "--begin", default="now")
    parser.add_argument("-d", "--dependency", default="")
    parser.add_argument("-x", "--exclude", default="")
    parser.add_argument("-w", "--nodelist", default="")
    parser.add_argument("-a", "--array", default="")
    parser.add_argument("--comment")
    parser.add_argument("--signal")
    for nothing in ("-n", "--ntasks"), ("-c", "--cpus-per-task"), ("-o", "--output"), ("-D",):
        parser.add_argument(*nothing)
    for nothing in ("--ntasks-per-node",), ("-e", "--error"), ("--open-mode",), ("--export",):
        parser.add_argument(*nothing)
    for nothing in ("-A", "--account"), ("-q", "--qos"), ("--gres",), ("--chdir",):
        parser.add_argument(*nothing)
    parser.add_argument("--parsable", action="store_true")
    parser.add_argument("--exclusive", action="store_true")
    return parser


def sbatch_lines(script: str) -> list[str]:
    """Arguments of the ``#SBATCH`` lines at the head of a script."""
    return list(read_directives(script))


def parse_sbatch(args: Sequence[str]) -> Asked:
    """What these arguments ask for, later ones winning; ``Refused`` where that can't be read."""
    given = _parser().parse_args(list(args))
    try:
        return Asked(
            name=given.job_name,
            partition=given.partition,
            nodes=int(given.nodes.partition("-")[0]),
            time_limit=None if given.time is None else parse_slurm_duration(given.time),
            memory=None if given.mem is None else parse_memory(given.mem),
            requeue=given.requeue,
            no_kill=given.no_kill,
            hold=given.hold,
            begin=_begin(given.begin),
            dependencies=_dependencies(given.dependency),
            excluded=expand_nodes(given.exclude) if given.exclude else (),
            nodelist=expand_nodes(given.nodelist) if given.nodelist else (),
            array=_array(given.array),
            throttle=int(given.array.partition("%")[2] or 0) or None,
            comment=given.comment,
            signal=None if given.signal is None else _signal(given.signal),
        )
    except ValueError as error:
        raise Refused(f"sbatch: error: {error}") from None


def _begin(text: str) -> timedelta:
    match = re.fullmatch(r"now(?:\+([0-9]{1,9}))?(?:seconds?)?", text)
    if match is None:
        raise ValueError(f"the fake knows only --begin=now+<seconds>, not {text!r}")
    return timedelta(seconds=int(match[1] or 0))


def _dependencies(text: str) -> tuple[tuple[str, str], ...]:
    found = []
    for part in filter(None, text.split(",")):
        kind, *jobs = part.split(":")
        if kind not in ("afterany", "afterok", "afternotok", "after") or not jobs:
            raise ValueError(f"Invalid dependency specification: {part!r}")
        found += [(kind, job) for job in jobs]
    return tuple(found)


def _array(text: str) -> tuple[int, ...]:
    tasks: list[int] = []
    for part in filter(None, text.partition("%")[0].split(",")):
        first, _, last = part.partition("-")
        tasks += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(tasks))


def _signal(text: str) -> tuple[str, bool, timedelta]:
    match = re.fullmatch(r"([RB]+:)?(\w+?)(?:@([0-9]{1,9}))?", text)
    if match is None:
        raise ValueError(f"Invalid --signal specification: {text!r}")
    name = match[2].removeprefix("SIG")
    return f"SIG{name}", "B" in (match[1] or ""), timedelta(seconds=int(match[3] or 60))
