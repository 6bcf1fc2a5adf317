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
from slurm_forge.site.parts import AccountRule, GpuOption, OptionRule
from slurm_forge.slurm.sbatch_words import long_name, value_of
from slurm_forge.units import format_memory, words_for_duration


class Severity(str, Enum):
    """How bad a finding is."""

    #: Nothing is submitted.
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFinding:
    """One thing about a job at a site.

    ``option`` is the sbatch option that it is about (its long name, or None), by which the caller
    finds the key of the job file; ``advice`` is what to do, empty where the message says it.
    """

    severity: Severity
    message: str
    option: str | None = None
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
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


def findings(request: JobRequest, site: Site) -> tuple[RuleFinding, ...]:
    """Everything that the site's facts say about this job, errors first; each sentence once."""
    results = [*_options(request, site), *_accounts(request, site)]
    for partition in request.partitions or (None,):
        facts = site.facts(partition, request.qos)
        place = _place(site, partition, request.qos)
        results += [*_limits(request, facts, place), *_gpus(request, site, facts, place)]
    results += _site_wide(request, site)
    once: dict[str, RuleFinding] = {}
    for each in results:
        once.setdefault(each.message, each)
    order = list(Severity)
    return tuple(sorted(once.values(), key=lambda each: order.index(each.severity)))


def refused(options: Iterable[str], site: Site) -> RuleFinding | None:
    """The first option that the site rejects, or requires and does not get."""
    results = _options(JobRequest(options=tuple(options)), site)
    return next((each for each in results if each.severity is Severity.ERROR), None)


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


