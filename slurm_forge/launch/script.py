"""The batch script of a run: options from the job and the site, text from ``sbatch_templates/``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import jinja2

from slurm_forge.errors import ConfigError
from slurm_forge.launch.gpu_options import gpu_options
from slurm_forge.launch.setup_lines import refuse_traps
from slurm_forge.launch.timing import lead_time
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.rules import refused
from slurm_forge.slurm.nodelist import expand_nodes, fold_nodes
from slurm_forge.spec import JobSpec
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
]

_TEMPLATE = "srun.sbatch"
_STARTING = "starting.bash"
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")
#: Slurm may send the warning signal up to a minute early; the supervisor's own clock is exact, so
#: only long jobs, which lose nothing by it, carry the signal for nodes that can't ask Slurm.
_SIGNAL_FROM = timedelta(minutes=10)


def template_folder() -> Path:
    """Shipped inside the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_shipped" / "sbatch_templates", package.parent / "sbatch_templates"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        "the sbatch templates are missing from this installation",
        next_step="Install slurm_forge again: pip install --force-reinstall slurm_forge.",
    )


def options(job: JobSpec, site: Site, run: RunDirectory) -> tuple[str, ...]:
    """The ``#SBATCH`` options, one per line, in a fixed order.

    ``ConfigError`` for what can't be an option, and for what the site refuses or misses.
    """
    lines = asked_options(job, site, run)
    found = refused(lines, site)
    if found is not None:
        raise ConfigError(found.message, next_step=found.advice)
    return lines


def asked_options(job: JobSpec, site: Site, run: RunDirectory) -> tuple[str, ...]:
    """As ``options``, whatever the site thinks of them."""
    wanted = job.resources
    gpus = gpu_options(wanted, site)
    limit = wanted.time
    warn = limit is not None and limit >= _SIGNAL_FROM
    lead = int(lead_time(job, limit).total_seconds())
    chosen: list[tuple[str, object | None]] = [
        ("job-name", job.name),
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
        ("signal", f"USR2@{lead}" if warn else None),
        ("requeue", ""),
        ("no-kill", "" if job.outlives_nodes else None),
        ("open-mode", "append"),
        ("output", str(run.submissions / "%x-%j.out")),
    ]
    refuse_several_jobs(wanted.extra)
    chosen += list(wanted.extra.items())
    lines = []
    for name, value in chosen:
        if value is None:
            continue
        line = f"--{name}" if value == "" else f"--{name}={_quoted(name, str(value))}"
        lines.append(_checked(line))
    # Of two the last one counts to sbatch, and the job's own word is worth more than the site's.
    asked = {line.partition("=")[0] for line in lines}
    lines += [
        _checked(option) for option in site.sbatch_options if option.partition("=")[0] not in asked
    ]
    return tuple(lines)


def _quoted(name: str, value: str) -> str:
    # Slurm's own reader of directives knows quotes; paths may hold spaces.
    return shlex.quote(value) if name in ("output", "error", "comment") else value


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
                next_step="Leave it out.  Nodes of two kinds in one run (a heterogeneous job) are "
                "not supported; for many runs submit each, or an array with submitit.",
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
    found = re.findall(rf"^#SBATCH --{option}=(.*)$", script, re.MULTILINE)
    return "".join(shlex.split(found[-1])) if found else ""


def render(file: RunFile, site: Site, run: RunDirectory) -> str:
    """The script that ``submit`` hands to sbatch; ``ConfigError`` for a setup that undoes it."""
    refuse_traps(site.setup, f"the setup of the site {site.name}")
    refuse_traps(file.job.setup, "setup")
    started = "supervise" if file.job.command is None else "execute"
    command = [file.python, "-m", f"slurm_forge.launch.{started}", str(run.path), "--via", "sbatch"]
    return (
        _templates()
        .get_template(_TEMPLATE)
        .render(
            options=options(file.job, site, run),
            env=file.env,
            setup=(*_modules(file.job, site), *site.setup, *file.job.setup),
            python=file.python,
            submissions=str(run.submissions),
            command=shlex.join(command),
        )
    )


def _modules(job: JobSpec, site: Site) -> tuple[str, ...]:
    """Commands that load what the site, and its partition, want loaded."""
    facts = site.facts(job.resources.partition, job.resources.qos)
    wanted = dict.fromkeys((*site.modules, *facts.modules))
    return (f"module load {shlex.join(wanted)}",) if wanted else ()


def guard_lines(submissions: str) -> str:
    """What stands before a script's own commands: a broken environment is told and held.

    ``submissions`` is shell text for the folder that the note goes into.
    """
    return _part("guard", submissions)


def start_lines(interpreter: str, command: str, *, teardown: bool) -> str:
    """Check the ``interpreter``, then become ``command``; both are shell text.

    With ``teardown`` the shell stays, for the commands that follow.
    """
    return _part("start", interpreter, command, teardown)


def successor_lines(submitted: Path, folder: Path, *, first: str, tasks: int) -> str:
    """Lay the pickle ``submitted`` out in submitit's ``folder`` under the id of this job.

    The results of its ``tasks`` will be found under the ``first`` job's id too.
    """
    words = (shlex.quote(word) for word in (str(submitted), str(folder), first))
    return _part("succeed", *words, f"{{0..{tasks - 1}}}")


def _part(macro: str, *arguments: object) -> str:
    text: str = getattr(_templates().get_template(_STARTING).module, macro)(*arguments)
    return text


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  shell, not HTML: every value goes through shellquote
        keep_trailing_newline=True,
    )
    environment.filters["shellquote"] = shlex.quote
    return environment
