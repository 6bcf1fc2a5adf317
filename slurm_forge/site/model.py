"""The form of a site file (``site_configs/*.yaml``): pydantic models, frozen, no unknown keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from slurm_forge.documents import wrong_key
from slurm_forge.units import format_bandwidth, format_duration, parse_bandwidth, parse_duration

__all__ = [
    "Bandwidth",
    "EnvironmentSets",
    "GpuRequest",
    "LimitBySize",
    "PartitionFacts",
    "Preemption",
    "PreemptionMode",
    "Site",
    "Storage",
]


def _duration(value: object) -> timedelta | None:
    return None if value is None else parse_duration(value)


def _bandwidth(value: object) -> float | None:
    if value is None or (isinstance(value, float) and value > 0):
        return value
    return float(parse_bandwidth(value))


def _plain(text: str) -> str:
    if not text.isprintable():
        raise ValueError("one line of printable text, please")
    return text


def _option(text: str) -> str:
    if not re.fullmatch(r"--?[A-Za-z][A-Za-z0-9-]*(?:[= ].*)?", _plain(text)):
        raise ValueError('options begin with a dash, like "--gres" or "--network=single_node_vni"')
    return text


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name[:40]!r} is no name of an environment variable")
        _plain(value)
    return values


def _folder(text: str) -> str:
    if not _plain(text).startswith("/"):
        raise ValueError("the path of a folder, from / on")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError("letters, digits, '_', '-' and '.' only")
    return text


#: A duration such as ``"120s"``, ``"90d"`` or ``"2-00:00:00"``; ``null`` where it is unknown.
Duration = Annotated[
    timedelta | None,
    BeforeValidator(_duration),
    PlainSerializer(lambda value: None if value is None else format_duration(value)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
#: Bytes per second, as ``"180 GB/s"``; ``null`` where it is unknown.
Bandwidth = Annotated[
    float | None,
    BeforeValidator(_bandwidth),
    PlainSerializer(
        lambda value: None if value is None else format_bandwidth(value), when_used="json"
    ),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
Line = Annotated[str, AfterValidator(_plain)]
Option = Annotated[str, AfterValidator(_option)]
FolderPath = Annotated[str, AfterValidator(_folder)]
Variables = Annotated[dict[str, str], AfterValidator(_variables)]
Name = Annotated[str, AfterValidator(_name)]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PreemptionMode(str, Enum):
    """What happens to a job that is preempted, in Slurm's words (slurm.conf, PreemptMode)."""

    OFF = "OFF"
    REQUEUE = "REQUEUE"
    CANCEL = "CANCEL"
    SUSPEND = "SUSPEND"


class GpuRequest(str, Enum):
    """The option by which GPUs are asked for; ``none`` where the partition implies them."""

    GPUS_PER_NODE = "gpus_per_node"
    GPUS_PER_TASK = "gpus_per_task"
    GRES = "gres"
    NONE = "none"


class Preemption(_Facts):
    """The contract between a job and those who may preempt it.

    ``grace`` is the notice before the end, zero being none; ``exempt`` is how long a job runs
    before it may be preempted at all.
    """

    mode: PreemptionMode | None = None
    grace: Duration = None
    exempt: Duration = None


class LimitBySize(_Facts):
    """The longest run for jobs of at least ``min_nodes`` nodes."""

    min_nodes: Annotated[int, Field(ge=1)]
    max_time: Duration


class PartitionFacts(_Facts):
    """What is known of one partition or QOS."""

    preemption: Preemption = Preemption()
    max_time: Duration = None
    max_time_by_nodes: tuple[LimitBySize, ...] = ()
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    gpu: Line | None = None
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    self_requeue_allowed: bool | None = None
    #: What an all-reduce of large messages reaches over all ranks of a sound job: the bus
    #: bandwidth that nccl-tests prints, per rank.
    expected_bandwidth: Bandwidth = None
    note: Line | None = None


class EnvironmentSets(_Facts):
    """Environment variables for the ranks: always, in addition after a hang, and never.

    ``never`` maps the names of variables that must not be set to why.
    """

    known_as: ClassVar[Mapping[str, str]] = {
        "hang": "on_hang", "after_hang": "on_hang", "forbidden": "never", "forbid": "never",
        "unset": "never", "set": "always",
    }  # fmt: skip

    always: Variables = Field(default_factory=dict)
    on_hang: Variables = Field(default_factory=dict)
    never: Variables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _nothing_is_set_and_forbidden(self) -> EnvironmentSets:
        for key, given in (("always", self.always), ("on_hang", self.on_hang)):
            for name in sorted(self.never.keys() & given.keys()):
                raise wrong_key((key, name), "env.never says that it must not be set")
        return self


