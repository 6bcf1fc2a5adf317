"""A site file for this cluster, from what Slurm says of itself.  Pure: a survey into a text.

What Slurm can't tell is left null, with a comment that says how to find it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

from slurm_forge.documents.scalars import is_plain_text
from slurm_forge.site.comparing import gpus_per_node
from slurm_forge.site.contract import contract_of, goes_by_qos
from slurm_forge.site.detection import GENERIC
from slurm_forge.site.model import Preemption, PreemptionMode
from slurm_forge.site.parts import Architecture
from slurm_forge.slurm.accounts import QosRecord
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.slurm.survey import Survey
from slurm_forge.units import format_duration

__all__ = ["Draft", "draft_site"]

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
    config = survey.config
    if config is None or config.cluster_name is None:
        return None
    name = _file_name(config.cluster_name if name is None else name)
    return Draft(name, "\n".join(_lines(name, config, survey, today)) + "\n")


def _file_name(cluster: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", cluster).lstrip("-")[:64] or "cluster"
    # A file of the user's comes first, and ``generic`` is what other clusters fall back on.
    return name if _FILE_NAME.fullmatch(name) and name != GENERIC else "cluster"


def _lines(name: str, config: ConfigRecord, survey: Survey, today: date) -> Iterator[str]:
    cluster = config.cluster_name or ""
    version = config.version or "unknown version"
    asked = ["scontrol show config", "scontrol show partition"]
    asked += ["sinfo"] if survey.nodes is not None else []
    asked += ["sacctmgr show qos"] if survey.qos else []
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
    yield f'  - {{page: {_quoted("; ".join(asked) + f" (Slurm {version})")}, seen: "{today}"}}'
    yield f'checked: "{today}"'
    yield ""
    yield from _partitions(config, survey)
    yield from _qos(config, survey)
    yield from _rest(config, survey)


def _partitions(config: ConfigRecord, survey: Survey) -> Iterator[str]:
    if survey.partitions is None:
        yield "partitions: {}                    # could not be asked"
        return
    if goes_by_qos(config):
        yield "# Preemption goes by QOS here (PreemptType=preempt/qos): see below."
    yield "partitions:" if any(_named(each) for each in survey.partitions) else "partitions: {}"
    for record in survey.partitions:
        if not _named(record):
            yield f"  # left out, for its name: {_comment(record.name)}"
            continue
        contract = contract_of(config, record, survey.partitions, None, survey.qos)
        safe = contract.above is False and contract.preemption.mode is not PreemptionMode.OFF
        found = Preemption(mode=PreemptionMode.OFF) if safe else contract.preemption
        if safe:
            yield (
                f"  # {record.name}: PreemptMode={_comment(record.preempt_mode or '')}, but no "
                "partition of a higher tier shares its nodes."
            )
        yield f"  {_key(record.name)}: {_flow(_facts(record, found, survey))}"
        features = _features(survey, record.name)
        if features:
            yield f"  # features of its nodes, for --constraint: {', '.join(features)}"


def _named(record: PartitionRecord) -> bool:
    return _NAME.fullmatch(record.name) is not None


def _facts(
    record: PartitionRecord, preemption: Preemption, survey: Survey
) -> list[tuple[str, str]]:
    told = _preemption(preemption)
    limit = {each.name: each for each in survey.qos or ()}.get(record.qos or "")
    longest = min(
        (each for each in (record.max_time, limit and limit.max_wall) if each), default=None
    )
    told += _time("max_time", longest)
    shorter = longest is None or record.default_time is None or record.default_time <= longest
    told += _time("default_time", record.default_time) if shorter else []
    if record.max_nodes:
        told.append(("max_nodes", str(record.max_nodes)))
    kinds = {
        kind.kind
        for group in survey.nodes or ()
        if group.partition == record.name
        for kind in group.gpus
        if kind.kind is not None
    }
    if len(kinds) == 1:
        told.append(("gpu", _quoted(kinds.pop())))
    count = gpus_per_node(survey, record.name)
    if count is not None:
        told.append(("gpus_per_node", str(count)))
    if record.exclusive:
        told.append(("exclusive_nodes", "true"))
    return told


def _qos(config: ConfigRecord, survey: Survey) -> Iterator[str]:
    records = [each for each in survey.qos or () if _NAME.fullmatch(each.name)]
    told = [(each, _qos_facts(each, config, survey)) for each in records]
    told = [(each, facts) for each, facts in told if facts]
    if not told:
        why = "could not be asked" if survey.qos is None else "nothing that matters to a run"
        yield f"qos: {{}}                           # {why}"
        return
    yield "qos:"
    for each, facts in told:
        yield f"  {_key(each.name)}: {_flow(facts)}"


def _qos_facts(record: QosRecord, config: ConfigRecord, survey: Survey) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    if goes_by_qos(config):
        contract = contract_of(config, None, (), record, survey.qos)
        told += _preemption(contract.preemption)
    told += _time("max_time", record.max_wall)
    return told


def _rest(config: ConfigRecord, survey: Survey) -> Iterator[str]:
    yield ""
    delay = _quoted(format_duration(config.requeue_delay))
    yield f"requeue_delay: {delay if config.requeue_delay <= _LONGEST_NOTICE else 'null'}"
    yield "self_requeue_allowed: null        # false where jobs must not requeue themselves"
    request, why = _gpu_request(config, survey)
    yield f"gpu_request: {request:<21}# {why}"
    enforced = "associations" in config.accounting_storage_enforce
    yield f"account_required: null            # {_account(survey, enforced=enforced)}"
    if config.job_submit_plugins:
        plugins = ", ".join(_comment(each) for each in config.job_submit_plugins)
        yield f"# Rules of its own may change or refuse jobs here: JobSubmitPlugins={plugins}."
    known = {each.value for each in Architecture}
    machine = survey.architecture if survey.architecture in known else None
    yield f"architecture: {machine or 'null'}"
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
            "a plugin has rules of its own: gpus_per_node or gres?",
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


def _preemption(found: Preemption) -> list[tuple[str, str]]:
    if found.mode is None:
        return []
    told = [("mode", '"OFF"' if found.mode is PreemptionMode.OFF else found.mode.value)]
    if found.grace is not None and found.grace <= _LONGEST_NOTICE:
        told.append(("grace", _quoted(format_duration(found.grace))))
    if found.exempt is not None and found.exempt <= _LONGEST_EXEMPT:
        told.append(("exempt", _quoted(format_duration(found.exempt))))
    return [("preemption", _flow(told))]


def _time(key: str, value: timedelta | None) -> list[tuple[str, str]]:
    if not value or value > _LONGEST_TIME:
        return []
    return [(key, _quoted(format_duration(value)))]


def _features(survey: Survey, partition: str) -> list[str]:
    found = {
        feature
        for group in survey.nodes or ()
        if group.partition == partition
        for feature in group.features
    }
    return [_comment(each) for each in sorted(found)[:12]]


def _flow(pairs: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"


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
