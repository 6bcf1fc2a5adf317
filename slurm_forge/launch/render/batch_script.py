"""The batch script of a run: options from the job and the site, text from ``sbatch_templates/``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path

import jinja2

from slurm_forge.errors import ConfigError
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.render.containers import (
    facts_of,
    runtime_of,
)
from slurm_forge.launch.render.gpu_options import gpu_options
from slurm_forge.launch.render.launch_command import (
    by_torchrun,
    payload,
    per_node,
)
from slurm_forge.launch.render.save_history import (
    lead_option,
    seen_of_run,
)
from slurm_forge.launch.render.setup_lines import refuse_traps
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.rules import refused
from slurm_forge.slurm.sbatch_words import long_name, value_of
from slurm_forge.slurm.text.directives import (
    as_directive,
    read_directives,
)
from slurm_forge.slurm.text.nodelist import (
    expand_nodes,
    fold_nodes,
)
from slurm_forge.spec import JobSpec
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.run_file import RunFile
from slurm_forge.units import format_memory, format_slurm_duration

__all__ = [
    "asked_options",
    "guard_lines",
    "leave_out",
    "options",
    "refuse_several_jobs",
    "render",
    "start_lines",
    "successor_lines",
    "template_folder",
    "template_name",
]

_ARRAY = "array.sbatch"
_STARTING = "starting.bash"
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")


def template_folder() -> Path:
    """Shipped inside the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "_shipped" / "sbatch_templates", package.parent / "sbatch_templates"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        "the sbatch templates are missing from this installation",
        next_step="Install slurm_forge again: pip install --force-reinstall slurm_forge.",
    )


def options(
    job: JobSpec, site: Site, run: RunDirectory, *, save: timedelta = timedelta(0)
) -> tuple[str, ...]:
    """The options for sbatch, in a fixed order.

    ``save`` is how long saves of the run take, 0 where nobody knows.
    ``ConfigError`` for what can't be an option, and for what the site refuses or misses.
    """
    lines = asked_options(job, site, run, save=save)
    found = refused(lines, site)
    if found is not None:
        raise ConfigError(found.message, next_step=found.advice)
    return lines


def asked_options(
    job: JobSpec, site: Site, run: RunDirectory, *, save: timedelta = timedelta(0)
) -> tuple[str, ...]:
    """As ``options``, whatever the site thinks of them."""
    wanted = job.resources
    if job.template is Template.TORCHRUN:
        wanted = per_node(wanted)
    gpus = gpu_options(wanted, site)
    limit = wanted.time
    chosen: list[tuple[str, object | None]] = [
        ("job-name", job.name),
        ("array", None if job.chain is None else f"1-{job.chain}%1"),
        ("nodes", wanted.allocation),
        ("ntasks-per-node", wanted.tasks_per_node),
        ("cpus-per-task", wanted.cpus_per_task),
        ("gpus-per-node", gpus.per_node),
        ("gpus-per-task", gpus.per_task),
        ("gpus", gpus.total),
        ("mem", None if wanted.mem is None else format_memory(wanted.mem)),
        ("time", None if limit is None else format_slurm_duration(limit)),
        ("partition", wanted.partition),
        ("account", wanted.account),
        ("qos", wanted.qos),
        ("constraint", gpus.constraint),
        ("exclude", wanted.exclude),
        ("nodelist", wanted.nodelist),
        ("gres", gpus.gres),
        ("reservation", wanted.reservation),
        ("signal", lead_option(job, limit, save)),
        ("requeue", ""),
        ("no-kill", "" if job.outlives_nodes else None),
        ("open-mode", "append"),
        ("output", _log_of(run, "%x-%j.out" if job.chain is None else "%x-%A_%a.out")),
    ]
    refuse_several_jobs(wanted.extra)
    refuse_several_jobs({long_name(each): value_of(each) or "" for each in site.sbatch_options})
    chosen += list(wanted.extra.items())
    lines = []
    for name, value in chosen:
        if value is None:
            continue
        lines.append(_checked(f"--{name}" if value == "" else f"--{name}={value}"))
    # Of two the last one counts to sbatch, and the job's own word is worth more than the site's.
    asked = {line.partition("=")[0] for line in lines}
    lines += [
        _checked(option) for option in site.sbatch_options if option.partition("=")[0] not in asked
    ]
    lines += [_checked(option) for option in _of_container(job, site)]
    return tuple(lines)


def _log_of(run: RunDirectory, name: str) -> str:
    """``--output``: in the path of the run ``%`` is no more than that sign."""
    folder = str(run.submissions)
    if "\\" in folder:
        raise ConfigError(
            f"the path of the run holds a backslash: {folder}",
            next_step="Slurm can't write the job's output there: choose another folder (--runs).",
        )
    return f"{folder.replace('%', '%%')}/{name}"


def _checked(line: str) -> str:
    if not line.isprintable() or not _OPTION.fullmatch(line):
        raise ConfigError(
            f"{line[:60]!r} can't be an sbatch option",
            next_step="Options are one line of printable text: --name or --name=value.",
        )
    return line


#: Options that make more than one job of a script.
_SEVERAL = frozenset({"array", "hetjob", "packjob", "het-group", "pack-group"})


