"""A site file held against what Slurm says: what differs, with the file's line and Slurm's word.

Pure.  Only what both say is compared: what is unknown to one of them is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from slurm_forge.documents import KeyPath
from slurm_forge.site.contract import contract_of, goes_by_qos
from slurm_forge.site.loading import LoadedSite
from slurm_forge.site.model import PartitionFacts, Preemption, PreemptionMode, Site
from slurm_forge.site.origins import unknown_keys
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.slurm.survey import Survey
from slurm_forge.units import format_duration

__all__ = ["Difference", "Kind", "compare", "gpus_per_node", "unchecked"]

#: Slurm knows nothing of these.
_NOT_SLURMS = (
    "env", "modules", "setup", "containers", "launcher", "fabric", "backend", "socket_interface",
    "host_suffix", "master_address", "internet_on_compute_nodes", "storage", "self_requeue_allowed",
    "gpu_request", "accounts", "account_required", "rejected_options", "required_options",
    "discouraged_options", "expected_bandwidth", "clusters",
)  # fmt: skip


class Kind(str, Enum):
    """How the two stand to each other."""

    DIFFERS = "differs"
    #: The file speaks of something that Slurm does not have.
    NOT_IN_SLURM = "not in Slurm"
    #: Slurm has something that the file does not speak of.
    NOT_IN_FILE = "not in the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact.  ``line`` is of the site file, None where it has none; texts are for people."""

    kind: Kind
    key: str
    line: int | None
    in_file: str
    in_slurm: str
    #: The command that says so.
    told_by: str

    def words(self, file: str) -> str:
        """One sentence with the place in the file."""
        place = file if self.line is None else f"{file}:{self.line}"
        match self.kind:
            case Kind.DIFFERS:
                return f"{place}: {self.key} says {self.in_file}, Slurm says {self.in_slurm}"
            case Kind.NOT_IN_SLURM:
                return f"{place}: {self.key}: {self.in_slurm}"
            case Kind.NOT_IN_FILE:
                return f"{file} says nothing of {self.key}: {self.in_slurm}"


def compare(loaded: LoadedSite, survey: Survey) -> tuple[Difference, ...]:
    """Everything that the file says otherwise than Slurm, in the file's order, then what it lacks.

    Nothing is compared with what Slurm could not be asked for.
    """
    config = survey.config
    if config is None:
        return ()
    eye = _Eye(loaded)
    return (
        *_cluster(eye, config),
        *_partitions(eye, config, survey),
        *_all_qos(eye, config, survey),
        *_top(eye, config, survey),
    )


def unchecked(site: Site) -> tuple[str, ...]:
    """What the file knows and Slurm can't tell: keys at the top."""
    unknown = {*unknown_keys(site)}
    # True where nobody has said otherwise.
    return tuple(key for key in _NOT_SLURMS if key not in unknown)


def gpus_per_node(survey: Survey, partition: str) -> int | None:
    """How many GPUs each node of the partition has; None where nodes differ, or nobody says."""
    counts = {
        sum(kind.count for kind in group.gpus)
        for group in survey.nodes or ()
        if group.partition == partition
    }
    return counts.pop() if len(counts) == 1 else None


class _Eye:
    """Finds the line that a fact stands on, in the file or among its defaults."""

    def __init__(self, loaded: LoadedSite) -> None:
        self.site = loaded.site
        self._document = loaded.document
        self._cluster = loaded.cluster

    def line(self, *keys: KeyPath) -> int | None:
        lines = self._document.lines
        for key in keys:
            here = [("clusters", self._cluster, *key)] if self._cluster else []
            for each in (*here, key):
                if each in lines:
                    return lines[each]
        return None

    def of(self, kind: str, name: str, *rest: str) -> int | None:
        """The line of a fact of one partition or QOS, else of what holds everywhere."""
        default: KeyPath = ("everywhere", *rest)
        if rest[:1] == ("preemption",):
            default = ("preemption_default", *rest[1:])
        return self.line((kind, name, *rest), default, (kind, name))


