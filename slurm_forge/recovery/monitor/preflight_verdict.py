"""The verdict on nodes before a launch: who is refused, why, and with what confidence.  Pure.

Only a problem of a minority of nodes is a refusal.  A problem that is the same everywhere is
reported, and the launch continues: it is the program, its environment or the cluster, and other
nodes would not help.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.control.messages.preflight import Check, CheckVerdict, NodeReport, Thoroughness
from slurm_forge.journal.state import RunState
from slurm_forge.recovery.monitor.isolation import (
    Isolated,
    Why,
)
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Start

#: Checks that are conclusive for a node by themselves, and their cause.
_ABSOLUTE = {
    "gpu computes": Cause.GPU_ERROR,
    "gpu memory": Cause.GPU_ERROR,
    "gpu health": Cause.GPU_ERROR,
    "cpu computes": Cause.NODE_FAIL,
}
#: Checks that count only if the same thing works elsewhere.
_COMPARED = {
    "gpu": Cause.GPU_ERROR,
    "storage": Cause.NODE_FAIL,
    "lock": Cause.NODE_FAIL,
    "versions": Cause.NODE_FAIL,
    "answer": Cause.HANG,
}
_CLOCK_APART_S = 5.0
#: Causes after which a relaunch on the same nodes checks them as thoroughly as new ones.
_SUSPICIOUS = frozenset(
    {Cause.HANG, Cause.NCCL_ERROR, Cause.CRASH, Cause.GPU_ERROR, Cause.NODE_FAIL, Cause.STORAGE}
)
_MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRefusal:
    """Why a launch does not continue, and the hosts that it is to continue without.

    ``rank`` is one on the first of them.
    """

    cause: Cause
    confidence: Confidence
    hosts: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    rank: int | None = None


def thoroughness(enabled: bool, start: Start, state: RunState) -> Thoroughness:
    """How thoroughly the nodes of the next launch are checked.

    Completely at a cold start, which a launch on other nodes always is, and after causes that may
    originate at a node; after an error of the program, only the nearly free checks.
    """
    if not enabled:
        return Thoroughness.OFF
    attempt = state.attempts[-1] if state.attempts else None
    if attempt is None or start is Start.COLD or not attempt.incidents:
        return Thoroughness.FULL
    _, last = attempt.incidents[-1]
    return Thoroughness.FULL if last.cause in _SUSPICIOUS else Thoroughness.CHEAP


def of_reports(reports: Iterable[NodeReport]) -> PreflightRefusal | None:
    """Judge the ranks' reports on their nodes: refuse a minority that is bad."""
    reports = tuple(reports)
    hosts = tuple(dict.fromkeys(report.host for report in reports))
    bad: defaultdict[str, dict[str, tuple[NodeReport, Check]]] = defaultdict(dict)
    for report in reports:
        for check in report.checks:
            if check.verdict is CheckVerdict.BAD:
                bad[check.name].setdefault(report.host, (report, check))
    for name, failed in _other_versions(reports).items():
        bad[name].update(failed)
    for name, cause in (_ABSOLUTE | _COMPARED).items():
        failed = bad.get(name, {})
        if not _is_minority(len(failed), len(hosts), alone=name in _ABSOLUTE):
            continue
        return PreflightRefusal(
            cause=cause,
            confidence=Confidence.LIKELY,
            hosts=tuple(sorted(failed)),
            evidence=_evidence(
                (report.rank, host, f"{name}: {check.text}")
                for host, (report, check) in failed.items()
            ),
            rank=min(report.rank for report, _ in failed.values()),
        )
    return None


def of_collectives(
    isolated: Isolated,
    ranks: Mapping[str, int],
    details: Mapping[str, str],
    hosts: int,
    *,
    slow: bool = False,
) -> PreflightRefusal | None:
    """Judge the search for nodes that spoil a collective: refuse a minority that was found.

    ``ranks`` is the first rank of each host, ``details`` describes the last failure there.
    ``slow``: collectives complete, but far slower than the site file states.
    """
    if isolated.why is not Why.FOUND:
        return None
    cause, confidence = Cause.NCCL_ERROR, Confidence.GUESS
    if _is_minority(len(isolated.nodes), hosts):
        named = isolated.nodes
        if not slow:  # it failed beside several others that work
            cause, confidence = Cause.NODE_FAIL, Confidence.LIKELY
        how = "every collective with it is slow" if slow else "no collective with it works"
        rows = [(ranks.get(h), h, f"{how}{_how(details, h)}") for h in named]
    elif isolated.links and not isolated.nodes:
        # Either end may be bad: half a strike for both, and excluding either will do.
        named = tuple(sorted({host for link in isolated.links for host in link}))
        if not _is_minority(len(named), hosts):
            named = tuple(sorted({second for _, second in isolated.links}))
        how = "slow together" if slow else "they don't reach each other"
        rows = [
            (ranks.get(a), f"{a} with {b}", f"{how}, each works with others{_how(details, a)}")
            for a, b in isolated.links
        ]
    else:
        return None
    return PreflightRefusal(
        cause=cause,
        confidence=confidence,
        hosts=named,
        evidence=_evidence(rows),
        rank=min((ranks[host] for host in named if host in ranks), default=None),
    )


