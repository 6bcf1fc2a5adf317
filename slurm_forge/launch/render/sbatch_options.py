"""The options that sbatch is given for a job, in the words of its site, GPUs among them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.errors import ConfigError
from slurm_forge.launch.render.containers import facts_of
from slurm_forge.launch.render.save_times import lead_option
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.parts import GpuOption
from slurm_forge.site.rules import JobRequest, features_of, refused, refuses
from slurm_forge.slurm.sbatch_words import long_name, value_of
from slurm_forge.slurm.text.directives import read_directives
from slurm_forge.slurm.text.nodelist import expand_nodes, fold_nodes
from slurm_forge.spec import JobSpec
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.resources import Resources
from slurm_forge.spec.types import GpuCount
from slurm_forge.units import format_memory, format_slurm_duration

#: Constraints that one more feature can simply be added to.
_PLAIN = re.compile(r"[^|\[\]()*,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """The values of the options that GPUs are asked by, None where one is not needed."""

    per_node: str | None = None
    per_task: str | None = None
    total: str | None = None
    gres: str | None = None
    constraint: str | None = None


def gpu_options(resources: Resources, site: Site) -> GpuOptions:
    """The options for the GPUs of a job at this site.

    The kind of GPU in the job file becomes the feature that the site asks for it by
    (``gpu_types``), the number the site's own option (``gpu_request``).  What the job says in
    another option than that stays, unless the site refuses it there.
    """
    gpus = resources.gpus_per_node or resources.gpus_per_task
    if gpus is None:
        return GpuOptions(gres=resources.gres, constraint=resources.constraint)
    feature = site.gpu_types.get(gpus.kind or "")
    kind = "" if gpus.kind is None or feature is not None else f"{gpus.kind}:"
    constraint = _with_feature(resources.constraint, feature)
    count = resources.gpus_on_node or 0
    style = site.gpu_request
    per_task = resources.gpus_per_task is not None and not refuses(site, "--gpus-per-task")
    if style is GpuOption.NONE:
        return GpuOptions(gres=resources.gres, constraint=constraint)
    if per_task or (style is GpuOption.GPUS_PER_TASK and count % resources.tasks_per_node == 0):
        each = count // resources.tasks_per_node
        return GpuOptions(per_task=f"{kind}{each}", gres=resources.gres, constraint=constraint)
    if style is GpuOption.GRES:
        gres = ",".join(part for part in (f"gpu:{kind}{count}", resources.gres) if part)
        return GpuOptions(gres=gres, constraint=constraint)
    if style is GpuOption.GPUS and resources.allocation == 1:
        return GpuOptions(total=f"{kind}{count}", gres=resources.gres, constraint=constraint)
    return GpuOptions(per_node=f"{kind}{count}", gres=resources.gres, constraint=constraint)


def _with_feature(constraint: str | None, feature: str | None) -> str | None:
    if feature is None or features_of(feature) <= features_of(constraint):
        return constraint
    if constraint is None:
        return feature
    if _PLAIN.fullmatch(constraint) and _PLAIN.fullmatch(feature):
        return f"{constraint}&{feature}"
    return constraint  # what the job says of its nodes is more than can be added to


def job_request(
    job: JobSpec,
    site: Site,
    options: Sequence[str] = (),
    *,
    default_partition: str | None = None,
    machine: str | None = None,
) -> JobRequest:
    """The request of a job; ``options`` are the lines that its script hands to sbatch.

    ``default_partition`` is where Slurm puts a job that names none.
    """
    resources, container = job.resources, job.container
    names: list[str | None] = [name for name in (resources.partition or "").split(",") if name]
    per_task = resources.cpus_per_task
    return JobRequest(
        options=tuple(options),
        partitions=tuple(names or [default_partition]),
        qos=resources.qos,
        account=resources.account,
        constraint=gpu_options(resources, site).constraint,
        nodes=resources.allocation,
        gpus=resources.gpus_on_node,
        cpus=None if per_task is None else per_task * resources.tasks_per_node,
        memory=resources.mem,
        time=resources.time,
        chained=job.chain is not None,
        # In a container it is the image's Python that has to be one of theirs.
        machine=machine if container is None else None,
        runtime=None if container is None or container.runtime is None else container.runtime.value,
    )


_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")


def options(
    job: JobSpec, site: Site, run: RunDirectory, *, save: timedelta = timedelta(0)
) -> tuple[str, ...]:
    """The options for sbatch, in a fixed order.

    ``save`` is how long saves of the run take, 0 where nobody knows.
    ``ConfigError`` for what can't be an option, and for what the site refuses or misses.
    """
    lines = asked_options(job, site, run, save=save)
    refusal = refused(lines, site)
    if refusal is not None:
        raise ConfigError(refusal.message, next_step=refusal.advice)
    return lines


def asked_options(
    job: JobSpec, site: Site, run: RunDirectory, *, save: timedelta = timedelta(0)
) -> tuple[str, ...]:
    """As ``options``, whatever the site thinks of them."""
    resources = job.resources
    if job.template is Template.TORCHRUN:
        resources = per_node(resources)
    gpus = gpu_options(resources, site)
    limit = resources.time
    options: list[tuple[str, object | None]] = [
        ("job-name", job.name),
        ("array", None if job.chain is None else f"1-{job.chain}%1"),
        ("nodes", resources.allocation),
        ("ntasks-per-node", resources.tasks_per_node),
        ("cpus-per-task", resources.cpus_per_task),
        ("gpus-per-node", gpus.per_node),
        ("gpus-per-task", gpus.per_task),
        ("gpus", gpus.total),
        ("mem", None if resources.mem is None else format_memory(resources.mem)),
        ("time", None if limit is None else format_slurm_duration(limit)),
        ("partition", resources.partition),
        ("account", resources.account),
        ("qos", resources.qos),
        ("constraint", gpus.constraint),
        ("exclude", resources.exclude),
        ("nodelist", resources.nodelist),
        ("gres", gpus.gres),
        ("reservation", resources.reservation),
        ("signal", lead_option(job, limit, save)),
        ("requeue", ""),
        ("no-kill", "" if job.outlives_nodes else None),
        ("open-mode", "append"),
        ("output", _log_of(run, "%x-%j.out" if job.chain is None else "%x-%A_%a.out")),
    ]
    refuse_several_jobs(resources.extra)
    refuse_several_jobs({long_name(each): value_of(each) or "" for each in site.sbatch_options})
    options += list(resources.extra.items())
    lines = []
    for name, value in options:
        if value is None:
            continue
        lines.append(_checked(f"--{name}" if value == "" else f"--{name}={value}"))
    # Of two the last one counts to sbatch, and the job's own word is worth more than the site's.
    names = {line.partition("=")[0] for line in lines}
    lines += [
        _checked(option) for option in site.sbatch_options if option.partition("=")[0] not in names
    ]
    lines += [_checked(option) for option in _of_container(job, site)]
    return tuple(lines)


def options_of_array(
    lines: Iterable[str], name: str, first: RunDirectory, *, count: int, limit: int | None
) -> tuple[str, ...]:
    """The options of the ``first`` run of a sweep as those of an array of ``count`` runs.

    The output of each task goes into the folder of its own run.
    """
    throttle = "" if limit is None else f"%{limit}"
    own = _log_of(first, "%x-%j.out")
    folder = own.removesuffix("%x-%j.out").removesuffix(f"/{first.name}/submissions/")
    replaced = {
        f"--job-name={first.name}": (f"--job-name={name}", f"--array=0-{count - 1}{throttle}"),
        f"--output={own}": (f"--output={folder}/{name}-%a/submissions/%x-%j.out",),
    }
    return tuple(_checked(new) for line in lines for new in replaced.get(line, (line,)))


def _log_of(run: RunDirectory, name: str) -> str:
    """``--output``: in the path of the run ``%`` is no more than that sign."""
    folder = str(run.submissions)
    if "\\" in folder:
        raise ConfigError(
            f"the path of the run holds a backslash: {folder}",
            next_step="Slurm can't write the job's output there: choose another folder (--runs).",
        )
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the path of the run is not UTF-8, as this process reads it: {folder}",
            next_step="Where the locale is to blame: export LC_ALL=C.UTF-8, and unset PYTHONUTF8 "
            "and PYTHONCOERCECLOCALE.  Else choose another folder (--runs).",
        ) from None
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
    own, nodelist = _last(script, "exclude"), _last(script, "nodelist")
    if "/" in own + nodelist:
        return ()
    requested_nodes = set(expand_nodes(nodelist))
    added = [node for node in dict.fromkeys(nodes) if node not in requested_nodes]
    if not added:
        return ()
    merged = dict.fromkeys([*expand_nodes(own), *sorted(added)])
    return (f"--exclude={fold_nodes(merged)}",)


def _last(script: str, option: str) -> str:
    """The value of an ``#SBATCH`` option, of which the last one counts; empty without one."""
    try:
        directives = read_directives(script)
    except ValueError:
        return ""  # sbatch will say so
    matches = [each for each in directives if each.startswith(f"--{option}=")]
    return matches[-1].partition("=")[2] if matches else ""


def _of_container(job: JobSpec, site: Site) -> tuple[str, ...]:
    """What the site has sbatch told of the job's container."""
    facts = None if job.container is None else facts_of(job.container, site)
    return () if facts is None else facts.sbatch_options


def per_node(resources: Resources) -> Resources:
    """The same in one task per node: the ranks of a node share what Slurm gives that task."""
    ranks, cpus, gpus = resources.tasks_per_node, resources.cpus_per_task, resources.gpus_per_task
    changed: dict[str, object] = {"tasks_per_node": 1}
    if cpus is not None:
        changed["cpus_per_task"] = cpus * ranks
    if gpus is not None:
        changed["gpus_per_task"] = None
        changed["gpus_per_node"] = GpuCount(gpus.count * ranks, gpus.kind)
    return resources.model_copy(update=changed)


#: Nothing of it is a quote, an escape, a comment or the end of a word to sbatch.
_UNQUOTED = re.compile(r"[^\s\"'\\#]+")


def as_directive(option: str) -> str:
    """An option (``--name=value``) as one word of an ``#SBATCH`` line.

    It must be one line of text; quotes are added where there is something to quote.
    """
    if _UNQUOTED.fullmatch(option):
        return option
    name, sign, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}{sign}'{escaped}'"
