"""What is wrong with a site file beyond its form: facts without sources, guesses, contradictions.

Pure: the file is read by the caller, and the day is handed in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta

from slurm_forge.documents import Document, KeyPath, nearest
from slurm_forge.documents.keypath import dotted
from slurm_forge.site.model import PartitionFacts, Preemption, PreemptionMode, Site
from slurm_forge.site.parts import GpuOption, OptionRule
from slurm_forge.site.variables import GLOO_INTERFACE, NCCL_INTERFACE
from slurm_forge.slurm.sbatch_words import LONG_OPTIONS, PLUGIN_OPTIONS, long_name, value_of
from slurm_forge.units import format_duration

#: Who has not looked for so long should look again.
_STALE = timedelta(days=2 * 365)
#: Longest values that make sense; beyond them somebody has mistaken the unit.
_LONGEST = {
    "grace": timedelta(days=1),
    "exempt": timedelta(days=30),
    "max_time": timedelta(days=366),
    "default_time": timedelta(days=366),
    "requeue_delay": timedelta(days=1),
    "purge_after": timedelta(days=5 * 366),
}
#: nccl-tests prints about 900 GB/s inside the fastest nodes there are.
_FASTEST = 20e12
_GUESSES = re.compile(
    r"\b(i (?:think|believe|guess)|probably|presumably|perhaps|maybe|todo|fixme|tbd|not sure)\b",
    re.IGNORECASE,
)
#: The options by which each way of asking for GPUs asks.
_GPU_OPTIONS = {
    GpuOption.GPUS_PER_NODE: "gpus-per-node",
    GpuOption.GPUS_PER_TASK: "gpus-per-task",
    GpuOption.GPUS: "gpus",
    GpuOption.GRES: "gres",
}
#: Keys that hold no facts about the cluster.
_ABOUT_THE_FILE = frozenset(
    {"name", "title", "contact", "confidence", "sources", "checked", "cluster_names", "detect"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRemark:
    """One thing about a file.  ``mistake``: the file should not be used like that."""

    key: KeyPath
    message: str
    mistake: bool = True

    def at(self, document: Document) -> tuple[int | None, str]:
        """Line and text."""
        message = f"{dotted(self.key)}: {self.message}" if self.key else self.message
        return document.line_of(self.key), message


def check_site(site: Site, today: date) -> tuple[SiteRemark, ...]:
    """Everything that is wrong with one file, or could be better."""
    return (
        *_provenance(site, today),
        *_preemption(("preemption_default",), site.preemption_default),
        *_everywhere(site),
        *_options(site),
        *_storage(site),
        *_network(site),
        *_too_long(("requeue_delay",), "requeue_delay", site.requeue_delay),
        *_guesses(site),
    )


def check_together(sites: Mapping[str, Site]) -> tuple[tuple[str, SiteRemark], ...]:
    """What files say against each other: the file, and what is wrong with it.

    ``sites`` are by file, in the order in which they are looked into.
    """
    remarks: list[tuple[str, SiteRemark]] = []
    claimed: dict[tuple[str, str], str] = {}
    for file, site in sites.items():
        for key, kind, value in _claims(site):
            other = claimed.setdefault((kind, value), file)
            if other != file:
                text = f"{other} claims {kind} {value}, too: only one of them would be found"
                remarks.append((file, SiteRemark(key=key, message=text)))
    return tuple(remarks)


def _claims(site: Site) -> Iterator[tuple[KeyPath, str, str]]:
    for index, name in enumerate(site.cluster_names):
        yield ("cluster_names", index), "ClusterName", name
    for variable, values in site.detect.variables.items():
        for value in values:
            yield ("detect", "variables", variable), "the variable", f"{variable}={value}"
    for index, host in enumerate(site.detect.hosts):
        yield ("detect", "hosts", index), "the host", host.lower()


def _provenance(site: Site, today: date) -> Iterator[SiteRemark]:
    if not site.model_dump(exclude=set(_ABOUT_THE_FILE), exclude_defaults=True):
        return  # it says nothing, and so needs to show nothing for it
    if not site.sources:
        yield SiteRemark(
            key=("sources",), message="facts without sources; say where they come from"
        )
    for index, source in enumerate(site.sources):
        if source.dated is None and source.seen is None:
            yield SiteRemark(
                key=("sources", index),
                message="without a date; write dated (the page's own) or seen (when you read it)",
            )
        for key, day in (("dated", source.dated), ("seen", source.seen)):
            if day is not None and _first_day(day) > today:
                yield SiteRemark(key=("sources", index, key), message=f"{day} is in the future")
    if site.contact is None:
        yield SiteRemark(
            key=("contact",), message="no contact; give the centre's help page or mail address"
        )
    if site.confidence is None:
        yield SiteRemark(
            key=("confidence",),
            message="missing; write tried, official, official_excerpt or community",
        )
    if site.checked is None:
        yield SiteRemark(
            key=("checked",),
            message='not said when the facts were last compared with the sources ("2026-11")',
        )
    elif _first_day(site.checked) > today:
        yield SiteRemark(key=("checked",), message=f"{site.checked} is in the future")
    elif today - _first_day(site.checked) > _STALE:
        yield SiteRemark(
            key=("checked",),
            message=f"{site.checked} is more than two years ago; compare the facts again",
            mistake=False,
        )
    if not (site.cluster_names or site.detect.variables or site.detect.hosts):
        yield SiteRemark(
            key=("cluster_names",),
            message="nothing here identifies this cluster, so it is only used with --site",
            mistake=False,
        )


def _first_day(day: str) -> date:
    year, month, *rest = map(int, day.split("-"))
    return date(year, month, rest[0] if rest else 1)


def _preemption(key: KeyPath, known: Preemption) -> Iterator[SiteRemark]:
    for name, value in (("grace", known.grace), ("exempt", known.exempt)):
        if value is None:
            continue
        if known.mode is None:
            yield SiteRemark(
                key=(*key, name),
                message="without a mode it is a guess; say what happens to the job, or null",
            )
        elif known.mode is PreemptionMode.OFF:
            yield SiteRemark(key=(*key, name), message='with mode: "OFF" nothing is preempted')
        yield from _too_long((*key, name), name, value)
    if known.mode is PreemptionMode.SUSPEND and known.grace:
        yield SiteRemark(key=(*key, "grace"), message="Slurm suspends without any notice")


def _everywhere(site: Site) -> Iterator[SiteRemark]:
    yield from _partition(("everywhere",), site.everywhere)
    if site.everywhere.preemption != Preemption():
        yield SiteRemark(key=("everywhere", "preemption"), message="write it in preemption_default")
    for kind, known in (("partitions", site.partitions), ("qos", site.qos)):
        for name, facts in known.items():
            yield from _partition((kind, name), facts)
    for name, cluster in site.clusters.items():
        yield from _partition(("clusters", name, "everywhere"), cluster.everywhere)
    values_seen = {value for values in site.detect.variables.values() for value in values}
    for name in site.clusters:
        if name not in values_seen and name not in site.cluster_names:
            yield SiteRemark(
                key=("clusters", name),
                message="neither cluster_names nor detect.variables holds this name",
            )
    if site.default_qos is not None and site.default_qos not in site.qos:
        close = nearest(site.default_qos, site.qos)
        hint = "" if close is None else f' (did you mean "{close}"?)'
        yield SiteRemark(key=("default_qos",), message=f"qos does not have it{hint}")


def _partition(key: KeyPath, facts: PartitionFacts) -> Iterator[SiteRemark]:
    yield from _preemption((*key, "preemption"), facts.preemption)
    yield from _too_long((*key, "max_time"), "max_time", facts.max_time)
    yield from _too_long((*key, "default_time"), "default_time", facts.default_time)
    if facts.max_time and facts.default_time and facts.default_time > facts.max_time:
        yield SiteRemark(key=(*key, "default_time"), message="longer than max_time")
    sizes = [limit.min_nodes for limit in facts.max_time_by_nodes]
    for index, limit in enumerate(facts.max_time_by_nodes):
        here = (*key, "max_time_by_nodes", index)
        if limit.max_time is None:
            yield SiteRemark(key=here, message="has no max_time")
        yield from _too_long((*here, "max_time"), "max_time", limit.max_time)
        if index and sizes[index] <= sizes[index - 1]:
            yield SiteRemark(
                key=(*here, "min_nodes"),
                message=f"{sizes[index]} after {sizes[index - 1]}; begin with the smallest jobs",
            )
    bandwidth = facts.expected_bandwidth
    if bandwidth is not None and bandwidth > _FASTEST:
        yield SiteRemark(
            key=(*key, "expected_bandwidth"),
            message="faster than any network; give nccl-tests' busbw, per rank",
        )


def _too_long(key: KeyPath, kind: str, value: timedelta | None) -> Iterator[SiteRemark]:
    if value is not None and value > _LONGEST[kind]:
        yield SiteRemark(
            key=key,
            message=f"{format_duration(value)} is longer than makes sense "
            f"({format_duration(_LONGEST[kind])} at most); is the unit right?",
        )


def _options(site: Site) -> Iterator[SiteRemark]:
    rules: dict[str, Iterable[OptionRule]] = {
        "rejected_options": site.rejected_options,
        "required_options": site.required_options,
        "discouraged_options": site.discouraged_options,
    }
    rejected = {long_name(rule.option) for rule in site.rejected_options if _any_value(rule)}
    for key, option_rules in rules.items():
        names: set[str] = set()
        for index, rule in enumerate(option_rules):
            name = long_name(rule.option)
            if rule.option in names:
                yield SiteRemark(key=(key, index), message=f"{rule.option} is already in the list")
            names.add(rule.option)
            if key != "rejected_options" and name in rejected:
                yield SiteRemark(
                    key=(key, index), message=f"{rule.option} is one of rejected_options, too"
                )
            yield from _known_option((key, index), rule.option)
    for index, option in enumerate(site.sbatch_options):
        yield from _known_option(("sbatch_options", index), option)
        if long_name(option) in rejected:
            yield SiteRemark(
                key=("sbatch_options", index), message=f"{option} is one of rejected_options, too"
            )
        if not option.startswith("--"):
            yield SiteRemark(
                key=("sbatch_options", index),
                message=f"write the long name: --{long_name(option)}",
            )
    wanted = _GPU_OPTIONS.get(site.gpu_request) if site.gpu_request else None
    if wanted in rejected:
        yield SiteRemark(key=("gpu_request",), message=f"--{wanted} is one of rejected_options")


def _any_value(rule: OptionRule) -> bool:
    return value_of(rule.option) is None


def _known_option(key: KeyPath, option: str) -> Iterator[SiteRemark]:
    name = long_name(option)
    if name in LONG_OPTIONS | PLUGIN_OPTIONS:
        return
    close = nearest(name, LONG_OPTIONS)
    hint = "" if close is None else f' (did you mean "--{close}"?)'
    # Plugins of a site add options of their own; one that looks like sbatch's is a slip.
    yield SiteRemark(
        key=key, message=f"sbatch itself has no --{name}{hint}", mistake=close is not None
    )


def _storage(site: Site) -> Iterator[SiteRemark]:
    for index, storage in enumerate(site.storage):
        here = ("storage", index)
        if storage.path is None and storage.env is None:
            yield SiteRemark(key=here, message="has neither path nor env")
        if storage.purge_after is not None:
            yield from _too_long((*here, "purge_after"), "purge_after", storage.purge_after)
            if storage.purge_after < timedelta(days=1):
                yield SiteRemark(
                    key=(*here, "purge_after"), message="less than a day; is the unit right?"
                )
            if storage.purge_basis is None:
                yield SiteRemark(
                    key=(*here, "purge_after"),
                    message="without purge_basis: say what the age counts from (atime, content …)",
                )


def _network(site: Site) -> Iterator[SiteRemark]:
    always = site.env.always
    interface = always.get(NCCL_INTERFACE)
    if interface is not None:
        yield SiteRemark(
            key=("env", "always", NCCL_INTERFACE),
            message="write it as socket_interface, from which gloo and our own channel have it",
        )
    other = always.get(GLOO_INTERFACE)
    if other is not None and any(sign in other for sign in "^=*"):
        yield SiteRemark(
            key=("env", "always", GLOO_INTERFACE), message="gloo takes whole names only, no ^ or ="
        )
    bandwidth = site.expected_bandwidth
    if bandwidth is not None and bandwidth > _FASTEST:
        yield SiteRemark(
            key=("expected_bandwidth",),
            message="faster than any network; give nccl-tests' busbw, per rank",
        )


def _guesses(site: Site) -> Iterator[SiteRemark]:
    for key, text in _texts(site.model_dump(mode="json"), ()):
        match = _GUESSES.search(text)
        if match is not None:
            yield SiteRemark(
                key=key, message=f'"{match[0]}" is a guess; find it out, or leave it null'
            )


def _texts(value: object, key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, (*key, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*key, index))
    elif isinstance(value, str) and key[-1] not in ("page", "option"):
        yield key, value
