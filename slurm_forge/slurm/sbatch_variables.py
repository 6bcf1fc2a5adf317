"""What sbatch reads in ``SBATCH_…`` variables, where it must not win over the script.  Pure.

To sbatch a variable is worth more than an ``#SBATCH`` line (its manual, "INPUT ENVIRONMENT
VARIABLES"): a SBATCH_TIMELIMIT in somebody's profile would silently be the limit of every run, and
a SBATCH_NO_REQUEUE the end of each at its first preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_forge.slurm.sbatch_words import long_name
from slurm_forge.slurm.text.directives import read_directives

_PREFIX = "SBATCH_"
#: Variables that are not called as their option is (22.05.8, the names in sbatch itself).
_CALLED = {
    "ARRAY_INX": "array", "TIMELIMIT": "time", "NO_REQUEUE": "requeue", "MEM_PER_NODE": "mem",
    "BURST_BUFFER": "bb", "CPU_FREQ_REQ": "cpu-freq", "REQ_SWITCH": "switches",
}  # fmt: skip
#: A run is one job, and nobody waits here for its end: meant for other scripts in any case.
_NEVER = frozenset({"array", "wait"})


def without_overrides(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """The environment without variables for options that ``script`` says itself.

    What only a variable says (SBATCH_ACCOUNT) stays, and counts.
    """
    try:
        options = _NEVER.union(map(long_name, read_directives(script)))
    except ValueError:  # sbatch will say so
        options = _NEVER
    return dict(_without(environment.items(), options))


def _without(
    variables: Iterable[tuple[str, str]], options: frozenset[str]
) -> Iterable[tuple[str, str]]:
    for name, value in variables:
        rest = name.removeprefix(_PREFIX)
        option = _CALLED.get(rest, rest.lower().replace("_", "-"))
        if rest == name or option not in options:
            yield name, value