def _options(request: JobRequest, site: Site) -> Iterator[RuleFinding]:
    for rule in site.rejected_options:
        for line in request.options:
            if _is(line, rule):
                yield RuleFinding(
                    severity=Severity.ERROR,
                    message=f"{site.name} refuses the option {_with_why(rule)}",
                    option=long_name(rule.option),
                    advice=f"Leave it out; the rules here: slurm-forge sites show {site.name}",
                )
    for rule in site.required_options:
        if not any(_is(line, rule) for line in request.options):
            yield RuleFinding(
                severity=Severity.ERROR,
                message=f"{site.name} requires the option {_with_why(rule)}",
                option=long_name(rule.option),
                advice=f"Add it; the rules here: slurm-forge sites show {site.name}",
            )
    for rule in site.discouraged_options:
        if any(_is(line, rule) for line in request.options):
            yield RuleFinding(
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


def _accounts(request: JobRequest, site: Site) -> Iterator[RuleFinding]:
    if request.account is None:
        if site.account_required:
            such = "" if site.account_example is None else f", such as {site.account_example}"
            yield RuleFinding(
                severity=Severity.WARNING,
                message=f"{site.name} requires an account (resources.account){such}.",
                option="account",
            )
        return
    for rule in site.accounts:
        fits = any(wholly(pattern).fullmatch(request.account) for pattern in rule.accounts)
        goes = _goes_with(request, rule)
        such = " or ".join(rule.accounts)
        why = "" if rule.why is None else f" ({rule.why.rstrip('.')})"
        if goes and not fits:
            yield RuleFinding(
                severity=Severity.ERROR,
                message=f"{site.name}: with {goes} goes an account like {such}, and the job names "
                f"{request.account}{why}",
                option="account",
                advice="Name the account for these GPUs, or ask for those that it pays for.",
            )
        elif fits and not goes and rule.both_ways:
            wanted = [
                *(f"constraint: {each}" for each in rule.constraint),
                *(f"partition: {each}" for each in rule.partitions),
            ]
            yield RuleFinding(
                severity=Severity.ERROR,
                message=f"{site.name}: the account {request.account} goes with "
                f"{' or '.join(wanted)}, and the job does not ask for that{why}",
                option="constraint",
                advice="Add it, or name the account for the GPUs that the job asks for.",
            )


def _goes_with(request: JobRequest, rule: AccountRule) -> str | None:
    """What of the rule the job asks for."""
    features = features_of(request.constraint)
    for feature in rule.constraint:
        if feature in features or feature == request.constraint:
            return f"constraint {feature}"
    for partition in rule.partitions:
        if partition in request.partitions:
            return f"partition {partition}"
    return None


def _limits(request: JobRequest, facts: PartitionFacts, place: str) -> Iterator[RuleFinding]:
    longest = longest_run(facts, request.nodes)
    never = "Slurm will refuse it or never start it."
    if request.time is not None and longest is not None and request.time > longest:
        size = f" for {request.nodes} nodes" if facts.max_time_by_nodes else ""
        yield _warning(
            f"{place} allows {words_for_duration(longest)} at most{size} and the job asks for "
            f"{words_for_duration(request.time)}: {never}",
            "time",
        )
    if request.time is None and facts.default_time is not None:
        yield _warning(
            f"{place} gives a job that asks for no time limit "
            f"{words_for_duration(facts.default_time)} (resources.time).",
            "time",
        )
    if facts.max_nodes is not None and request.nodes > facts.max_nodes:
        yield _warning(
            f"{place} allows {facts.max_nodes} nodes at most and the job asks for {request.nodes}: "
            f"{never}",
            "nodes",
        )
    if facts.constraint is not None and facts.constraint != request.constraint:
        missing = features_of(facts.constraint) - features_of(request.constraint)
        if missing:
            yield _warning(
                f"{place} requires a constraint: add resources.constraint: {facts.constraint}.",
                "constraint",
            )
    if facts.self_requeue_allowed is False and not request.chained:
        yield _warning(
            f"{place} does not let jobs requeue themselves: the run is held instead, "
            "and continues with slurm-forge requeue (template: array needs no requeue).",
            None,
        )


def _gpus(
    request: JobRequest, site: Site, facts: PartitionFacts, place: str
) -> Iterator[RuleFinding]:
    there, gpus = facts.gpus_per_node, request.gpus
    if gpus is None:
        if facts.gpus_required:
            yield _warning(
                f"{place} rejects jobs without GPUs (resources.gpus_per_node).", "gpus-per-node"
            )
    elif there is not None and gpus > there:
        advice = (
            f"{place} has {_count(there, 'GPU')} per node and the job asks for {gpus}"
            if there
            else f"{place} has no GPUs and the job asks for {gpus}"
        )
        if site.gpu_request is GpuOption.NONE:
            # Slurm is not told of them, and so can't refuse them.
            yield RuleFinding(
                severity=Severity.ERROR,
                message=advice,
                option="gpus-per-node",
                advice="Ask for more nodes, or for another partition.",
            )
        else:
            yield _warning(f"{advice}: Slurm will refuse it or never start it.", "gpus-per-node")
    total = request.nodes * (gpus or 0)
    if facts.max_gpus_per_job is not None and total > facts.max_gpus_per_job:
        yield _warning(
            f"{place} allows {_count(facts.max_gpus_per_job, 'GPU')} per job and the job asks for "
            f"{total}: Slurm will refuse it or never start it.",
            "gpus-per-node",
        )
    if facts.exclusive_nodes and there and (gpus or 0) < there and site.gpu_request:
        yield _warning(
            f"{place} allocates whole nodes: {there} GPUs are charged per node and the job asks "
            f"for {gpus or 'none'}.",
            "gpus-per-node",
        )
    yield from _shares(request, facts, place)


def _shares(request: JobRequest, facts: PartitionFacts, place: str) -> Iterator[RuleFinding]:
    """What goes with each GPU; of whole nodes all is the job's anyway."""
    if not request.gpus or facts.exclusive_nodes:
        return
    if facts.cpus_per_gpu is not None:
        most = request.gpus * facts.cpus_per_gpu
        if request.cpus is None:
            yield RuleFinding(
                severity=Severity.NOTE,
                message=f"{place}: {facts.cpus_per_gpu} CPUs go with each GPU, and the job does "
                "not say how many it wants (resources.cpus_per_task).",
                option="cpus-per-task",
            )
        elif request.cpus > most:
            yield _warning(
                f"{place}: {facts.cpus_per_gpu} CPUs go with each GPU, so {most} with those of a "
                f"node, and the job asks for {request.cpus}.",
                "cpus-per-task",
            )
    if facts.memory_per_gpu is not None and request.memory is not None:
        share = request.gpus * facts.memory_per_gpu
        if request.memory > share:
            yield _warning(
                f"{place}: {format_memory(facts.memory_per_gpu)} of memory go with each GPU, so "
                f"{format_memory(share)} with those of a node, and the job asks for "
                f"{format_memory(request.memory)}.",
                "mem",
            )


def _site_wide(request: JobRequest, site: Site) -> Iterator[RuleFinding]:
    if site.default_qos is not None and request.qos is None:
        yield RuleFinding(
            severity=Severity.NOTE,
            message=f"{site.name}: a job that names no QOS gets {site.default_qos}.",
            option="qos",
        )
    if site.internet_on_compute_nodes is False:
        yield RuleFinding(
            severity=Severity.NOTE,
            message=f"{site.name}: compute nodes can't reach the internet; download before, and "
            "let trackers work offline.",
        )
    has = [each.runtime.value for each in site.containers]
    if request.runtime is not None and has and request.runtime not in has:
        yield _warning(
            f"{site.name} runs containers with {' or '.join(has)} and the job asks for "
            f"{request.runtime} (container.runtime).",
            None,
        )
    wanted = None if site.architecture is None else site.architecture.value
    if wanted is not None and request.machine is not None and request.machine != wanted:
        yield _warning(
            f"{site.name}: the compute nodes are {wanted} and this machine is {request.machine}: "
            "the ranks' Python must be built for theirs.",
            None,
        )


def _warning(message: str, option: str | None) -> RuleFinding:
    return RuleFinding(severity=Severity.WARNING, message=message, option=option)


def _place(site: Site, partition: str | None, qos: str | None) -> str:
    parts = [site.name]
    if partition:
        parts.append(f"partition {partition}")
    if qos:
        parts.append(f"QOS {qos}")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
