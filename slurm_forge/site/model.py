"""The form of a site file (``site_configs/*.yaml``): pydantic models, frozen, no unknown keys.

And which of a site's storages a path lies on (``storage_at``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from slurm_forge.documents import wrong_key
from slurm_forge.site.fields import (
    Bandwidth,
    Day,
    Duration,
    Facts,
    Feature,
    FolderPath,
    Line,
    Memory,
    ModuleName,
    Name,
    Option,
    Variables,
)
from slurm_forge.site.parts import (
    AccountRule,
    Architecture,
    Backend,
    Container,
    Detection,
    FactConfidence,
    GpuOption,
    LauncherStyle,
    MasterAddress,
    OptionEntry,
    SourceEntry,
)

AtLeastOne = Annotated[int, Field(ge=1)]


class PreemptionMode(str, Enum):
    """What happens to a job that is preempted, in Slurm's words (slurm.conf, PreemptMode)."""

    OFF = "OFF"
    REQUEUE = "REQUEUE"
    CANCEL = "CANCEL"
    SUSPEND = "SUSPEND"


class Preemption(Facts):
    """The contract between a job and those who may preempt it.

    ``grace`` is the notice before the end, zero being none; ``exempt`` is how long a job runs
    before it may be preempted at all.
    """

    known_as: ClassVar[Mapping[str, str]] = {
        "grace_s": "grace", "grace_time": "grace", "exempt_s": "exempt", "exempt_time": "exempt",
        "preempt_mode": "mode",
    }  # fmt: skip

    mode: PreemptionMode | None = None
    grace: Duration = None
    exempt: Duration = None


class LimitBySize(Facts):
    """The longest run for jobs of at least ``min_nodes`` nodes."""

    min_nodes: AtLeastOne
    max_time: Duration


class PartitionFacts(Facts):
    """What is known of one partition or QOS."""

    known_as: ClassVar[Mapping[str, str]] = {
        "preempt": "preemption", "max_walltime": "max_time", "walltime": "max_time",
        "time": "max_time", "gpus": "gpus_per_node", "walltime_by_nodes": "max_time_by_nodes",
        "exclusive": "exclusive_nodes", "features": "constraint", "module": "modules",
        "notes": "note", "bandwidth": "expected_bandwidth",
    }  # fmt: skip

    preemption: Preemption = Preemption()
    max_time: Duration = None
    max_time_by_nodes: tuple[LimitBySize, ...] = ()
    #: Time limit of a job that requests none.
    default_time: Duration = None
    max_nodes: AtLeastOne | None = None
    gpu: Line | None = None
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    max_gpus_per_job: AtLeastOne | None = None
    #: Whether jobs without GPUs are rejected.
    gpus_required: bool | None = None
    #: CPUs that go with each GPU: a job that requests more is refused, or blocks GPUs of others.
    cpus_per_gpu: AtLeastOne | None = None
    memory_per_gpu: Memory = None
    #: The feature that jobs here have to request.
    constraint: Feature | None = None
    #: Whether a job gets whole nodes (and is charged for them), whatever it requests.
    exclusive_nodes: bool | None = None
    modules: tuple[ModuleName, ...] = ()
    self_requeue_allowed: bool | None = None
    #: What an all-reduce of large messages reaches over all ranks of a healthy job: the bus
    #: bandwidth that nccl-tests prints, per rank.
    expected_bandwidth: Bandwidth = None
    note: Line | None = None


class EnvironmentSets(Facts):
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
        for key, variables in (("always", self.always), ("on_hang", self.on_hang)):
            for name in sorted(self.never.keys() & variables.keys()):
                raise wrong_key((key, name), "env.never says that it must not be set")
        return self


class Storage(Facts):
    """A place for files, and when the centre deletes them."""

    known_as: ClassVar[Mapping[str, str]] = {
        "purge": "purge_after", "purge_days": "purge_after", "basis": "purge_basis",
        "fs": "filesystem", "variable": "env",
    }  # fmt: skip

    role: Line
    path: Line | None = None
    #: The environment variable that holds the path.
    env: Name | None = None
    filesystem: Line | None = None
    purge_after: Duration = None
    #: What the age counts from, in the centre's words ("atime", "content not modified").
    purge_basis: Line | None = None
    note: Line | None = None


