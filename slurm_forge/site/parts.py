"""Parts of a site file that describe how jobs are asked for, and where the facts come from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from slurm_forge.site.fields import (
    Day,
    Facts,
    HostPattern,
    Line,
    ModuleName,
    Name,
    Option,
    OrText,
    check_line,
    check_option,
)


class FactConfidence(str, Enum):
    """How sure the facts of a file are."""

    #: Seen on the cluster itself.
    TRIED = "tried"
    #: The centre's own documents, read in full.
    OFFICIAL = "official"
    #: The centre's own documents, of which only a part could be read.
    OFFICIAL_EXCERPT = "official_excerpt"
    #: Public job scripts and notes of users that agree with each other.
    COMMUNITY = "community"


class GpuOption(str, Enum):
    """The option by which GPUs are asked for; ``none`` where the partition implies them."""

    GPUS_PER_NODE = "gpus_per_node"
    GPUS_PER_TASK = "gpus_per_task"
    #: ``--gpus``, the number of the whole job; of several nodes each is asked for its own.
    GPUS = "gpus"
    GRES = "gres"
    NONE = "none"


class LauncherStyle(str, Enum):
    """How the centre's documents start the ranks."""

    SRUN_PER_GPU = "srun_per_gpu"
    TORCHRUN_PER_NODE = "torchrun_per_node"


class MasterAddress(str, Enum):
    """What torchrun and the like are told of the first node."""

    #: Its name, with ``host_suffix`` behind it.
    NAME = "name"
    #: The address that this name has.
    ADDRESS = "address"
    #: The address of ``socket_interface`` there.
    INTERFACE = "interface"


class Architecture(str, Enum):
    """Of the compute nodes, as ``uname -m`` says it."""

    X86_64 = "x86_64"
    AARCH64 = "aarch64"


class Backend(str, Enum):
    """The library behind torch's ``nccl`` process groups."""

    NCCL = "nccl"
    RCCL = "rccl"


class ContainerRuntime(str, Enum):
    """What runs containers."""

    APPTAINER = "apptainer"
    SINGULARITY = "singularity"
    PYXIS = "pyxis"
    ENROOT = "enroot"
    SARUS = "sarus"
    SHIFTER = "shifter"
    PODMAN = "podman"
    #: An option of srun that takes the description of an environment.
    CONTAINER_ENGINE = "container_engine"


def _words(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"can't be split into words: {str(error).lower()}") from None
    return text


class Container(Facts):
    """One way of running a container here; what varies is written as ``<image>``."""

    runtime: ContainerRuntime
    #: What precedes the program's own command line.
    command: Annotated[Line, AfterValidator(_words)] | None = None
    sbatch_options: tuple[Option, ...] = ()
    srun_options: tuple[Option, ...] = ()
    modules: tuple[ModuleName, ...] = ()
    note: Line | None = None


class FactSource(OrText):
    """Where facts come from: a page (best at a fixed version), its date, when it was read."""

    known_as: ClassVar[Mapping[str, str]] = {
        "url": "page", "link": "page", "date": "dated", "read": "seen",
    }  # fmt: skip

    page: Line
    dated: Day | None = None
    seen: Day | None = None
    note: Line | None = None


class OptionRule(OrText):
    """An option of sbatch, and why it is refused, needed or better left out."""

    known_as: ClassVar[Mapping[str, str]] = {"reason": "why", "note": "why", "name": "option"}

    option: Option
    why: Line | None = None


class AccountRule(Facts):
    """Which accounts go with which GPUs: ``accounts`` are patterns such as ``*@a100``.

    A job that asks for one of the features in ``constraint``, or for one of ``partitions``, has to
    name such an account.  With ``both_ways`` a job that names such an account has to ask for one
    of them, too.
    """

    known_as: ClassVar[Mapping[str, str]] = {
        "account": "accounts", "pattern": "accounts", "constraints": "constraint",
        "partition": "partitions", "features": "constraint", "note": "why",
    }  # fmt: skip

    accounts: Annotated[tuple[Line, ...], Field(min_length=1)]
    constraint: tuple[Line, ...] = ()
    partitions: tuple[Name, ...] = ()
    both_ways: bool = False
    why: Line | None = None

    @model_validator(mode="after")
    def _goes_with_something(self) -> AccountRule:
        if not self.constraint and not self.partitions:
            raise ValueError(
                "has no constraint and no partitions that these accounts go with; for all jobs "
                "write account_required and account_example"
            )
        return self


class Detection(Facts):
    """How a site is recognised besides its ClusterName: by variables that it sets, or by hosts."""

    known_as: ClassVar[Mapping[str, str]] = {
        "env": "variables", "environment": "variables", "variable": "variables",
        "host": "hosts", "hostname": "hosts", "hostnames": "hosts", "host_names": "hosts",
    }  # fmt: skip

    variables: dict[Name, tuple[Line, ...]] = Field(default_factory=dict)
    hosts: tuple[HostPattern, ...] = ()


def _as_source(value: Any) -> Any:
    return FactSource.model_construct(page=check_line(value)) if isinstance(value, str) else value


def _as_rule(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return OptionRule.model_construct(option=check_option(value))


#: A page alone, or with its dates.
SourceEntry = Annotated[FactSource, BeforeValidator(_as_source)]
#: An option alone, or with the reason.
OptionEntry = Annotated[OptionRule, BeforeValidator(_as_rule)]
