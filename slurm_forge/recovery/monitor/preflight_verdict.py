"""What was found on nodes before a launch: who is refused, why, and how sure that is.  Pure.

Refused is only what is bad on a minority.  What is the same everywhere is told, and the launch
goes on: it is the program, its environment or the cluster, which another node would not change.
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

#: Checks that say something about a node whatever the others say, and their cause.
_ABSOLUTE = {
    "gpu computes": Cause.GPU_ERROR,
    "gpu memory": Cause.GPU_ERROR,
    "gpu health": Cause.GPU_ERROR,
    "cpu computes": Cause.NODE_FAIL,
}
#: Checks that are bad where the same thing works elsewhere.
_COMPARED = {
    "gpu": Cause.GPU_ERROR,
    "storage": Cause.NODE_FAIL,
    "lock": Cause.NODE_FAIL,
    "versions": Cause.NODE_FAIL,
    "answer": Cause.HANG,
}
_CLOCK_APART_S = 5.0
#: After what a relaunch on the same nodes looks at them again as closely as at new ones.
_SUSPICIOUS = frozenset(
    {Cause.HANG, Cause.NCCL_ERROR, Cause.CRASH, Cause.GPU_ERROR, Cause.NODE_FAIL, Cause.STORAGE}
)
_MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRefusal:
    """Why a launch does not go on, and the hosts that it is to go on without.

    ``rank`` is one that speaks for the first of them.
    """

    cause: Cause
    confidence: Confidence
    hosts: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    rank: int | None = None


def thoroughness(enabled: bool, start: Start, state: RunState) -> Thoroughness:
    """How closely the nodes of the next launch are looked at.

    All of it at a cold start, which one on other nodes always is, and after what may lie with a
    node; after an error of the program, what costs next to nothing.
    """
    if not enabled:
        return Thoroughness.OFF
    attempt = state.attempts[-1] if state.attempts else None
    if attempt is None or start is Start.COLD or not attempt.incidents:
        return Thoroughness.FULL
    _, last = attempt.incidents[-1]
    return Thoroughness.FULL if last.cause in _SUSPICIOUS else Thoroughness.CHEAP


def of_reports(reports: Iterable[NodeReport]) -> PreflightRefusal | None:
    """Whether what ranks found on their nodes speaks against a minority of them."""
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
    """Whether the search for who spoils a collective has found a minority.

    ``ranks`` is the first rank of each host, ``details`` what the last failure looked like there.
    ``slow``: collectives come, but far slower than the site says that they do.
    """
    if isolated.why is not Why.FOUND:
        return None
    cause, confidence = Cause.NCCL_ERROR, Confidence.GUESS
    if _is_minority(len(isolated.nodes), hosts):
        named = isolated.nodes
        if not slow:  # it failed beside several others, each of which works
            cause, confidence = Cause.NODE_FAIL, Confidence.LIKELY
        how = "every collective with it is slow" if slow else "no collective with it works"
        rows = [(ranks.get(h), h, f"{how}{_how(details, h)}") for h in named]
    elif isolated.links and not isolated.nodes:
        # Either end may be it: half a strike for both, and whichever is left out will do.
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
    """Whether ranks (with their hosts) that are waited for in vain are a minority.

    ``frozen``: nothing is heard of them at all, though they had joined.
    """
    hosts_at_fault = tuple(sorted(set(silent.values())))
    # Of half and more it is rather our own node that is cut off; of two it can't be told.
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
    """What is reported only, a line each; the same on many hosts is one line.

    ``ahead`` is by how many seconds the clock of each rank's host is ahead of ours.
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
    """Who runs another python or torch than most."""
    on_hosts = {(each.host, each.python, each.torch) for each in reports}
    versions = Counter((python, torch) for _, python, torch in on_hosts)
    if len(versions) < 2:
        return {}
    ((usual, count),) = versions.most_common(1)
    if 2 * count <= len({host for host, _, _ in on_hosts}):
        return {}  # of two that differ nobody can tell which is the odd one
    outliers: dict[str, tuple[NodeReport, Check]] = {}
    for each in reports:
        if (each.python, each.torch) != usual:
            text = f"python {each.python}, torch {each.torch}; others have {usual[0]}, {usual[1]}"
            check = Check(name="versions", verdict=CheckVerdict.BAD, text=text)
            outliers.setdefault(each.host, (each, check))
    return {"versions": outliers}


def _is_minority(bad: int, hosts: int, *, alone: bool = False) -> bool:
    """Whether so many of the hosts can be to blame; ``alone``: there need be no other."""
    return bad > 0 and ((2 * bad <= hosts and bad < hosts) or (alone and hosts == 1))


def _how(details: Mapping[str, str], host: str) -> str:
    return f" ({details[host]})" if details.get(host) else ""


def _evidence(rows: Iterable[tuple[int | None, str, str]]) -> tuple[Evidence, ...]:
    lines = [
        Evidence("preflight", f"{host}{'' if rank is None else f' (rank {rank})'}: {text}")
        for rank, host, text in rows
    ]
    return tuple(lines[:_MOST_TOLD])
