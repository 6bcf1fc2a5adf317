"""What a site's facts mean for a job: what it refuses, what it wants, what is worth knowing.  Pure.

Errors are what the site's own rules refuse.  What Slurm itself would refuse, by limits that may
have changed since somebody wrote them down, is a warning: Slurm has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from slurm_forge.site.fields import wholly
from slurm_forge.site.model import PartitionFacts, Site
from slurm_forge.site.parts import AccountRule, GpuRequest, OptionRule
from slurm_forge.slurm.sbatch_words import long_name, value_of
from slurm_forge.units import format_memory, words_for_duration

__all__ = [
    "Asked",
    "Finding",
    "Severity",
    "features_of",
    "findings",
    "longest_run",
    "refused",
    "refuses",
]


class Severity(str, Enum):
    """How bad a finding is."""

    #: Nothing is submitted.
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about a job at a site.

    ``option`` is the sbatch option that it is about (its long name, or None), by which the caller
    finds the key of the job file; ``advice`` is what to do, empty where the message says it.
    """

    severity: Severity
    message: str
    option: str | None = None
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a job asks for.  ``gpus`` are those of each node, None where it asks for none.

    ``options`` are the lines that sbatch is given; ``cpus`` those of a node, None where the job
    does not say; ``memory`` is that of a node in bytes, 0 all of it.  ``machine`` is the
    architecture that the ranks' interpreter is for.
    """

    options: Sequence[str] = ()
    partitions: Sequence[str | None] = (None,)
    qos: str | None = None
    account: str | None = None
    constraint: str | None = None
    nodes: int = 1
    gpus: int | None = None
    cpus: int | None = None
    memory: int | None = None
    time: timedelta | None = None
    machine: str | None = None
    #: What is to run the job's container, where it has one and says so.
    runtime: str | None = None
    #: Whether its attempts are tasks of one array, of which the next starts by itself.
    chained: bool = False


def findings(asked: Asked, site: Site) -> tuple[Finding, ...]:
    """Everything that the site's facts say about this job, errors first; each sentence once."""
    found = [*_options(asked, site), *_accounts(asked, site)]
    for partition in asked.partitions or (None,):
        facts = site.facts(partition, asked.qos)
        place = _place(site, partition, asked.qos)
        found += [*_limits(asked, facts, place), *_gpus(asked, site, facts, place)]
    found += _site_wide(asked, site)
    once: dict[str, Finding] = {}
    for each in found:
        once.setdefault(each.message, each)
    order = list(Severity)
    return tuple(sorted(once.values(), key=lambda each: order.index(each.severity)))


def refused(options: Iterable[str], site: Site) -> Finding | None:
    """The first option that the site rejects, or requires and does not get."""
    found = _options(Asked(options=tuple(options)), site)
    return next((each for each in found if each.severity is Severity.ERROR), None)


def refuses(site: Site, option: str) -> bool:
    """Whether the site rejects an option, whatever its value."""
    return any(_is(option, rule) for rule in site.rejected_options)


def longest_run(facts: PartitionFacts, nodes: int) -> timedelta | None:
    """The longest run of a job of so many nodes; None where that is not known."""
    by_size = [
        limit.max_time
        for limit in sorted(facts.max_time_by_nodes, key=lambda limit: limit.min_nodes)
        if nodes >= limit.min_nodes and limit.max_time is not None
    ]
    limits = [limit for limit in (facts.max_time, *by_size[-1:]) if limit is not None]
    return min(limits, default=None)


def features_of(constraint: str | None) -> frozenset[str]:
    """The features that a ``--constraint`` names, whatever it says of how they go together."""
    words = re.split(r"[&|,()\[\]]|\*[0-9]+", constraint or "")
    return frozenset(word.strip() for word in words if word.strip())


def _options(asked: Asked, site: Site) -> Iterator[Finding]:
    for rule in site.rejected_options:
        for line in asked.options:
            if _is(line, rule):
                yield Finding(
                    severity=Severity.ERROR,
                    message=f"{site.name} refuses the option {_with_why(rule)}",
                    option=long_name(rule.option),
                    advice=f"Leave it out; the rules here: slurm-forge sites show {site.name}",
                )
    for rule in site.required_options:
        if not any(_is(line, rule) for line in asked.options):
            yield Finding(
                severity=Severity.ERROR,
                message=f"{site.name} requires the option {_with_why(rule)}",
                option=long_name(rule.option),
                advice=f"Add it; the rules here: slurm-forge sites show {site.name}",
            )
    for rule in site.discouraged_options:
        if any(_is(line, rule) for line in asked.options):
            yield Finding(
                severity=Severity.WARNING,
                message=f"{site.name} advises against the option {_with_why(rule)}.",
                option=long_name(rule.option),
            )


