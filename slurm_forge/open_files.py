"""How many files a process may have open at once: every connection is one of them."""

from __future__ import annotations

import resource

from slurm_forge.errors import UnsupportedError

#: Where the hard limit is larger, or none: some programs close every number below the soft one.
_MOST = 1 << 20
#: Of each rank of the launch.  The process that conducts has a connection of its own, of its
#: monitor's, of its agent's (behind relays: that of its agent, and one of its node); each rank one
#: in each of four process groups of gloo.
_PER_RANK = 4
#: Beside connections: the journal, pipes of commands, libraries, what the program opens.
_BESIDE = 128


def open_files_allowed() -> int:
    """How many files a process may have open here, once it has raised its soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)


def open_files_needed(ranks: int) -> int:
    """What the process that conducts so many ranks needs, and each of them."""
    return _PER_RANK * ranks + _BESIDE


def ranks_possible(open_files: int) -> int:
    """How many ranks a launch may have, where a process may open so many files."""
    return max(0, open_files - _BESIDE) // _PER_RANK


def raise_open_files_limit(ranks: int = 0) -> int:
    """Raise the soft limit of this process as far as it may.

    Args:
        ranks: How many the launch has, 0 where that is not known.

    Returns:
        The limit, from now on.

    Raises:
        UnsupportedError: It is too low for so many ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = open_files_allowed()
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    needed = open_files_needed(ranks)
    if ranks and allowed < needed:
        raise UnsupportedError(
            f"a launch of {ranks} ranks needs {needed} open files in a process, and the hard limit "
            f"is {allowed}: enough for {ranks_possible(allowed)} ranks",
            next_step="Raise the limit (ulimit -Hn) in the script before slurm-forge, or ask the "
            "operators of the cluster to; slurm-forge doctor --live shows it for compute nodes.",
        )
    return allowed
