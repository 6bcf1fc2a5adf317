"""Runs of programs that know nothing of us: from a command line, or a job file, to a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_forge.documents import Document, build, build_plain, merged, read
from slurm_forge.documents.writing import dump
from slurm_forge.errors import ConfigError
from slurm_forge.files import is_file, write_atomic
from slurm_forge.knobs import Knobs
from slurm_forge.launch.submit.submission import (
    create_run,
    replace_job,
    untouched,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.spec import JobSpec
from slurm_forge.spec.launchers import ProgramSpec
from slurm_forge.spec.layers import command_settings
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
    settings: Callable[[str], Document] = lambda name: Document({}, None),
) -> tuple[JobSpec, Document]:
    """The job that a command line describes, and the settings below it.

    Args:
        command: The program and its arguments.
        name: The name of the run; without it the job file's, else ``job_name``.
        options: Keys of ``program:``; None and False are not given.
        path: A job file; the command line overrides its keys.
        job_name: The name of the Slurm job.
        lead: ``--lead``.
        settings: The settings below the job file, for a run of that name.

    Raises:
        ConfigError: Names the option or the line that is wrong.
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
    given = {key: value for key, value in (("name", name), ("lead", lead)) if value is not None}
    if given:
        _check_options(JobSpec, {"name": "x", "command": ["true"], **given})
    data["name"] = run_name
    if run_name == job_name:
        _check_job_name(job_name)
    own = replace(document, data=data)
    job = build(JobSpec, own)
    below = settings(job.name)
    return build(JobSpec, merged(below, own)) if below.data else job, below


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


def settings_of_run(run: RunDirectory, path: Path | None, knobs: Knobs) -> Document:
    """The settings of a command's run: those of its creation, which every later start uses.

    A node may not have the user's home, and a run in progress must not change, or fail to start,
    because somebody edits a file that is meant for new runs.

    Args:
        run: The run, which may not exist yet.
        path: Its job file.
        knobs: Where the user's settings are.

    Raises:
        ConfigError: A file of settings has mistakes.
        UnsafeFileError: Others can write to a file of settings.
    """
    if not run.exists() or untouched(run):
        return command_settings(path, knobs)
    if not is_file(run.settings_file):
        return Document({}, None)
    return read(run.settings_file, trusted=True, may_be_empty=True)


def open_run(
    job: JobSpec,
    *,
    runs: Path,
    site: Site,
    folder: Path,
    partition: str | None = None,
    settings: Document | None = None,
) -> tuple[RunDirectory, RunFile]:
    """Create the run, or continue the one of that name, whose command may have changed.

    Args:
        job: The job.
        runs: The folder of runs.
        site: The site of a new run.
        folder: The current folder.
        partition: The partition of the Slurm job.
        settings: What ``settings_of_run`` returned; kept for later starts.

    Raises:
        ConfigError: The name belongs to another kind of run, or to one that has finished and was
            started with another command.
    """
    run = RunDirectory.at(runs / job.name)
    if not run.exists() or untouched(run):
        made = create_run(
            job,
            runs=runs,
            site=site,
            submitted_from=folder,
            python=sys.executable,
            partition=partition,
        )
        if settings is not None and settings.data:
            write_atomic(run.settings_file, dump(settings.data).encode())
        return made
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