class Storage(_Facts):
    """A place for files, and when the centre deletes them."""

    role: Line
    path: Line | None = None
    #: The environment variable that holds the path.
    env: Name | None = None
    filesystem: Line | None = None
    purge_after: Duration = None
    #: What the age counts from, in the centre's words ("atime", "content not modified").
    purge_basis: Line | None = None
    note: Line | None = None


class Site(_Facts):
    """Everything known of one cluster.  Find the facts of a job with ``preemption`` and ``facts``.

    ``setup`` is shell code that runs at the start of the batch script: a site file is trusted
    like a script of one's own.
    """

    known_as: ClassVar[Mapping[str, str]] = {
        "cluster_name": "cluster_names",
        "socket_ifname": "socket_interface",
        "modules": "setup",
        "environment": "env",
        "variables": "env",
        "bandwidth": "expected_bandwidth",
    }

    name: Name
    title: Line | None = None
    #: ClusterName in slurm.conf: how the site is recognised.
    cluster_names: tuple[Name, ...] = ()
    contact: Line | None = None
    sources: tuple[Line, ...] = ()
    #: When the facts were last compared with the sources, as "2026-08".
    checked: Line | None = None

    #: For every partition and QOS that says nothing else.
    preemption_default: Preemption = Preemption()
    partitions: dict[Name, PartitionFacts] = Field(default_factory=dict)
    qos: dict[Name, PartitionFacts] = Field(default_factory=dict)
    #: From a requeue until the job can start again.
    requeue_delay: Duration = None
    #: Whether a requeued job may be given an earlier begin time than Slurm's delay after a requeue.
    shorten_requeue: bool = True
    #: What an all-reduce reaches, for every partition and QOS that says nothing else.
    expected_bandwidth: Bandwidth = None
    #: Whether the centre lets jobs requeue themselves or submit their successors.
    self_requeue_allowed: bool | None = None

    gpu_request: GpuRequest | None = None
    account_required: bool | None = None
    rejected_options: tuple[Option, ...] = ()
    required_options: tuple[Option, ...] = ()
    #: Options for every job, beside what the job file asks for.
    sbatch_options: tuple[Option, ...] = ()
    srun_options: tuple[Option, ...] = ()

    setup: tuple[Line, ...] = ()
    env: EnvironmentSets = EnvironmentSets()
    socket_interface: Line | None = None
    #: Appended to a host name to get the name on the fast network.
    host_suffix: Line | None = None
    #: The interpreter for the ranks, where ``python`` on the PATH is not it.
    python: Line | None = None
    internet_on_compute_nodes: bool | None = None
    storage: tuple[Storage, ...] = ()
    #: The folder of the node ledger that a group of users shares.
    node_ledger: FolderPath | None = None
    notes: tuple[Line, ...] = ()

    @model_validator(mode="after")
    def _interface_can_be_one(self) -> Site:
        if self.socket_interface is not None and " " in self.socket_interface.strip():
            raise wrong_key("socket_interface", 'names are parted by commas: "hsn,ib"')
        told = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & self.env.never.keys()
        if self.socket_interface is not None and told:
            raise wrong_key("socket_interface", f"env.never says that {min(told)} must not be set")
        return self

    def facts(self, partition: str | None, qos: str | None = None) -> PartitionFacts:
        """What is known of a job in this partition and QOS; where both say something, the QOS."""
        merged: dict[str, Any] = {"preemption": self.preemption(partition, qos)}
        for known in (self.qos.get(qos or ""), self.partitions.get(partition or "")):
            for field in PartitionFacts.model_fields if known is not None else ():
                if getattr(known, field) not in (None, ()):
                    merged.setdefault(field, getattr(known, field))
        merged.setdefault("self_requeue_allowed", self.self_requeue_allowed)
        merged.setdefault("expected_bandwidth", self.expected_bandwidth)
        return PartitionFacts.model_construct(None, **merged)

    def preemption(self, partition: str | None, qos: str | None = None) -> Preemption:
        """The contract of a job: the first of QOS, partition and default that knows its mode."""
        known = (self.qos.get(qos or ""), self.partitions.get(partition or ""))
        candidates = [facts.preemption for facts in known if facts is not None]
        return next((found for found in candidates if found.mode), self.preemption_default)
