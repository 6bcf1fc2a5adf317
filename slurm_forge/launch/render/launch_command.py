"""What a launch makes of the command in its script: the step, and where torchrun's agents meet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from slurm_forge.control.interfaces import preferred_address
from slurm_forge.process import old_process_words, process_words
from slurm_forge.site.parts import MasterAddress
from slurm_forge.spec.launchers import Template
from slurm_forge.spec.run_file import RunFile


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A step as it stands in a script: what srun is to run, with its options in front.

    ``options`` are those that srun is given beside them.
    """

    words: tuple[str, ...]
    options: tuple[str, ...] = ()


def step_command(words: Sequence[str], options: Sequence[str]) -> StepCommand:
    """The step behind ``--``; ``options`` are the site's, for words that do not begin with srun.

    Where srun stands there, all of its options do, and whoever edits the script has the last word.
    """
    if words and PurePath(words[0]).name == "srun":
        return StepCommand(tuple(words[1:]))
    return StepCommand(tuple(words), tuple(options))


def has_shield(words: Sequence[str]) -> bool:
    """Whether a shield in front tells of signals."""
    shields = (process_words("shield"), old_process_words("shield"))
    return any(
        tuple(words[at : at + len(each)]) == each for at in range(len(words)) for each in shields
    )


#: Below what Linux takes for outgoing connections by default, and away from torch's own 29400.
_FIRST, _NUMBER = 20_000, 9_000
#: Launches of a job lie so far apart, and jobs that follow each other too.
_PER_LAUNCH, _PER_JOB = 613, 7
_TRIES = 50


def by_torchrun(file: RunFile) -> bool:
    """Whether a run has one task per node, which starts the ranks."""
    return file.job.template is Template.TORCHRUN


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
    environment = dict(variables)
    environment["MASTER_ADDR"] = file.job.env.get("MASTER_ADDR", master)
    environment["MASTER_PORT"] = file.job.env.get("MASTER_PORT", str(port))
    cpus = file.job.resources.cpus_per_task
    if cpus is not None:
        environment.setdefault("OMP_NUM_THREADS", str(cpus))
    return environment


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
