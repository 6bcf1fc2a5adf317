"""A site file compared with what Slurm says: what differs, with the file's line and Slurm's word.

Pure.  Only what both say is compared: what is unknown to one of them is no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from slurm_forge.documents import KeyPath
from slurm_forge.site.drafting import facts_text, features_of, site_in_slurm
from slurm_forge.site.loading import LoadedSite
from slurm_forge.site.model import PartitionFacts, PreemptionMode, Site
from slurm_forge.site.origins import unknown_keys
from slurm_forge.slurm.survey import Survey
from slurm_forge.units import format_duration

#: The command that lists a kind of place, Slurm's answer where one is missing, and Slurm's words.
_PLACES = {
    "partitions": (
        "scontrol show partition",
        "Slurm has no partition",
        {"max_time": "MaxTime", "default_time": "DefaultTime", "max_nodes": "MaxNodes",
         "exclusive_nodes": "OverSubscribe=EXCLUSIVE"},
    ),
    "qos": (
        "sacctmgr show qos", "the accounting database has no QOS", {"max_time": "MaxWall"},
    ),
}  # fmt: skip
#: Slurm knows nothing of these.
_NOT_SLURMS = (
    "env", "modules", "setup", "containers", "launcher", "fabric", "backend", "socket_interface",
    "host_suffix", "master_address", "internet_on_compute_nodes", "storage", "self_requeue_allowed",
    "gpu_request", "accounts", "account_required", "rejected_options", "required_options",
    "discouraged_options", "expected_bandwidth", "clusters",
)  # fmt: skip


class SiteDifferenceKind(str, Enum):
    """How the two stand to each other."""

    DIFFERS = "differs"
    #: Only the file has it.
    NOT_IN_SLURM = "not in Slurm"
    #: Only Slurm has it.
    NOT_IN_FILE = "not in the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDifference:
    """One fact.  ``line`` is of the site file, None where it has none; texts are for people."""

    kind: SiteDifferenceKind
    key: str
    line: int | None
    in_file: str
    in_slurm: str
    #: The command that shows it.
    told_by: str

    def words(self, file: str) -> str:
        """One sentence with the place in the file."""
        place = file if self.line is None else f"{file}:{self.line}"
        match self.kind:
            case SiteDifferenceKind.DIFFERS:
                return f"{place}: {self.key} says {self.in_file}, Slurm says {self.in_slurm}"
            case SiteDifferenceKind.NOT_IN_SLURM:
                return f"{place}: {self.key}: {self.in_slurm}"
            case SiteDifferenceKind.NOT_IN_FILE:
                return f"{file} has no {self.key}; Slurm says {self.in_slurm}"


def compare(loaded: LoadedSite, survey: Survey) -> tuple[SiteDifference, ...]:
    """Everything that the file says otherwise than Slurm, and what it lacks.

    Nothing is compared with what Slurm could not be asked for.
    """
    slurm = site_in_slurm(survey)
    if slurm is None:
        return ()
    lines = _Lines(loaded)
    return (
        *_cluster(lines, loaded.site, slurm),
        *_places("partitions", lines, loaded.site, slurm, _partition_facts),
        *_places("qos", lines, loaded.site, slurm, _qos_facts),
        *_top(lines, loaded.site, slurm),
        *_features(lines, loaded.site, survey),
    )


def unchecked(site: Site) -> tuple[str, ...]:
    """What the file knows and Slurm can't tell: keys at the top."""
    unknown = {*unknown_keys(site)}
    # True where nobody has said otherwise.
    return tuple(key for key in _NOT_SLURMS if key not in unknown)


class _Lines:
    """Finds the line that a fact stands on, in the file or among its defaults."""

    def __init__(self, loaded: LoadedSite) -> None:
        self._lines = loaded.document.lines
        self._cluster = loaded.cluster

    def of(self, *keys: KeyPath) -> int | None:
        """The line of the first of ``keys`` that the file has."""
        for key in keys:
            own = [("clusters", self._cluster, *key)] if self._cluster else []
            for each in (*own, key):
                if each in self._lines:
                    return self._lines[each]
        return None

    def of_place(self, kind: str, name: str, *rest: str) -> int | None:
        """The line of a fact of one partition or QOS, else of what holds everywhere."""
        default: KeyPath = ("everywhere", *rest)
        if rest[:1] == ("preemption",):
            default = ("preemption_default", *rest[1:])
        return self.of((kind, name, *rest), default, (kind, name))


def _cluster(lines: _Lines, site: Site, slurm: Site) -> Iterator[SiteDifference]:
    if site.cluster_names and not set(slurm.cluster_names) <= set(site.cluster_names):
        yield _differs(
            lines.of(("cluster_names",)),
            "cluster_names",
            ", ".join(site.cluster_names),
            slurm.cluster_names[0],
            "scontrol show config",
        )