def _cluster(eye: _Eye, config: ConfigRecord) -> Iterator[Difference]:
    names, name = eye.site.cluster_names, config.cluster_name
    if names and name is not None and name not in names:
        yield Difference(
            kind=Kind.DIFFERS,
            key="cluster_names",
            line=eye.line(("cluster_names",)),
            in_file=", ".join(names),
            in_slurm=name,
            told_by="scontrol show config",
        )


def _partitions(eye: _Eye, config: ConfigRecord, survey: Survey) -> Iterator[Difference]:
    if survey.partitions is None:
        return
    told_by = "scontrol show partition"
    records = {each.name: each for each in survey.partitions}
    for name in eye.site.partitions:
        if name not in records:
            yield Difference(
                kind=Kind.NOT_IN_SLURM,
                key=f"partitions.{name}",
                line=eye.line(("partitions", name)),
                in_file=name,
                in_slurm="Slurm has no partition of that name",
                told_by=told_by,
            )
    for name, record in records.items():
        if not goes_by_qos(config):
            contract = contract_of(config, record, survey.partitions, None, survey.qos)
            mode = PreemptionMode.OFF if contract.above is False else None
            asked = Preemption(mode=mode) if mode is not None else contract.preemption
            yield from _preemption(
                eye, "partitions", name, eye.site.preemption(name), asked, told_by
            )
        yield from _facts(eye, name, record, survey, told_by)
        if eye.site.partitions and name not in eye.site.partitions:
            yield _lacking("partitions", name, _summary(record), told_by)


def _facts(
    eye: _Eye, name: str, record: PartitionRecord, survey: Survey, told_by: str
) -> Iterator[Difference]:
    # Without a QOS: its own limits are compared with the file's QOS.
    known = _of_partition(eye.site, name)
    limit = {each.name: each for each in survey.qos or ()}.get(record.qos or "")
    longest = min(
        (each for each in (record.max_time, limit and limit.max_wall) if each), default=None
    )
    pairs: list[tuple[str, object, object, str]] = [
        ("max_time", known.max_time, longest, "MaxTime"),
        ("default_time", known.default_time, record.default_time, "DefaultTime"),
        ("max_nodes", known.max_nodes, record.max_nodes, "MaxNodes"),
        ("gpus_per_node", known.gpus_per_node, gpus_per_node(survey, name), "sinfo"),
    ]
    if known.exclusive_nodes is False and record.exclusive:
        pairs.append(("exclusive_nodes", False, True, "OverSubscribe=EXCLUSIVE"))
    for key, in_file, in_slurm, word in pairs:
        if in_file is None or in_slurm is None or in_file == in_slurm:
            continue
        yield Difference(
            kind=Kind.DIFFERS,
            key=f"partitions.{name}.{key}",
            line=eye.of("partitions", name, key),
            in_file=_text(in_file),
            in_slurm=f"{_text(in_slurm)}" + (f" ({word})" if word != "sinfo" else ""),
            told_by="sinfo" if word == "sinfo" else told_by,
        )
    features = {
        feature
        for group in survey.nodes or ()
        if group.partition == name
        for feature in group.features
    }
    wanted = known.constraint
    if wanted is not None and survey.nodes and wanted.isidentifier() and wanted not in features:
        yield Difference(
            kind=Kind.DIFFERS,
            key=f"partitions.{name}.constraint",
            line=eye.of("partitions", name, "constraint"),
            in_file=wanted,
            in_slurm="no node there has that feature",
            told_by="sinfo",
        )


def _of_partition(site: Site, name: str) -> PartitionFacts:
    """What the file says of a partition, whatever the QOS."""
    return site.model_copy(update={"qos": {}, "default_qos": None}).facts(name)