def _is(line: str, rule: OptionRule) -> bool:
    """Whether an option is the one of a rule; a rule with a value means that value alone."""
    wanted = value_of(rule.option)
    return long_name(line) == long_name(rule.option) and wanted in (None, value_of(line))


def _with_why(rule: OptionRule) -> str:
    return rule.option if rule.why is None else f"{rule.option}: {rule.why.rstrip('.')}"


def _accounts(asked: Asked, site: Site) -> Iterator[Finding]:
    if asked.account is None:
        if site.account_required:
            such = "" if site.account_example is None else f", such as {site.account_example}"
            yield Finding(
                severity=Severity.WARNING,
                message=f"{site.name} wants an account (resources.account){such}.",
                option="account",
            )
        return
    for rule in site.accounts:
        fits = any(wholly(pattern).fullmatch(asked.account) for pattern in rule.accounts)
        goes = _goes_with(asked, rule)
        such = " or ".join(rule.accounts)
        why = "" if rule.why is None else f" ({rule.why.rstrip('.')})"
        if goes and not fits:
            yield Finding(
                severity=Severity.ERROR,
                message=f"{site.name}: with {goes} goes an account like {such}, and the job names "
                f"{asked.account}{why}",
                option="account",
                advice="Name the account for these GPUs, or ask for those that it pays for.",
            )
        elif fits and not goes and rule.both_ways:
            wanted = [
                *(f"constraint: {each}" for each in rule.constraint),
                *(f"partition: {each}" for each in rule.partitions),
            ]
            yield Finding(
                severity=Severity.ERROR,
                message=f"{site.name}: the account {asked.account} goes with "
                f"{' or '.join(wanted)}, and the job does not ask for that{why}",
                option="constraint",
                advice="Add it, or name the account for the GPUs that the job asks for.",
            )


def _goes_with(asked: Asked, rule: AccountRule) -> str | None:
    """What of the rule the job asks for."""
    features = features_of(asked.constraint)
    for feature in rule.constraint:
        if feature in features or feature == asked.constraint:
            return f"constraint {feature}"
    for partition in rule.partitions:
        if partition in asked.partitions:
            return f"partition {partition}"
    return None


def _limits(asked: Asked, facts: PartitionFacts, place: str) -> Iterator[Finding]:
    longest = longest_run(facts, asked.nodes)
    never = "Slurm will refuse it or never start it."
    if asked.time is not None and longest is not None and asked.time > longest:
        size = f" for {asked.nodes} nodes" if facts.max_time_by_nodes else ""
        yield _warning(
            f"{place} allows {words_for_duration(longest)} at most{size} and the job asks for "
            f"{words_for_duration(asked.time)}: {never}",
            "time",
        )
    if asked.time is None and facts.default_time is not None:
        yield _warning(
            f"{place} gives a job that asks for no time limit "
            f"{words_for_duration(facts.default_time)} (resources.time).",
            "time",
        )
    if facts.max_nodes is not None and asked.nodes > facts.max_nodes:
        yield _warning(
            f"{place} allows {facts.max_nodes} nodes at most and the job asks for {asked.nodes}: "
            f"{never}",
            "nodes",
        )
    if facts.constraint is not None and facts.constraint != asked.constraint:
        missing = features_of(facts.constraint) - features_of(asked.constraint)
        if missing:
            yield _warning(
                f"{place} is asked for with a constraint: add resources.constraint: "
                f"{facts.constraint}.",
                "constraint",
            )
    if facts.self_requeue_allowed is False and not asked.chained:
        yield _warning(
            f"{place} does not let jobs requeue themselves: where the run would, it is held, "
            "and goes on with slurm-forge requeue (template: array needs no requeue).",
            None,
        )