def _places(
    kind: str,
    lines: _Lines,
    site: Site,
    slurm: Site,
    facts_in_file: Callable[[Site, str], PartitionFacts],
) -> Iterator[SiteDifference]:
    """Of all partitions, or all QOS."""
    in_file: dict[str, PartitionFacts] = getattr(site, kind)
    in_slurm: dict[str, PartitionFacts] = getattr(slurm, kind)
    if not in_slurm:
        return
    command, noun, words = _PLACES[kind]
    for name in (each for each in in_file if each not in in_slurm):
        yield SiteDifference(
            kind=SiteDifferenceKind.NOT_IN_SLURM,
            key=f"{kind}.{name}",
            line=lines.of((kind, name)),
            in_file=name,
            in_slurm=f"{noun} of that name",
            told_by=command,
        )
    for name, actual in in_slurm.items():
        for path, written, reported in _pairs(facts_in_file(site, name), actual):
            if written is not None and reported is not None and written != reported:
                word = words.get(path[-1])
                yield _differs(
                    lines.of_place(kind, name, *path),
                    ".".join((kind, name, *path)),
                    written,
                    _text(reported) + (f" ({word})" if word else ""),
                    "sinfo" if path == ("gpus_per_node",) else command,
                )
        if in_file and name not in in_file and actual != PartitionFacts():
            yield SiteDifference(
                kind=SiteDifferenceKind.NOT_IN_FILE,
                key=f"{kind}.{name}",
                line=None,
                in_file="",
                in_slurm=facts_text(actual),
                told_by=command,
            )


def _partition_facts(site: Site, name: str) -> PartitionFacts:
    """What the file says of a partition, whatever the QOS: its limits are compared by itself."""
    return site.model_copy(update={"qos": {}, "default_qos": None}).facts(name)


def _qos_facts(site: Site, name: str) -> PartitionFacts:
    facts = site.qos.get(name, PartitionFacts())
    return facts.model_copy(update={"preemption": site.preemption(None, name)})


def _pairs(
    written: PartitionFacts, reported: PartitionFacts
) -> Iterator[tuple[tuple[str, ...], object, object]]:
    """The facts of which both can say something: where they stand, and what each says."""
    mode = reported.preemption.mode
    yield ("preemption", "mode"), written.preemption.mode, mode
    if written.preemption.mode is mode and mode is not PreemptionMode.OFF:
        yield ("preemption", "grace"), written.preemption.grace, reported.preemption.grace
        # Slurm does not speak of an exempt time of zero.
        exempt = reported.preemption.exempt or timedelta(0)
        yield ("preemption", "exempt"), written.preemption.exempt, exempt
    for key in ("max_time", "default_time", "max_nodes", "gpus_per_node", "exclusive_nodes"):
        yield (key,), getattr(written, key), getattr(reported, key)


def _top(lines: _Lines, site: Site, slurm: Site) -> Iterator[SiteDifference]:
    for key, word, command in (
        ("requeue_delay", " (requeue_delay or cred_expire, and a second)", "scontrol show config"),
        ("architecture", "", "scontrol show node"),
    ):
        written, reported = getattr(site, key), getattr(slurm, key)
        if written is not None and reported is not None and written != reported:
            yield _differs(lines.of((key,)), key, written, _text(reported) + word, command)


def _features(lines: _Lines, site: Site, survey: Survey) -> Iterator[SiteDifference]:
    """Features that jobs are to ask for, and that no node has."""
    for each in survey.partitions or ():
        key = f"partitions.{each.name}.constraint"
        feature = _partition_facts(site, each.name).constraint
        line = lines.of_place("partitions", each.name, "constraint")
        there = features_of(survey, each.name)
        if survey.nodes and feature and feature.isidentifier() and feature not in there:
            yield _differs(line, key, feature, "no node there has that feature", "sinfo")
    there = features_of(survey)
    for gpu, feature in site.gpu_types.items():
        if there and feature.isidentifier() and feature not in there:
            line = lines.of(("gpu_types", gpu))
            yield _differs(line, f"gpu_types.{gpu}", feature, "no node has that feature", "sinfo")


def _differs(
    line: int | None, key: str, in_file: object, in_slurm: str, command: str
) -> SiteDifference:
    return SiteDifference(
        kind=SiteDifferenceKind.DIFFERS,
        key=key,
        line=line,
        in_file=_text(in_file),
        in_slurm=in_slurm,
        told_by=command,
    )


def _text(value: object) -> str:
    if isinstance(value, timedelta):
        # As people write a grace time.
        short = value <= timedelta(minutes=5) and not value.microseconds
        return f"{value.seconds}s" if short else format_duration(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value) if isinstance(value, Enum) else str(value)