def of_silence(
    silent: Mapping[int, str], hosts: int, waited: timedelta, *, frozen: bool
) -> PreflightRefusal | None:
    """Judge missing ranks (with their hosts): refuse them if they are a minority.

    ``frozen``: they had joined and then fell completely silent.
    """
    hosts_at_fault = tuple(sorted(set(silent.values())))
    # If half or more are missing, our own node is probably cut off; with two it is undecidable.
    if not hosts_at_fault or not (
        2 * len(hosts_at_fault) < hosts or (len(hosts_at_fault), hosts) == (1, 2)
    ):
        return None
    what = "joined, but has reported nothing since" if frozen else "has not reported"
    text = f"{what}, while all others finished their checks {waited.total_seconds():.0f} s ago"
    return PreflightRefusal(
        cause=Cause.HANG,
        confidence=Confidence.LIKELY if frozen else Confidence.GUESS,
        hosts=hosts_at_fault,
        evidence=_evidence((rank, host, text) for rank, host in silent.items()),
        rank=min(silent),
    )


def oddities(reports: Iterable[NodeReport], ahead: Mapping[int, float]) -> tuple[str, ...]:
    """Findings that are only reported, a line each; equal ones of many hosts share a line.

    ``ahead`` is how many seconds the clock of each rank's host is ahead of ours.
    """
    reports = tuple(reports)
    lines: defaultdict[str, list[str]] = defaultdict(list)
    differ = len({(report.python, report.torch) for report in reports}) > 1
    for report in reports:
        if differ:
            lines[f"versions: python {report.python}, torch {report.torch}"].append(report.host)
        for check in report.checks:
            if check.verdict in (CheckVerdict.ODD, CheckVerdict.BAD):
                lines[f"{check.name}: {check.text}"].append(report.host)
        apart = ahead.get(report.rank, 0.0)
        if abs(apart) > _CLOCK_APART_S:
            side = "ahead" if apart > 0 else "behind"
            lines[f"clock {abs(apart):.0f} s {side}"].append(report.host)
    return tuple(f"{_host_list(hosts)}: {text}" for text, hosts in lines.items())


def _host_list(hosts: Sequence[str]) -> str:
    names = tuple(dict.fromkeys(hosts))
    more = len(names) - _MOST_TOLD
    return ", ".join(names[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")


def _other_versions(
    reports: Sequence[NodeReport],
) -> dict[str, dict[str, tuple[NodeReport, Check]]]:
    """Hosts with another version of Python or torch than most."""
    on_hosts = {(each.host, each.python, each.torch) for each in reports}
    versions = Counter((python, torch) for _, python, torch in on_hosts)
    if len(versions) < 2:
        return {}
    ((usual, count),) = versions.most_common(1)
    if 2 * count <= len({host for host, _, _ in on_hosts}):
        return {}  # with two that differ, neither is the odd one
    outliers: dict[str, tuple[NodeReport, Check]] = {}
    for each in reports:
        if (each.python, each.torch) != usual:
            text = f"python {each.python}, torch {each.torch}; others have {usual[0]}, {usual[1]}"
            check = Check(name="versions", verdict=CheckVerdict.BAD, text=text)
            outliers.setdefault(each.host, (each, check))
    return {"versions": outliers}


def _is_minority(bad: int, hosts: int, *, alone: bool = False) -> bool:
    """Whether this many hosts can be to blame; ``alone``: no other host is needed."""
    return bad > 0 and ((2 * bad <= hosts and bad < hosts) or (alone and hosts == 1))


def _how(details: Mapping[str, str], host: str) -> str:
    return f" ({details[host]})" if details.get(host) else ""


def _evidence(rows: Iterable[tuple[int | None, str, str]]) -> tuple[Evidence, ...]:
    lines = [
        Evidence("preflight", f"{host}{'' if rank is None else f' (rank {rank})'}: {text}")
        for rank, host, text in rows
    ]
    return tuple(lines[:_MOST_TOLD])
