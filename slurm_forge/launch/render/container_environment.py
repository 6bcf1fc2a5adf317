"""How variables get into an apptainer or singularity container that clears its environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

#: Words that make a container forget the environment of its host.
_CLEAN = frozenset({"--cleanenv", "-e", "--containall", "-C"})
#: What ranks have to know all the same.
_KEPT = ("SLURM", "MASTER_", "OMP_NUM_THREADS", "CUDA_VISIBLE_", "ROCR_VISIBLE_", "HIP_VISIBLE_")
_CONTAINERS = {"apptainer": "APPTAINERENV_", "singularity": "SINGULARITYENV_"}


def container_environment(
    words: Sequence[str], variables: Mapping[str, str], also: Collection[str] = ()
) -> dict[str, str]:
    """The environment of a command that may start a container, which may clear its own.

    What ranks have to know, and ``also``, is then passed under the runtime's own names for it.
    """
    environment = dict(variables)
    prefix = _CONTAINERS.get(PurePath(words[0]).name)
    if prefix is not None and not _CLEAN.isdisjoint(words):
        for name, value in variables.items():
            if name.startswith(_KEPT) or name in also:
                environment.setdefault(prefix + name, value)
    return environment
