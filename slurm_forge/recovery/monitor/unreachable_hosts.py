"""Which host can't be reached, or only slowly: pure, from the hosts' views of their connections.

A host that is cut off sends nothing, and all of its links look equally bad from both ends.  So it
is the host whose links to the others are bad while theirs among each other are not; with two hosts
it is undecidable.  At most a minority is named: if half can't reach the other half, nobody is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

from slurm_forge.control.tcp.links import Link
from slurm_forge.recovery.monitor.stalls import Stall
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

#: Timers of TCP expire after 0.2, 0.6, 1.4 s: twice in a row is more than a lost packet.
_LATE_AFTER = 2
#: Data that is merely late would normally have been acknowledged by then.
_CUT_S = 2.5
#: A delayed link makes a probe wait for seconds: less than this can't explain that.
_DELAYED_S = 0.1
_TIMES_USUAL = 10.0
_TIMES_OWN = 3.0
#: The number of hosts whose evidence is listed.
_LINES = 8


class Trouble(str, Enum):
    """What is wrong with a link, or with all links of a host."""

    NONE = "none"
    DELAYED = "delayed"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """One host's view of another; an empty name is the supervisor's, if no rank runs beside it."""

    seer: str
    other: str
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableHosts:
    """Hosts that are delayed or cut off, and their ranks.

    Empty, with a ``how`` other than none: the network is to blame, and no host can be named.
    """

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    how: Trouble = Trouble.NONE
    evidence: tuple[Evidence, ...] = ()
    confidence: Confidence = Confidence.GUESS


def seen_of(
    reports: Iterable[tuple[str, Sequence[Link]]], host_of: Mapping[str, str]
) -> tuple[LinkSeen, ...]:
    """The links in reports; ``host_of`` maps addresses to hosts, and unknown ones are ignored."""
    return tuple(
        LinkSeen(host, host_of[link.peer], link)
        for host, links in reports
        for link in links
        if link.peer in host_of and host_of[link.peer] != host
    )


def find_unreachable_hosts(
    links: Sequence[LinkSeen], ranks: Mapping[int, str], *, late: float = 0.0
) -> UnreachableHosts:
    """The fewest hosts that explain the observations; ``ranks`` are the hosts of all ranks.

    A link is delayed if its round trip takes ``late`` seconds, at least a tenth of a second, and
    many times the usual value.
    """
    limit = max(_DELAYED_S, late, _TIMES_USUAL * _usual(links))
    bad: dict[frozenset[str], list[tuple[Trouble, Link]]] = {}
    good: dict[frozenset[str], list[Link]] = {}
    for each in links:
        pair, trouble = frozenset((each.seer, each.other)), _trouble(each.link, limit)
        if trouble is Trouble.NONE:
            good.setdefault(pair, []).append(each.link)
        elif trouble is not None:
            bad.setdefault(pair, []).append((trouble, each.link))
    fine = {pair for pair in good if pair not in bad}
    culprits, between = _culprits(set(bad), fine)
    if not bad:
        return UnreachableHosts()
    hosts = sorted(set(ranks.values()))
    how = _how(bad, culprits)
    if between:
        text = f"{' and '.join(name or _SUPERVISOR for name in between)} {_PAIR[how]}"
        text += _figures(bad[frozenset(between)])
        text += ", but reach others" if fine else "; with two hosts it cannot be determined which"
        culprits = [*culprits, *between]
        lines = [Evidence("network", text)]
        confidence = Confidence.GUESS
    else:
        lines = [_line(host, bad, fine, good, how) for host in culprits[:_LINES]]
        confirmed = all(sum(host in pair for pair in bad) > 1 for host in culprits) or bool(fine)
        confidence = Confidence.LIKELY if confirmed else Confidence.GUESS
    if 2 * len(culprits) >= len(hosts) or "" in culprits:
        if not between:
            lines.append(Evidence("network", "not a minority of the hosts: none is named"))
        return UnreachableHosts(how=how, evidence=tuple(lines))
    return UnreachableHosts(
        ranks=tuple(rank for rank, host in sorted(ranks.items()) if host in culprits),
        hosts=tuple(host for host in hosts if host in culprits),
        how=how,
        evidence=tuple(lines),
        confidence=confidence,
    )


def with_network(stall: Stall, network: UnreachableHosts, ranks: Mapping[int, str]) -> Stall:
    """Reinterpret a standstill by the state of the network: only the hosts it names are late.

    Ranks may be silent because the path to them is cut, even all but one.  ``ranks`` are the hosts
    of all.
    """
    if network.how is Trouble.NONE:
        return stall
    evidence = (*network.evidence, *stall.evidence)
    if not network.ranks:
        return replace(stall, evidence=evidence)
    return replace(
        stall,
        cause=Cause.NCCL_ERROR,
        late_ranks=network.ranks,
        late_hosts=tuple(ranks[rank] for rank in network.ranks),
        evidence=evidence,
        confidence=network.confidence,
    )


_SUPERVISOR = "the supervisor's node"
_PAIR = {
    Trouble.CUT: "do not reach each other",
    Trouble.DELAYED: "reach each other late",
    Trouble.NONE: "",
}


def _usual(links: Sequence[LinkSeen]) -> float:
    """The usual round trip before there was any trouble, in seconds: the smallest known values.

    Half of the present ones may be late: so all known values count for the supervisor's host.
    """
    least = [each.link.min_rtt for each in links if each.link.min_rtt]
    return median(least) if least else 0.0


def _trouble(link: Link, limit: float) -> Trouble | None:
    """None if nothing is known of it: it was not used recently."""
    if link.retransmits >= _LATE_AFTER:
        return Trouble.CUT if link.unanswered >= _CUT_S else Trouble.DELAYED
    if link.rtt is None:
        return None
    limit = max(limit, _TIMES_OWN * (link.min_rtt or 0.0))
    return Trouble.DELAYED if link.rtt >= limit else Trouble.NONE


def _culprits(
    bad: Collection[frozenset[str]], fine: Collection[frozenset[str]]
) -> tuple[list[str], tuple[str, ...]]:
    """Hosts that explain all bad links; both ends of a last one if either explains it."""
    unexplained = set(bad)
    culprits: list[str] = []
    speak_for = Counter(host for pair in fine for host in pair)
    while unexplained:
        counted = Counter(host for pair in unexplained for host in pair)
        ends = sorted(counted)
        score = {
            host: (against - speak_for[host], against / (against + speak_for[host]), against)
            for host, against in counted.items()
        }
        best = max(ends, key=score.__getitem__)
        equal = [host for host in ends if score[host] == score[best]]
        if len(unexplained) == 1 and len(equal) == 2:
            return culprits, tuple(equal)
        culprits.append(best)
        unexplained = {pair for pair in unexplained if best not in pair}
    return sorted(culprits), ()


def _how(
    bad: Mapping[frozenset[str], Sequence[tuple[Trouble, Link]]], culprits: Collection[str]
) -> Trouble:
    """Cut off if most of the pairs are, by any of their connections."""
    pairs = [troubles for pair, troubles in bad.items() if not culprits or pair & set(culprits)]
    cut = sum(any(trouble is Trouble.CUT for trouble, _ in troubles) for troubles in pairs)
    return Trouble.CUT if 2 * cut >= len(pairs) else Trouble.DELAYED


def _line(
    host: str,
    bad: Mapping[frozenset[str], Sequence[tuple[Trouble, Link]]],
    fine: Collection[frozenset[str]],
    good: Mapping[frozenset[str], Sequence[Link]],
    how: Trouble,
) -> Evidence:
    own = [troubles for pair, troubles in bad.items() if host in pair]
    total = len(own) + sum(host in pair for pair in fine)
    verb = "does not acknowledge" if how is Trouble.CUT else "answers late"
    text = f"{host or _SUPERVISOR} {verb} ({len(own)} of {total} {'peers' if total > 1 else 'peer'}"
    text += f"{_figures([each for troubles in own for each in troubles], open_bracket=False)})"
    rtts = [link.rtt for pair in fine if host not in pair for link in good[pair] if link.rtt]
    if rtts:
        text += f"; among the others rtt {_seconds(median(rtts))}"
    return Evidence("network", text)


def _figures(troubles: Sequence[tuple[Trouble, Link]], *, open_bracket: bool = True) -> str:
    """``, 4.2 s, 5 retransmits`` or ``, rtt 2.1 s, 0.3 ms before``."""
    links = [link for _, link in troubles]
    worst = max(links, key=lambda link: (link.retransmits, link.unanswered))
    late = max((link.rtt for link in links if link.rtt), default=None)
    parts = []
    if worst.retransmits >= _LATE_AFTER:
        parts += [_seconds(worst.unanswered), f"{worst.retransmits} retransmits"]
    elif late is not None:
        parts.append(f"rtt {_seconds(late)}")
        before = [link.min_rtt for link in links if link.min_rtt]
        parts += [f"{_seconds(min(before))} before"] if before else []
    text = ", ".join(parts)
    return f" ({text})" if open_bracket else f", {text}"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