def _gpus(asked: Asked, site: Site, facts: PartitionFacts, place: str) -> Iterator[Finding]:
    there, gpus = facts.gpus_per_node, asked.gpus
    if gpus is None:
        if facts.gpus_required:
            yield _warning(
                f"{place} turns jobs without GPUs away (resources.gpus_per_node).", "gpus-per-node"
            )
    elif there is not None and gpus > there:
        told = (
            f"{place} has {_count(there, 'GPU')} per node and the job asks for {gpus}"
            if there
            else f"{place} has no GPUs and the job asks for {gpus}"
        )
        if site.gpu_request is GpuRequest.NONE:
            # Slurm is not told of them, and so can't refuse them.
            yield Finding(
                severity=Severity.ERROR,
                message=told,
                option="gpus-per-node",
                advice="Ask for more nodes, or for another partition.",
            )
        else:
            yield _warning(f"{told}: Slurm will refuse it or never start it.", "gpus-per-node")
    total = asked.nodes * (gpus or 0)
    if facts.max_gpus_per_job is not None and total > facts.max_gpus_per_job:
        yield _warning(
            f"{place} allows {_count(facts.max_gpus_per_job, 'GPU')} per job and the job asks for "
            f"{total}: Slurm will refuse it or never start it.",
            "gpus-per-node",
        )
    if facts.exclusive_nodes and there and (gpus or 0) < there and site.gpu_request:
        yield _warning(
            f"{place} gives whole nodes: {there} GPUs are charged per node and the job asks for "
            f"{gpus or 'none'}.",
            "gpus-per-node",
        )
    yield from _shares(asked, facts, place)


def _shares(asked: Asked, facts: PartitionFacts, place: str) -> Iterator[Finding]:
    """What goes with each GPU; of whole nodes all is the job's anyway."""
    if not asked.gpus or facts.exclusive_nodes:
        return
    if facts.cpus_per_gpu is not None:
        most = asked.gpus * facts.cpus_per_gpu
        if asked.cpus is None:
            yield Finding(
                severity=Severity.NOTE,
                message=f"{place}: {facts.cpus_per_gpu} CPUs go with each GPU, and the job does "
                "not say how many it wants (resources.cpus_per_task).",
                option="cpus-per-task",
            )
        elif asked.cpus > most:
            yield _warning(
                f"{place}: {facts.cpus_per_gpu} CPUs go with each GPU, so {most} with those of a "
                f"node, and the job asks for {asked.cpus}.",
                "cpus-per-task",
            )
    if facts.memory_per_gpu is not None and asked.memory is not None:
        share = asked.gpus * facts.memory_per_gpu
        if asked.memory > share:
            yield _warning(
                f"{place}: {format_memory(facts.memory_per_gpu)} of memory go with each GPU, so "
                f"{format_memory(share)} with those of a node, and the job asks for "
                f"{format_memory(asked.memory)}.",
                "mem",
            )


def _site_wide(asked: Asked, site: Site) -> Iterator[Finding]:
    if site.default_qos is not None and asked.qos is None:
        yield Finding(
            severity=Severity.NOTE,
            message=f"{site.name}: a job that names no QOS gets {site.default_qos}.",
            option="qos",
        )
    if site.internet_on_compute_nodes is False:
        yield Finding(
            severity=Severity.NOTE,
            message=f"{site.name}: compute nodes can't reach the internet; download before, and "
            "let trackers work offline.",
        )
    has = [each.runtime.value for each in site.containers]
    if asked.runtime is not None and has and asked.runtime not in has:
        yield _warning(
            f"{site.name} runs containers with {' or '.join(has)} and the job asks for "
            f"{asked.runtime} (container.runtime).",
            None,
        )
    wanted = None if site.architecture is None else site.architecture.value
    if wanted is not None and asked.machine is not None and asked.machine != wanted:
        yield _warning(
            f"{site.name}: the compute nodes are {wanted} and this machine is {asked.machine}: "
            "the ranks' Python has to be one of theirs.",
            None,
        )


def _warning(message: str, option: str | None) -> Finding:
    return Finding(severity=Severity.WARNING, message=message, option=option)


def _place(site: Site, partition: str | None, qos: str | None) -> str:
    parts = [site.name]
    if partition:
        parts.append(f"partition {partition}")
    if qos:
        parts.append(f"QOS {qos}")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
