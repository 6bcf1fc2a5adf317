"""What a batch script starts, as words that a person can read and edit.  Pure.

They stand behind ``--`` in the script, whole: srun with its options where there is one, the shield
where a launcher stands between Slurm and the ranks, the container, torchrun, and the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from slurm_forge.launch.containers import inside, step_options
from slurm_forge.launch.convention import forwarding
from slurm_forge.process import old_process_words, process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.run_file import RunFile

__all__ = ["Step", "has_shield", "payload", "step_of"]

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
