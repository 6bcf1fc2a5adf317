"""Runs of programs that know nothing of us: from a command line, or a job file, to a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_forge.documents import Document, build, build_plain, read
from slurm_forge.errors import ConfigError
from slurm_forge.launch.submit.submission import (
    create_run,
    replace_job,
    untouched,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.spec import JobSpec
from slurm_forge.spec.launchers import ProgramSpec
from slurm_forge.spec.run_file import RunFile, read_run_file

_KEY = re.compile(r"^(?:[^\n]*?: )?(?P<key>[a-z_]+): ")


def program_job(
    command: Sequence[str],
    *,
    name: str | None,
    options: Mapping[str, Any],
    path: Path | None = None,
    job_name: str = "",
    lead: str | None = None,
) -> JobSpec:
    """The job that a command line means; ``path`` is a job file, whose keys it adds to.

    The name is the one given, else the file's, else ``job_name``.  ``ConfigError`` names the option
    or the line.
    """
    document = Document({}, None) if path is None else read(path)
    data = dict(document.data)
    if data.get("entry") is not None:
        raise ConfigError(
            "entry: slurm-forge exec starts a command",
            path=path,
            line=document.line_of(("entry",)),
            next_step="Submit this file with slurm-forge submit, or give one without entry: to "
            "slurm-forge exec.",
        )
    if not command and data.get("command") is None:
        raise ConfigError(
            "no command to start",
            next_step="Write it after two dashes: slurm-forge exec --name big -- srun python "
            "train.py",
        )
    if command and (not command[0] or command[0].startswith("-")):
        raise ConfigError(
            f"{command[0]!r} is not a program",
            next_step="Options of slurm-forge exec go before the two dashes, the program after "
            "them: slurm-forge exec --name big -- srun python train.py",
        )
    program_keys = {
        key: value for key, value in options.items() if value is not None and value is not False
    }
    stated = data.get("program") or {}
    if program_keys and isinstance(stated, dict):
        _check_options(ProgramSpec, {**stated, **program_keys})
        data["program"] = {**stated, **program_keys}
    if lead is not None:
        data["lead"] = lead
    if command:
        data["command"] = list(command)
    run_name = name or data.get("name") or job_name
    if not run_name:
        raise ConfigError(
            "the run has no name",
            next_step="Give it one: slurm-forge exec --name big -- …  A run continues under its "
            "name in every job.",
        )
    settings = {key: value for key, value in (("name", name), ("lead", lead)) if value is not None}
    if settings:
        _check_options(JobSpec, {"name": "x", "command": ["true"], **settings})
    data["name"] = run_name
    if run_name == job_name:
        _check_job_name(job_name)
    return build(JobSpec, replace(document, data=data))


def _check_options(model: type[ProgramSpec | JobSpec], values: Mapping[str, Any]) -> None:
    """``ConfigError`` in the words of the command line."""
    try:
        build_plain(model, values)
    except ConfigError as error:
        lines = [
            _as_options(_KEY.sub(lambda match: f"{match['key']}: ", line))
            for line in error.message.splitlines()
        ]
        raise ConfigError(
            "\n".join(lines), next_step=error.next_step or "See slurm-forge exec --help."
        ) from None


def _as_options(line: str) -> str:
    """Keys as they are written there: ``--resume-arg: … of --checkpoint-glob``."""
    line = re.sub(
        r"^([a-z_]+)(?:\[\d+\])?: ", lambda match: f"--{match[1].replace('_', '-')}: ", line
    )
    for name in ProgramSpec.model_fields:
        if "_" in name:
            line = line.replace(name, f"--{name.replace('_', '-')}")
    return line


def _check_job_name(text: str) -> None:
    """``ConfigError`` where Slurm's name of the job is none that a run can have."""
    try:
        build_plain(JobSpec, {"name": text, "command": ["true"]})
    except ConfigError as error:
        raise ConfigError(
            f"the run has no name, and that of the Slurm job, {text!r}, can't be its name: "
            f"{error.message.removeprefix('name: ')}",
            next_step="Give it one: slurm-forge exec --name big -- …  A run continues under its "
            "name in every job.",
        ) from None


def open_run(
    job: JobSpec, *, runs: Path, site: Site, folder: Path, partition: str | None = None
) -> tuple[RunDirectory, RunFile]:
    """Make the run, or go on with the one of that name, whose command may have been changed.

    ``partition`` is the one that the Slurm job is in.
    ``ConfigError`` where the name is that of another kind of run, or of one that is finished and
    was begun with another command.
    """
    run = RunDirectory.at(runs / job.name)
    if not run.exists() or untouched(run):
        return create_run(
            job,
            runs=runs,
            site=site,
            submitted_from=folder,
            python=sys.executable,
            partition=partition,
        )
    run.refuse_others()
    file = read_run_file(run.spec_file)
    if file.job.entry is not None:
        raise ConfigError(
            f"{run.path} is a run with an entry, not one of a command",
            next_step="Choose another name: slurm-forge exec --name OTHER -- …",
        )
    if file.job == job:
        return run, file
    if run.is_done() and file.job.command != job.command:
        raise ConfigError(
            f"{run.path} is finished, and was started with another command",
            next_step="Choose another name: slurm-forge exec --name OTHER -- …",
        )
    return run, replace_job(run, file, job)
