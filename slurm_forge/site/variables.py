"""The ranks' environment by the site: in which order it is made, and what is not as it says.

The order is site < the person's own environment < job file.  Pure: environments are handed in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slurm_forge.site.model import EnvironmentSets
from slurm_forge.vocabulary.plan import Variable

#: Which interfaces NCCL's sockets use, by its own rules (``control.interfaces``).
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
#: Gloo's: whole names, and it fails for one that is not there.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
#: Read when a communicator is made (or its plugin is loaded), not when an interpreter or torch is.
_SENT = re.compile(r"(NCCL|RCCL|TORCH_NCCL|GLOO|FI|UCX|OFI_NCCL)_[A-Z0-9_]+")
#: Of these, what names code to load or run, a file to read or write, or whom to connect to.
_NAMES_FILES = re.compile(
    r"PLUGIN|LIB|MODULE|PATH|DIR|FILE|CONF|PIPE|COMMAND|MAIL|DEST|COMM_ID|HANDLE"
)


#: Names of what is nobody else's business, and the name and password in an address.
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")


class VariableDifferenceKind(str, Enum):
    """How a variable is not as the site says."""

    MISSING = "missing"
    #: Set to something else: a person's own value wins, so this is worth knowing and no fault.
    OTHER = "other"
    FORBIDDEN = "forbidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableDifference:
    """One variable that is not as the site says; ``why`` is the site's word on a forbidden one."""

    name: str
    kind: VariableDifferenceKind
    wanted: str | None = None
    found: str | None = None
    why: str = ""

    def __str__(self) -> str:
        match self.kind:
            case VariableDifferenceKind.MISSING:
                return f"{self.name} is not set; the site sets {self.name}={self.wanted}"
            case VariableDifferenceKind.OTHER:
                return f"{self.name}={self.shown}; the site sets {self.wanted}"
            case _:
                return f"{self.name}={self.shown} is set, and must not be here: {self.why}"

    @property
    def shown(self) -> str:
        """What was found as others may read it: the run directory may be open to them."""
        if self.found is None or _SECRET.search(self.name):
            return "..."
        return _LOGIN.sub("//...@", self.found)


def differences(
    sets: EnvironmentSets, environment: Mapping[str, str], *, on_hang: bool = False
) -> tuple[VariableDifference, ...]:
    """What of an environment is not as the site's sets say, what is forbidden first.

    ``on_hang``: the set for after a hang is in force, too, and wins over the one for always.
    """
    wanted = {**sets.always, **(sets.on_hang if on_hang else {})}
    results = [
        VariableDifference(
            name=name,
            kind=VariableDifferenceKind.FORBIDDEN,
            found=environment[name],
            why=sets.never[name],
        )
        for name in sorted(sets.never)
        if name in environment
    ]
    for name, value in sorted(wanted.items()):
        there = environment.get(name)
        if there is None:
            results.append(
                VariableDifference(name=name, kind=VariableDifferenceKind.MISSING, wanted=value)
            )
        elif there != value:
            results.append(
                VariableDifference(
                    name=name, kind=VariableDifferenceKind.OTHER, wanted=value, found=there
                )
            )
    return tuple(results)


def forbidden_notes(
    site: str, sets: EnvironmentSets, own: Mapping[str, str], job: Mapping[str, str]
) -> tuple[str, ...]:
    """What somebody who submits from the environment ``own`` hears: sbatch takes it along."""
    return tuple(
        f"{site}: {'the job file sets' if each.name in job else 'your environment has'} "
        f"{each.name}={each.shown}, which must not be set here: {each.why}"
        for each in differences(sets, {**own, **job})
        if each.kind is VariableDifferenceKind.FORBIDDEN
    )


def settled(
    always: Mapping[str, str],
    own: Mapping[str, str],
    job: Mapping[str, str],
    in_force: Sequence[Variable] = (),
) -> dict[str, str]:
    """The environment of the ranks: the site's, then what is ``own``, then the job file's.

    ``in_force`` are those of the recovery plan, which stand above the site's others.  What of
    ``own`` has the very value of ``always`` was put there for it (by the batch script) and counts
    as the site's.
    """
    added = {each.name: each.value for each in in_force}
    personal = {
        name: value
        for name, value in own.items()
        if not (name in added and always.get(name) == value)
    }
    return {**always, **added, **personal, **job}


def effective(
    on_hang: Mapping[str, str],
    always: Mapping[str, str],
    own: Mapping[str, str],
    job: Mapping[str, str],
) -> tuple[Variable, ...]:
    """Those of the site's set for after a hang that would change anything: yours stay as they are.

    Sorted by name.
    """
    return tuple(
        Variable(name, value)
        for name, value in sorted(on_hang.items())
        if name not in job and own.get(name) in (None, always.get(name), value)
    )


def reaches_forks(name: str) -> bool:
    """Whether a variable may be sent to a process that has imported torch, and made no group.

    It still counts there, and whoever sets it has no code executed by that: every other variable
    takes a new start, by srun.
    """
    return _SENT.fullmatch(name) is not None and _NAMES_FILES.search(name) is None