def _all_qos(eye: _Eye, config: ConfigRecord, survey: Survey) -> Iterator[Difference]:
    if not survey.qos:
        return
    told_by = "sacctmgr show qos"
    records = {each.name: each for each in survey.qos}
    for name, facts in eye.site.qos.items():
        record = records.get(name)
        if record is None:
            yield Difference(
                kind=Kind.NOT_IN_SLURM,
                key=f"qos.{name}",
                line=eye.line(("qos", name)),
                in_file=name,
                in_slurm="the accounting database has no QOS of that name",
                told_by=told_by,
            )
            continue
        if facts.max_time and record.max_wall and facts.max_time != record.max_wall:
            yield Difference(
                kind=Kind.DIFFERS,
                key=f"qos.{name}.max_time",
                line=eye.of("qos", name, "max_time"),
                in_file=_text(facts.max_time),
                in_slurm=f"{_text(record.max_wall)} (MaxWall)",
                told_by=told_by,
            )
    if not goes_by_qos(config):
        return
    for name, record in records.items():
        contract = contract_of(config, None, (), record, survey.qos)
        known = eye.site.preemption(None, name)
        yield from _preemption(eye, "qos", name, known, contract.preemption, told_by)
        if eye.site.qos and name not in eye.site.qos:
            yield _lacking("qos", name, _qos_summary(record, contract.preemption), told_by)


def _preemption(
    eye: _Eye, kind: str, name: str, known: Preemption, asked: Preemption, told_by: str
) -> Iterator[Difference]:
    if known.mode is None or asked.mode is None:
        return
    pairs: list[tuple[str, object, object]] = [("mode", known.mode, asked.mode)]
    if known.mode is asked.mode and known.mode is not PreemptionMode.OFF:
        pairs += [("grace", known.grace, asked.grace)]
        # Slurm says none where there is none.
        exempt = asked.exempt or timedelta(0)
        pairs += [("exempt", known.exempt, exempt)]
    for key, in_file, in_slurm in pairs:
        if in_file is None or in_slurm is None or in_file == in_slurm:
            continue
        yield Difference(
            kind=Kind.DIFFERS,
            key=f"{kind}.{name}.preemption.{key}",
            line=eye.of(kind, name, "preemption", key),
            in_file=_text(in_file),
            in_slurm=_text(in_slurm),
            told_by=told_by,
        )


def _top(eye: _Eye, config: ConfigRecord, survey: Survey) -> Iterator[Difference]:
    site = eye.site
    if site.requeue_delay is not None and site.requeue_delay != config.requeue_delay:
        yield Difference(
            kind=Kind.DIFFERS,
            key="requeue_delay",
            line=eye.line(("requeue_delay",)),
            in_file=_text(site.requeue_delay),
            in_slurm=f"{_text(config.requeue_delay)} (requeue_delay or cred_expire, and a second)",
            told_by="scontrol show config",
        )
    known = site.architecture and site.architecture.value
    if known is not None and survey.architecture not in (None, known):
        yield Difference(
            kind=Kind.DIFFERS,
            key="architecture",
            line=eye.line(("architecture",)),
            in_file=known,
            in_slurm=str(survey.architecture),
            told_by="scontrol show node",
        )
    features = {each for group in survey.nodes or () for each in group.features}
    for kind, feature in site.gpu_types.items():
        if features and feature.isidentifier() and feature not in features:
            yield Difference(
                kind=Kind.DIFFERS,
                key=f"gpu_types.{kind}",
                line=eye.line(("gpu_types", kind)),
                in_file=feature,
                in_slurm="no node has that feature",
                told_by="sinfo",
            )


def _lacking(kind: str, name: str, words: str, told_by: str) -> Difference:
    return Difference(
        kind=Kind.NOT_IN_FILE,
        key=f"{kind}.{name}",
        line=None,
        in_file="",
        in_slurm=words,
        told_by=told_by,
    )


def _summary(record: PartitionRecord) -> str:
    parts = [f"PreemptMode={record.preempt_mode or 'unknown'}"]
    parts += [f"GraceTime={_text(record.grace_time)}"] if record.grace_time else []
    parts += [f"MaxTime={_text(record.max_time)}"] if record.max_time else []
    return " ".join(parts)


def _qos_summary(record: QosRecord, asked: Preemption) -> str:
    parts = [f"preemption {asked.mode.value if asked.mode else 'unknown'}"]
    parts += [f"GraceTime={_text(asked.grace)}"] if asked.grace else []
    parts += [f"MaxWall={_text(record.max_wall)}"] if record.max_wall else []
    return " ".join(parts)


def _text(value: object) -> str:
    if isinstance(value, timedelta):
        # As people write a grace time.
        short = value <= timedelta(minutes=5) and not value.microseconds
        return f"{value.seconds}s" if short else format_duration(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value) if isinstance(value, Enum) else str(value)