def refuse_several_jobs(extra: Mapping[str, object]) -> None:
    """``ConfigError`` for options of one run that would make an array or a heterogeneous job."""
    for name, value in extra.items():
        word = name.replace("_", "-").lstrip("-")
        if word in _SEVERAL or ":" in str(value).split() or ":" in name.split():
            raise ConfigError(
                f"{name}={value} asks for several jobs in one, and a run is one job",
                next_step="Leave it out.  For one run in many tasks, each an attempt, write "
                '"template: array" and "chain: 10" into the job file; for many runs submit each, '
                "or an array with submitit.  Nodes of two kinds in one run (a heterogeneous job) "
                "are not supported.",
            )


def leave_out(script: str, nodes: Iterable[str]) -> tuple[str, ...]:
    """The ``--exclude`` for sbatch's command line that adds ``nodes`` to those of ``script``.

    One on the command line replaces the script's own (tried on 22.05.8).  Nodes that the script
    asks for by name stay; a list that is kept in a file is the user's, and nothing is added to it.
    """
    own, asked = _last(script, "exclude"), _last(script, "nodelist")
    if "/" in own + asked:
        return ()
    wanted = set(expand_nodes(asked))
    added = [node for node in dict.fromkeys(nodes) if node not in wanted]
    if not added:
        return ()
    merged = dict.fromkeys([*expand_nodes(own), *sorted(added)])
    return (f"--exclude={fold_nodes(merged)}",)


def _last(script: str, option: str) -> str:
    """The value of an ``#SBATCH`` option, of which the last one counts; empty without one."""
    try:
        given = read_directives(script)
    except ValueError:
        return ""  # sbatch will say so
    found = [each for each in given if each.startswith(f"--{option}=")]
    return found[-1].partition("=")[2] if found else ""


def render(file: RunFile, site: Site, run: RunDirectory) -> str:
    """The script that ``submit`` hands to sbatch; ``ConfigError`` for a setup that undoes it."""
    refuse_traps(site.setup, f"the setup of the site {site.name}")
    refuse_traps(file.job.setup, "setup")
    started = "supervise" if file.job.command is None else "execute"
    started_by = template_name(file.job, site)
    via = "sbatch" if file.job.chain is None else VIA_ARRAY
    own = (file.python, *process_words(started, str(run.path), "--via", via, "--"))
    lines = (own, *payload(file, site, run))
    return (
        _templates()
        .get_template(started_by if file.job.chain is None else _ARRAY)
        .render(
            chain=file.job.chain,
            started_by=started_by,
            options=options(file.job, site, run, save=_save(file, run)),
            env=file.env,
            setup=(*_modules(file.job, site), *site.setup, *file.job.setup),
            python=file.python,
            by_torchrun=by_torchrun(file),
            submissions=str(run.submissions),
            command=" \\\n    ".join(shlex.join(line) for line in lines),
        )
    )


def _save(file: RunFile, run: RunDirectory) -> timedelta:
    """What saves of the run have taken, else those of an earlier one; 0 where nobody knows."""
    seen = seen_of_run(run)
    if seen is not None:
        return timedelta(seconds=seen.seconds)
    return file.usual_save or timedelta(0)


def template_name(job: JobSpec, site: Site) -> str:
    """The file in ``sbatch_templates/`` that a job's script is made of; of an array, each task's.

    ``array.sbatch`` adds what is different about a job that is an array of attempts.
    """
    if job.container is not None:
        outside = runtime_of(job.container, site).outside
        return "apptainer.sbatch" if outside else "pyxis.sbatch"
    if job.template is Template.TORCHRUN:
        return "torchrun.sbatch"
    return "exec.sbatch" if job.starts_once else "srun.sbatch"


def _of_container(job: JobSpec, site: Site) -> tuple[str, ...]:
    """What the site has sbatch told of the job's container."""
    facts = None if job.container is None else facts_of(job.container, site)
    return () if facts is None else facts.sbatch_options


def _modules(job: JobSpec, site: Site) -> tuple[str, ...]:
    """Commands that load what the site, and its partition, want loaded."""
    facts = site.facts(job.resources.partition, job.resources.qos)
    container = None if job.container is None else facts_of(job.container, site)
    more = () if container is None else container.modules
    wanted = dict.fromkeys((*site.modules, *facts.modules, *more))
    return (f"module load {shlex.join(wanted)}",) if wanted else ()


def guard_lines(submissions: str) -> str:
    """What stands before a script's own commands: a broken environment is told and held.

    ``submissions`` is shell text for the folder that the note goes into.
    """
    return _part("guard", submissions)


def start_lines(interpreter: str, command: str, *, again: bool, teardown: bool) -> str:
    """Check the ``interpreter``, then become ``command``; both are shell text.

    ``again``: the command begins the script again where it can't import the supervisor; else that
    is imported by the check, too.  With ``teardown`` the shell stays, for the commands that follow.
    """
    return _part("start", interpreter, command, again, teardown)


def successor_lines(submitted: Path, folder: Path, *, first: str, tasks: int) -> str:
    """Lay the pickle ``submitted`` out in submitit's ``folder`` under the id of this job.

    The results of its ``tasks`` will be found under the ``first`` job's id too.
    """
    words = (shlex.quote(word) for word in (str(submitted), str(folder), first))
    return _part("succeed", *words, f"{{0..{tasks - 1}}}")


def _part(macro: str, *arguments: object) -> str:
    text: str = getattr(_templates().get_template(_STARTING).module, macro)(*arguments)
    return text


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  shell, not HTML: every value goes through shellquote
        keep_trailing_newline=True,
    )
    environment.filters["shellquote"] = shlex.quote
    environment.filters["directive"] = as_directive
    return environment
