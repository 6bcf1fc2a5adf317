"""The batch script of ``cluster="forge"``: submitit's own, with the supervisor in srun's place."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from submitit.core import utils

from slurm_forge.errors import ConfigError, SubmissionError
from slurm_forge.launch.render.batch_script import (
    begin_lines,
    refuse_traps,
    start_file,
    start_lines,
    submitted_lines,
    successor_lines,
)
from slurm_forge.launch.render.save_times import WARNED_FROM
from slurm_forge.launch.render.sbatch_options import refuse_several_jobs
from slurm_forge.process import process_words
from slurm_forge.units import parse_slurm_duration

#: A line of its own in submitit's script, to be exchanged for ours.
_PAYLOAD = ":slurm_forge payload"
#: What was true of the first start, and would keep a successor waiting or refuse it.
_ONCE = frozenset({"dependency", "begin", "deadline"})


@dataclass(frozen=True, slots=True)
class Array:
    """Which task is which run: ``index`` for the supervisor, ``folders`` a line each for bash."""

    index: Path
    folders: Path
    size: int


@dataclass(frozen=True, slots=True)
class Successor:
    """A job that goes on where the job ``first`` was; ``pickle`` is what submitit ran there."""

    run: Path
    pickle: Path
    first: str
    tasks: int


def batch_script(
    subject: Path | Array | Successor,
    folder: Path,
    python: str,
    parameters: dict[str, Any],
    *,
    spares: int = 0,
    outlives_nodes: bool = False,
    calls: bool = False,
) -> str:
    """The script of a run, of an array of runs, or of the successor of one of them.

    ``folder`` is submitit's, ``python`` shell text, ``parameters`` are those of its executor.
    ``spares`` are asked for beside the nodes of the ranks; ``outlives_nodes``: the job goes on
    without one that it loses.  ``calls``: what runs is a callable that knows nothing of us.
    """
    parameters = dict(parameters)
    extra = dict(parameters.get("additional_parameters") or {})
    if {"no_kill", "no-kill"} & set(extra):
        raise SubmissionError(
            "additional_parameters can't hold no_kill: slurm_forge sets it where it can be used",
            next_step="Ask for spare nodes instead: forge_spare_nodes=1.",
        )
    if outlives_nodes:
        extra["no_kill"] = True
        parameters["nodes"] = int(parameters.get("nodes") or 1) + spares
    if not {"no_requeue", "no-requeue"} & set(extra):
        extra.setdefault("requeue", True)
    if isinstance(subject, Successor):
        parameters, extra = _without(parameters), _without(extra)
    parameters["additional_parameters"] = extra
    _check(parameters, extra)
    srun_args = list(parameters.pop("srun_args", None) or [])
    if not parameters.pop("use_srun", True):
        raise SubmissionError(
            "forge needs srun to start the ranks (use_srun=False was given)",
            next_step="Leave use_srun out; the function may still start what it likes.",
        )
    if isinstance(subject, Array):
        parameters["map_count"] = subject.size
        which = ["--array", str(subject.index)]
        start = _start_of_task(subject)
    else:
        run = subject.run if isinstance(subject, Successor) else subject
        which, start = [str(run)], shlex.quote(str(start_file(run / "submissions")))
    own_setup = list(parameters.pop("setup", None) or [])
    try:
        refuse_traps(own_setup, "setup")
    except ConfigError as error:
        raise SubmissionError(error.message, next_step=error.next_step) from error
    setup = [begin_lines(start), *own_setup]
    if isinstance(subject, Successor):
        first = [subject.pickle, folder]
        setup += [successor_lines(*first, first=subject.first, tasks=subject.tasks)]
    elif "%" not in str(folder):  # else it is another folder for each job
        setup += [submitted_lines(folder)]
    step = _step_options(folder, parameters, srun_args)
    # What knows nothing of us is conducted as a command, whose srun is its own.
    conduct = process_words(
        "execute" if calls else "supervise", *which, "--via", "submitit forge", "--"
    )
    step = [*(("srun", "--kill-on-bad-exit=1", "--unbuffered") if calls else ()), *step]
    # The payload is submitit's own: it loads the pickle, calls the pointer, stores the result.
    task = f"{python} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    command = " ".join([python, shlex.join([*conduct, *step]), task])
    started = start_lines(command, teardown=bool(parameters.get("teardown")))
    warned = "signal" in extra or _warns(parameters.get("time", 5))
    lines = _submitits(_PAYLOAD, folder, setup, parameters).split("\n")
    return "\n".join(
        started if line == _PAYLOAD else line
        for line in lines
        if warned or not line.startswith("#SBATCH --signal=")
    )


def directives(script: str) -> tuple[str, ...]:
    """The options that a script has for sbatch."""
    return tuple(re.findall(r"^#SBATCH +(--?[A-Za-z].*?) *$", script, re.MULTILINE))


def _submitits(command: str, folder: Path, setup: list[str], parameters: dict[str, Any]) -> str:
    from submitit.slurm.slurm import _make_sbatch_string

    return str(
        _make_sbatch_string(
            command=command, folder=folder, use_srun=False, setup=setup, **parameters
        )
    )


def _without(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in _ONCE}


def _start_of_task(array: Array) -> str:
    """Shell text for the start file of a task's own run, which requeue renews; without Python."""
    name = start_file(Path()).name
    line = f'sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(array.folders))}'
    # Whatever the shell's options are: a file that is missing is reported by the line after it.
    return f"$({line} || :)/{name}"


def _step_options(folder: Path, parameters: dict[str, Any], srun_args: list[str]) -> list[str]:
    """Per-task logs where submitit looks for them."""
    paths = utils.JobPaths(folder=folder)
    out, err = str(paths.stdout), str(paths.stderr)
    if "map_count" in parameters:
        out, err = out.replace("%j", "%A_%a"), err.replace("%j", "%A_%a")
    errors = [] if parameters.get("stderr_to_stdout") else ["--error", err]
    return ["--open-mode=append", "--output", out, *errors, *srun_args]


def _check(parameters: dict[str, Any], extra: dict[str, Any]) -> None:
    for name, value in {**parameters, **extra}.items():
        # A line break would end the comment that an option is, and begin a command.
        if isinstance(value, str) and not value.isprintable():
            raise SubmissionError(
                f"{name}={value!r} can't be an sbatch option",
                next_step="Options are one line of printable text.",
            )
    refuse_several_jobs(extra)
    words = [str(word) for word in parameters.get("srun_args") or ()]
    refuse_several_jobs({word.partition("=")[0]: word.partition("=")[2] for word in words})


def _warns(limit: Any) -> bool:
    try:
        # Submitit means minutes, and passes on whatever else Slurm understands.
        text = isinstance(limit, str)
        time_limit = parse_slurm_duration(limit) if text else timedelta(minutes=limit)
    except ValueError as error:
        raise SubmissionError(
            f"time={limit!r} is no time limit ({error})",
            next_step='Give minutes as a number, or Slurm\'s own form: "1-12:00:00".',
        ) from error
    return time_limit is None or time_limit >= WARNED_FROM