class ClusterFacts(Facts):
    """What is true of one of several clusters that a file describes."""

    title: Line | None = None
    everywhere: PartitionFacts = PartitionFacts()
    internet_on_compute_nodes: bool | None = None
    notes: tuple[Line, ...] = ()


class Site(Facts):
    """Everything known about one cluster.

    ``setup`` is shell code that runs at the start of the batch script: a site file is trusted
    like a script of your own.
    """

    known_as: ClassVar[Mapping[str, str]] = {
        "cluster_name": "cluster_names", "socket_ifname": "socket_interface",
        "environment": "env", "variables": "env", "bandwidth": "expected_bandwidth",
        "hosts": "detect.hosts", "hostnames": "detect.hosts", "arch": "architecture",
        "account": "account_required", "gpus": "gpu_request", "gpu_directive": "gpu_request",
        "rejected": "rejected_options", "required": "required_options",
        "discouraged": "discouraged_options", "source": "sources", "scratch": "storage",
        "preemption": "preemption_default", "preempt": "preemption_default",
        "prempt": "preemption_default",
        "internet": "internet_on_compute_nodes", "container": "containers",
        "master_addr": "master_address", "defaults": "everywhere", "module": "modules",
        "quirks": "notes", "note": "notes", "max_time": "everywhere.max_time",
        "exclusive_nodes": "everywhere.exclusive_nodes",
        "gpus_per_node": "everywhere.gpus_per_node",
    }  # fmt: skip

    name: Name
    title: Line | None = None
    #: ClusterName in slurm.conf: how the site is recognised.
    cluster_names: tuple[Name, ...] = ()
    detect: Detection = Detection()
    #: Where one file describes several clusters: what differs, by ClusterName or by the
    #: value of the variable that identifies it.
    clusters: dict[Name, ClusterFacts] = Field(default_factory=dict)
    contact: Line | None = None
    confidence: FactConfidence | None = None
    sources: tuple[SourceEntry, ...] = ()
    #: When the facts were last compared with the sources.
    checked: Day | None = None

    #: For every partition and QOS without its own.
    preemption_default: Preemption = Preemption()
    #: Other facts of every partition and QOS without its own.
    everywhere: PartitionFacts = PartitionFacts()
    partitions: dict[Name, PartitionFacts] = Field(default_factory=dict)
    qos: dict[Name, PartitionFacts] = Field(default_factory=dict)
    #: The QOS of jobs that name none.
    default_qos: Name | None = None
    #: From a requeue until the job can start again.
    requeue_delay: Duration = None
    #: Whether a requeued job may be given an earlier begin time than Slurm's delay after a requeue.
    shorten_requeue: bool = True
    #: What an all-reduce reaches, for every partition and QOS without its own.
    expected_bandwidth: Bandwidth = None
    #: Whether the centre lets jobs requeue themselves or submit their successors.
    self_requeue_allowed: bool | None = None

    gpu_request: GpuOption | None = None
    #: GPU types that are requested by a feature: "a100" in the job file, the constraint here.
    gpu_types: dict[Name, Feature] = Field(default_factory=dict)
    account_required: bool | None = None
    account_example: Line | None = None
    #: Accounts that go with certain GPUs only.
    accounts: tuple[AccountRule, ...] = ()
    rejected_options: tuple[OptionEntry, ...] = ()
    required_options: tuple[OptionEntry, ...] = ()
    discouraged_options: tuple[OptionEntry, ...] = ()
    #: Options for every job, in addition to those of the job file.
    sbatch_options: tuple[Option, ...] = ()
    srun_options: tuple[Option, ...] = ()

    #: Modules that every job loads, before ``setup``.
    modules: tuple[ModuleName, ...] = ()
    setup: tuple[Line, ...] = ()
    containers: tuple[Container, ...] = ()
    launcher: LauncherStyle | None = None
    env: EnvironmentSets = EnvironmentSets()
    fabric: Line | None = None
    backend: Backend | None = None
    architecture: Architecture | None = None
    socket_interface: Line | None = None
    #: Appended to a host name to get the name on the fast network.
    host_suffix: Line | None = None
    master_address: MasterAddress | None = None
    #: The interpreter for the ranks, if it is not ``python`` on the PATH.
    python: Line | None = None
    internet_on_compute_nodes: bool | None = None
    storage: tuple[Storage, ...] = ()
    #: The folder of the node ledger that a group of users shares.
    node_ledger: FolderPath | None = None
    notes: tuple[Line, ...] = ()

    @model_validator(mode="after")
    def _interface_can_be_one(self) -> Site:
        if self.socket_interface is not None and " " in self.socket_interface.strip():
            raise wrong_key("socket_interface", 'separate names by commas: "hsn,ib"')
        forbidden = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & self.env.never.keys()
        if self.socket_interface is not None and forbidden:
            raise wrong_key(
                "socket_interface", f"env.never says that {min(forbidden)} must not be set"
            )
        return self

    def facts(self, partition: str | None, qos: str | None = None) -> PartitionFacts:
        """What is known of a job in this partition and QOS; where both say something, the QOS."""
        merged: dict[str, Any] = {"preemption": self.preemption(partition, qos)}
        for known in self._known(partition, qos):
            for field in PartitionFacts.model_fields:
                if getattr(known, field) not in (None, ()):
                    merged.setdefault(field, getattr(known, field))
        merged.setdefault("self_requeue_allowed", self.self_requeue_allowed)
        merged.setdefault("expected_bandwidth", self.expected_bandwidth)
        return PartitionFacts.model_construct(None, **merged)

    def preemption(self, partition: str | None, qos: str | None = None) -> Preemption:
        """The contract of a job: the first of QOS, partition and default that knows its mode."""
        candidates = [facts.preemption for facts in self._known(partition, qos)]
        return next((each for each in candidates if each.mode), self.preemption_default)

    def on(self, cluster: str | None) -> Site:
        """The facts of one of the clusters that the file describes; the same for any other."""
        facts = self.clusters.get(cluster or "")
        if facts is None:
            return self
        differs = {
            name: value
            for name in PartitionFacts.model_fields
            if (value := getattr(facts.everywhere, name)) not in (None, (), Preemption())
        }
        changes: dict[str, object] = {
            "everywhere": self.everywhere.model_copy(update=differs),
            "notes": (*self.notes, *facts.notes),
        }
        if facts.internet_on_compute_nodes is not None:
            changes["internet_on_compute_nodes"] = facts.internet_on_compute_nodes
        return self.model_copy(update=changes)

    def _known(self, partition: str | None, qos: str | None) -> tuple[PartitionFacts, ...]:
        known = (
            self.qos.get(qos or self.default_qos or ""),
            self.partitions.get(partition or ""),
            self.everywhere,
        )
        return tuple(facts for facts in known if facts is not None)


