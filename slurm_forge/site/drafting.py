"""A site file for this cluster, from what Slurm says of itself.  Pure: a survey into a text.

What Slurm can't tell is left null, with a comment that says how to find it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

from slurm_forge.documents.writing import is_plain_text
from slurm_forge.site.loading import GENERIC
from slurm_forge.site.model import PartitionFacts, Preemption, PreemptionMode, Site
from slurm_forge.site.parts import Architecture
from slurm_forge.site.preemption import (
    goes_by_qos,
    preemption_of,
    preemption_of_qos,
    preemption_rules,
)
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.slurm.survey import Survey
from slurm_forge.units import format_duration

#: As site files allow (``site.fields``); other names are told in a comment.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
#: What ``sites check`` takes for a slip of the unit.
_LONGEST_TIME = timedelta(days=366)
_LONGEST_NOTICE = timedelta(days=1)
_LONGEST_EXEMPT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Draft:
    """The text of a site file, and the name of the site: the file's, too, without ``.yaml``."""

    name: str
    text: str


def draft_site(survey: Survey, today: date, *, name: str | None = None) -> Draft | None:
    """The file, its site called ``name`` or like the cluster; None where Slurm did not answer."""
    config, site = survey.config, site_in_slurm(survey)
    if config is None or site is None or config.cluster_name is None:
        return None
    name = _file_name(config.cluster_name if name is None else name)
    return Draft(name, "\n".join(_lines(name, config, survey, site, today)) + "\n")


def site_in_slurm(survey: Survey) -> Site | None:
    """The cluster as Slurm describes it; None where Slurm did not answer.

    Names are Slurm's own, also those that no site file can hold.
    """
    config = survey.config
    if config is None:
        return None
    names = tuple(filter(None, (config.cluster_name,)))
    partitions, all_qos = survey.partitions or (), survey.qos or ()
    machine = survey.architecture
    return Site(name="slurm").model_copy(
        update={
            "requeue_delay": config.requeue_delay,
            "cluster_names": names,
            "partitions": {each.name: _partition(each, config, survey) for each in partitions},
            "qos": {
                each.name: PartitionFacts(
                    preemption=preemption_of_qos(each, all_qos, config), max_time=each.max_wall
                )
                for each in all_qos
            },
            "architecture": next((each for each in Architecture if each.value == machine), None),
        }
    )


def _partition(record: PartitionRecord, config: ConfigRecord, survey: Survey) -> PartitionFacts:
    rules = preemption_rules(config, record, survey.partitions or (), None, survey.qos)
    # Whatever Slurm's word is, nobody preempts where nobody stands above.
    off = Preemption(mode=PreemptionMode.OFF)
    limit = next((each.max_wall for each in survey.qos or () if each.name == record.qos), None)
    longest = min((each for each in (record.max_time, limit) if each), default=None)
    default = record.default_time
    groups = [each for each in survey.nodes or () if each.partition == record.name]
    kinds = {gpu.kind for group in groups for gpu in group.gpus if gpu.kind is not None}
    counts = {sum(gpu.count for gpu in group.gpus) for group in groups}
    return PartitionFacts().model_copy(
        update={
            "preemption": off if rules.preemptable is False else rules.preemption,
            "max_time": longest,
            "default_time": default if default and default <= (longest or default) else None,
            "max_nodes": record.max_nodes or None,
            "gpu": _plain(kinds.pop()) if len(kinds) == 1 else None,
            # Nothing can be said of a partition whose nodes differ.
            "gpus_per_node": counts.pop() if len(counts) == 1 else None,
            "exclusive_nodes": record.exclusive or None,
        }
    )


def features_of(survey: Survey, partition: str | None = None) -> set[str]:
    """The features of the nodes of a partition, or of all."""
    groups = [each for each in survey.nodes or () if partition in (None, each.partition)]
    return {feature for group in groups for feature in group.features}


