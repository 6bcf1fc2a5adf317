"""The container around the ranks, in the words of its runtime and of the site.  Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from slurm_forge.errors import ConfigError
from slurm_forge.launch.render.container_environment import container_environment
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.parts import Backend, Container
from slurm_forge.spec.job import JobSpec
from slurm_forge.spec.launchers import RUNTIMES, ContainerSpec, Runtime
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.plan import RecoveryPlan

_OUTSIDE = frozenset(each.value for each in Runtime if each.outside)
_IMAGE = "<image>"
_PLACE = re.compile(r"<[^<>]*>")


def runtime_of(container: ContainerSpec, site: Site) -> Runtime:
    """The runtime: the job's, else the first of the site's that templates know.

    ``ConfigError`` where neither says one.
    """
    if container.runtime is not None:
        return container.runtime
    for candidate in site.containers:
        if candidate.runtime in RUNTIMES:
            return RUNTIMES[candidate.runtime]
    has = ", ".join(each.runtime.value for each in site.containers)
    raise ConfigError(
        f"the job has a container, and the site {site.name} does not say what runs it"
        + (f" (it has {has})" if has else ""),
        next_step=f"Write container.runtime: {', '.join(each.value for each in Runtime)}.",
    )


def facts_of(container: ContainerSpec, site: Site) -> Container | None:
    """What the site says of that runtime."""
    runtime = runtime_of(container, site)
    return next((each for each in site.containers if RUNTIMES.get(each.runtime) is runtime), None)


def inside(
    container: ContainerSpec, file: RunFile, site: Site, run: RunDirectory
) -> tuple[str, ...]:
    """What stands before the program: ``apptainer exec … IMAGE``; nothing for an option of srun."""
    runtime = runtime_of(container, site)
    if not runtime.outside:
        if file.job.starts_once:
            raise ConfigError(
                f"{runtime.value} is an option of srun, and the command is started without it",
                next_step='Add "template: srun" (once per rank) or "template: torchrun".',
            )
        return ()
    start = _hint(facts_of(container, site))
    if start is None:
        start = (runtime.value, "exec", *_gpus(file.job, site))
    binds = [f"--bind={each}" for each in (*_folders(file, run), *container.mounts)]
    where = f"--pwd={file.submitted_from}"
    return (*start, *binds, where, *container.options, _image(container.image, file))


def step_options(
    container: ContainerSpec, file: RunFile, site: Site, run: RunDirectory
) -> tuple[str, ...]:
    """The options of srun: all of the container, or what the site wants beside it."""
    facts = facts_of(container, site)
    # What has a place to fill in (--container-image=<image>) we know ourselves.
    options = (
        ()
        if facts is None
        else tuple(each for each in facts.srun_options if not _PLACE.search(each))
    )
    if runtime_of(container, site).outside:
        return options
    mounts = [f"{each}:{each}" for each in _folders(file, run)]
    mounts += [each if ":" in each else f"{each}:{each}" for each in container.mounts]
    return (
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={file.submitted_from}",
        *options,
        *container.options,
    )


def into_container(
    command: Sequence[str], file: RunFile, plan: RecoveryPlan, variables: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a command whose container may forget it: with what the job file says.

    A worker of ours reads that itself; a command could only inherit it.
    """
    at = next((n for n, word in enumerate(command) if PurePath(word).name in _OUTSIDE), None)
    if file.job.container is None or at is None:
        return dict(variables)
    names = {*file.env, *file.job.env, *(each.name for each in plan.variables)}
    return container_environment(command[at:], variables, also=names)


def _image(image: str, file: RunFile) -> str:
    """Wherever the job is handed in from: a relative path is meant from where it first was."""
    return image if "://" in image else str(file.folder / image)


def _hint(facts: Container | None) -> tuple[str, ...] | None:
    """The centre's own way of starting it, where it says all of it."""
    if facts is None or facts.command is None:
        return None
    words = tuple(shlex.split(facts.command))
    before = words[:-1]
    if len(words) < 2 or words[-1] != _IMAGE or any(_PLACE.search(word) for word in before):
        return None
    return before


def _gpus(job: JobSpec, site: Site) -> tuple[str, ...]:
    if site.backend is Backend.RCCL:
        return ("--rocm",)
    if site.backend is Backend.NCCL or job.resources.gpus_on_node:
        return ("--nv",)
    return ()


def _folders(file: RunFile, run: RunDirectory) -> Sequence[str]:
    """What the ranks need to see: the folder of the runs, and where the program is."""
    folders = tuple(dict.fromkeys((str(run.path.parent), file.submitted_from)))
    for each in folders:
        if any(character in each for character in ':,"'):
            raise ConfigError(
                f"the folder {each} can't be mounted into a container: it holds a colon, a comma "
                "or a quote",
                next_step="Submit from a folder without them, and give --runs one, too.",
            )
    return folders