#: Site files write what differs from user to user as <lab>, $USER or ${USER}.
_OPEN = re.compile(r"<[^<>/]+>|\$\{?[A-Za-z_][A-Za-z0-9_]*\}?")


def storage_at(site: Site, path: Path, variables: Mapping[str, str]) -> Storage | None:
    """The storage that ``path`` lies on, the innermost of several; None where the site knows none.

    ``variables`` are the environment: a site names places by ``$SCRATCH`` and the like.
    """
    places = {os.path.abspath(path), os.path.realpath(path)}  # noqa: PTH100 (links are both)
    best: tuple[int, Storage] | None = None
    for storage in site.storage:
        for pattern, depth in _patterns(storage, variables):
            lies_there = any(pattern.match(place) for place in places)
            if lies_there and (best is None or depth > best[0]):
                best = (depth, storage)
    return None if best is None else best[1]


def _patterns(
    storage: Storage, variables: Mapping[str, str]
) -> Iterator[tuple[re.Pattern[str], int]]:
    """What paths on the storage begin with, and how deep that is."""
    if storage.path is not None:
        # Each open part is one folder.
        parts = [re.escape(part) for part in _OPEN.split(storage.path.rstrip("/"))]
        yield re.compile("[^/]+".join(parts) + "(/|$)"), storage.path.count("/")
    value = variables.get(storage.env or "", "").rstrip("/")
    if value.startswith("/"):
        yield re.compile(re.escape(value) + "(/|$)"), value.count("/")
