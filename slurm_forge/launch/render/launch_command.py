"""What a batch script starts, as words that a person can read and edit.  Pure.

They stand behind ``--`` in the script, whole: srun with its options where there is one, the shield
where a launcher stands between Slurm and the ranks, the container, torchrun, and the program.

torchrun per node: what Slurm is asked for then, and where the nodes of a launch meet.

What torchrun and the like are told of the first node, by the site's rule.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from slurm_forge.control.interfaces import preferred_address
from slurm_forge.launch.render.containers import (
    inside,
    step_options,
)
from slurm_forge.launch.render.signal_convention import forwarding
from slurm_forge.process import old_process_words, process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.parts import MasterAddress
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.resources import Resources
from slurm_forge.spec.run_file import RunFile
from slurm_forge.spec.types import GpuRequest

_TORCHRUN = "torch.distributed.run"
#: The shield fills in what is another on each node.  Whether and where ranks are started again is
#: not torchrun's to decide.
_MEETING = (
    "--nnodes={nnodes}",
    "--node-rank={node_rank}",
    "--master-addr={master_addr}",
    "--master-port={master_port}",
    "--max-restarts=0",
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it stands in a script: what srun is to run, with its options in front.

    ``options`` are those that srun is given beside them.
    """

    words: tuple[str, ...]
    options: tuple[str, ...] = ()


def step_of(words: Sequence[str], options: Sequence[str]) -> Step:
    """The step behind ``--``; ``options`` are the site's, for words that do not begin with srun.

    Where srun stands there, all of its options do, and whoever edits the script has the last word.
    """
    if words and PurePath(words[0]).name == "srun":
        return Step(tuple(words[1:]))
    return Step(tuple(words), tuple(options))


def has_shield(words: Sequence[str]) -> bool:
    """Whether a shield in front tells of signals."""
    shields = (process_words("shield"), old_process_words("shield"))
    return any(
        tuple(words[at : at + len(each)]) == each for at in range(len(words)) for each in shields
    )


def payload(file: RunFile, site: Site, run: RunDirectory) -> tuple[tuple[str, ...], ...]:
    """The words, in the lines of the script; ``ConfigError`` for what can't be started here."""
    job = file.job
    container, template = job.container, job.template
    around = () if container is None else inside(container, file, site, run)
    if job.starts_once and job.command is not None:
        return tuple(line for line in (around, job.command) if line)
    python = file.python if container is None else container.python
    if job.command is None:
        program: tuple[str, ...] = process_words("worker", str(run.path))
        if template is not Template.TORCHRUN:
            program = (python, "-u", *program)
    else:
        program = job.command
        if template is Template.TORCHRUN:
            python, program = _script(job.command, python)
    lines = [("srun", "--kill-on-bad-exit=1", "--unbuffered", *file.srun_options)]
    if container is not None:
        lines.append(step_options(container, file, site, run))
    torchrun = template is Template.TORCHRUN
    if torchrun or around:
        # Outside of a container, but for one that srun itself has put the task into.
        own = file.python if around or container is None else container.python
        lines.append((own, *process_words("shield", *_passes(file)), "--"))
    lines.append(around)
    if torchrun:
        lines.append((python, "-m", _TORCHRUN, f"--nproc-per-node={job.resources.tasks_per_node}"))
        lines.append(_MEETING)
    return tuple(line for line in (*lines, program) if line)


def _passes(file: RunFile) -> tuple[str, ...]:
    """What the shield passes on: ranks of ours hear of signals over their channel."""
    if file.job.command is None:
        return ()
    return (f"--pass={forwarding(file.job.program, ('srun',)).signal}",)


def _script(command: tuple[str, ...], python: str) -> tuple[str, tuple[str, ...]]:
    """The interpreter for torchrun, and the script with its words as torchrun takes them."""
    first, rest = command[0], command[1:]
    if first.endswith(".py"):
        return python, command
    if PurePath(first).name.startswith("python") and rest:
        while rest[:1] == ("-u",):  # torchrun adds it
            rest = rest[1:]
        if rest and (rest[0] == "-m" or not rest[0].startswith("-")):
            return first, rest
    return python, ("--no-python", *command)


#: Below what Linux takes for outgoing connections by default, and away from torch's own 29400.
_FIRST, _NUMBER = 20_000, 9_000
#: Launches of a job lie so far apart, and jobs that follow each other too.
_PER_LAUNCH, _PER_JOB = 613, 7
_TRIES = 50


def by_torchrun(file: RunFile) -> bool:
    """Whether a run has one task per node, which starts the ranks."""
    return file.job.template is Template.TORCHRUN


def per_node(wanted: Resources) -> Resources:
    """The same in one task per node: the ranks of a node share what Slurm gives that task."""
    ranks, cpus, gpus = wanted.tasks_per_node, wanted.cpus_per_task, wanted.gpus_per_task
    changed: dict[str, object] = {"tasks_per_node": 1}
    if cpus is not None:
        changed["cpus_per_task"] = cpus * ranks
    if gpus is not None:
        changed["gpus_per_task"] = None
        changed["gpus_per_node"] = GpuRequest(gpus.count * ranks, gpus.kind)
    return wanted.model_copy(update=changed)


def ports(job: int, launch: int) -> Iterator[int]:
    """Ports to try for a launch, best first: other jobs on the node begin with others."""
    first = job * _PER_JOB + launch * _PER_LAUNCH
    for number in range(_TRIES):
        yield _FIRST + (first + number) % _NUMBER


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(("", port))
        return True
    return False


def meeting_port(
    job: int, launch: int, *, here: bool, free: Callable[[int], bool] = _is_free
) -> int:
    """Where torchrun's agents meet on the first node; looked at only where that is this one."""
    tried = ports(job, launch)
    first = next(tried)
    if not here or free(first):
        return first
    return next((port for port in tried if free(port)), first)


def for_torchrun(
    variables: dict[str, str], file: RunFile, *, master: str, port: int
) -> dict[str, str]:
    """What torchrun and its ranks are told in addition.

    What sbatch has taken along of a meeting elsewhere must not stay; what the job file says does.
    """
    found = dict(variables)
    found["MASTER_ADDR"] = file.job.env.get("MASTER_ADDR", master)
    found["MASTER_PORT"] = file.job.env.get("MASTER_PORT", str(port))
    cpus = file.job.resources.cpus_per_task
    if cpus is not None:
        found.setdefault("OMP_NUM_THREADS", str(cpus))
    return found


def _address(name: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeError):
        return socket.gethostbyname(name)
    return None


def master_address(
    file: RunFile,
    first_node: str | None,
    *,
    this_node: str | None,
    address: Callable[[str], str | None] = _address,
    through: Callable[[str | None, str | None], str | None] = preferred_address,
) -> str | None:
    """The name or the address of ``first_node``; None where the site says nothing of it.

    The address of an interface can only be asked for on the node itself (``this_node``): of
    another one, and where a name has no address, the name with the site's suffix is told.
    """
    rule = file.master_address
    if first_node is None or (rule is None and file.host_suffix is None):
        return None
    name = first_node + (file.host_suffix or "")
    if rule is MasterAddress.ADDRESS:
        return address(name) or name
    if rule is MasterAddress.INTERFACE and first_node == this_node:
        return through(file.socket_interface, None) or name
    return name