def _file_name(cluster: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", cluster).lstrip("-")[:64] or "cluster"
    # A file of the user's comes first, and ``generic`` is what other clusters fall back on.
    return name if _FILE_NAME.fullmatch(name) and name != GENERIC else "cluster"


def _lines(
    name: str, config: ConfigRecord, survey: Survey, site: Site, today: date
) -> Iterator[str]:
    cluster = config.cluster_name or ""
    version = config.version or "unknown version"
    commands = ["scontrol show config", "scontrol show partition"]
    commands += ["sinfo"] if survey.nodes is not None else []
    commands += ["sacctmgr show qos"] if survey.qos else []
    yield "# yaml-language-server: $schema=./site.schema.json"
    yield "#"
    yield f"# What Slurm ({_comment(version)}) said of itself on {today}, written by"
    yield '# `slurm-forge sites detect`.  null is "unknown": fill in what you know, from the'
    yield "# centre's own pages (all keys: docs/reference/site-file.md), then `sites check` it."
    yield "# For an editor: `slurm-forge sites schema > site.schema.json`, beside this file."
    yield ""
    yield f"name: {_key(name)}"
    yield f"title: {_quoted(f'{cluster}, as its Slurm describes it')}"
    known = _NAME.fullmatch(cluster) is not None
    yield f"cluster_names: [{_key(cluster) if known else ''}]"
    yield f"contact: {_quoted(f'{survey.user[:64]}, who ran sites detect')}"
    yield "confidence: tried"
    yield "sources:"
    yield f'  - {{page: {_quoted("; ".join(commands) + f" (Slurm {version})")}, seen: "{today}"}}'
    yield f'checked: "{today}"'
    yield ""
    yield from _partitions(config, survey, site)
    yield from _qos(survey, site)
    yield from _rest(config, survey, site)


def _partitions(config: ConfigRecord, survey: Survey, site: Site) -> Iterator[str]:
    if survey.partitions is None:
        yield "partitions: {}                    # could not be asked"
        return
    if goes_by_qos(config):
        yield "# Preemption goes by QOS here (PreemptType=preempt/qos): see below."
    yield "partitions:" if any(map(_NAME.fullmatch, site.partitions)) else "partitions: {}"
    for record in survey.partitions:
        if not _NAME.fullmatch(record.name):
            yield f"  # left out because of its name: {_comment(record.name)}"
            continue
        facts = site.partitions[record.name]
        off = PreemptionMode.OFF
        if facts.preemption.mode is off and preemption_of(record, config).mode is not off:
            yield (
                f"  # {record.name}: PreemptMode={_comment(record.preempt_mode or '')}, but no "
                "partition of a higher tier shares its nodes."
            )
        yield f"  {_key(record.name)}: {facts_text(_plausible(facts))}"
        if features := sorted(features_of(survey, record.name)):
            shown = ", ".join(map(_comment, features[:12]))
            yield f"  # features of its nodes, for --constraint: {shown}"


def _qos(survey: Survey, site: Site) -> Iterator[str]:
    known = {name: _plausible(facts) for name, facts in site.qos.items() if _NAME.fullmatch(name)}
    known = {name: facts for name, facts in known.items() if facts != PartitionFacts()}
    if not known:
        why = "could not be asked" if survey.qos is None else "nothing that matters to a run"
        yield f"qos: {{}}                           # {why}"
        return
    yield "qos:"
    for name, facts in known.items():
        yield f"  {_key(name)}: {facts_text(facts)}"


def _plausible(facts: PartitionFacts) -> PartitionFacts:
    """Without durations that ``sites check`` rejects, such as 68 years for "no limit"."""
    preemption = facts.preemption.model_copy(
        update={
            "grace": _at_most(facts.preemption.grace, _LONGEST_NOTICE),
            "exempt": _at_most(facts.preemption.exempt, _LONGEST_EXEMPT),
        }
    )
    return facts.model_copy(
        update={
            "preemption": preemption,
            "max_time": _at_most(facts.max_time, _LONGEST_TIME),
            "default_time": _at_most(facts.default_time, _LONGEST_TIME),
        }
    )


def _at_most(value: timedelta | None, longest: timedelta) -> timedelta | None:
    return None if value is None or value > longest else value


def _rest(config: ConfigRecord, survey: Survey, site: Site) -> Iterator[str]:
    yield ""
    delay = _at_most(site.requeue_delay, _LONGEST_NOTICE)
    yield f"requeue_delay: {_quoted(format_duration(delay)) if delay else 'null'}"
    yield "self_requeue_allowed: null        # false where jobs must not requeue themselves"
    request, why = _gpu_request(config, survey)
    yield f"gpu_request: {request:<21}# {why}"
    enforced = "associations" in config.accounting_storage_enforce
    yield f"account_required: null            # {_account(survey, enforced=enforced)}"
    if config.job_submit_plugins:
        plugins = ", ".join(_comment(each) for each in config.job_submit_plugins)
        yield f"# A plugin may change or refuse jobs here: JobSubmitPlugins={plugins}."
    yield f"architecture: {site.architecture.value if site.architecture else 'null'}"
    yield "socket_interface: null            # the fast network's, on a compute node: ip address"
    yield "internet_on_compute_nodes: null   # slurm-forge doctor --live finds it out"
    yield 'storage: []                       # - {role: scratch, env: SCRATCH, purge_after: "90d"}'


def _gpu_request(config: ConfigRecord, survey: Survey) -> tuple[str, str]:
    """How GPUs are asked for, where that is sure, and why."""
    if survey.nodes is None:
        return "null", "sinfo could not be asked"
    if not any(group.gpus for group in survey.nodes):
        return "null", "no node shows GPUs (Gres); where partitions imply them, write none"
    if config.job_submit_plugins:
        return (
            "null",
            "a job submit plugin decides: gpus_per_node or gres?",
        )
    if config.select_type == "select/cons_tres":
        return "gpus_per_node", "Gres=gpu and select/cons_tres: --gpus-per-node is understood"
    return "gres", f"{_comment(config.select_type or 'this scheduler')} knows --gres only"


def _account(survey: Survey, *, enforced: bool) -> str:
    if not enforced:
        return "jobs without an association are taken (AccountingStorageEnforce)"
    if survey.default_account is None:
        return "accounts are enforced, and you have no default"
    return f"accounts are enforced; yours by default: {_comment(survey.default_account)}"


def facts_text(facts: PartitionFacts) -> str:
    """Facts as a site file has them, in one line."""
    return _flow(facts.model_dump(mode="json", exclude_defaults=True))


def _flow(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _key(text: str) -> str:
    return text if is_plain_text(text) else _quoted(text)


def _quoted(text: str) -> str:
    # A double-quoted JSON string of printable text means the same to every reader of YAML.
    return json.dumps(_plain(text), ensure_ascii=False)


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)[:100]


def _comment(text: str) -> str:
    """Foreign text behind a ``#``: it can't end the line."""
    return _plain(" ".join(text.split()))
