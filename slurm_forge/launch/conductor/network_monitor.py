"""Asks how the connections between hosts are, and says which host can't be reached.

Talks to the hub only.  Asked for when something stands still and nobody knows why: monitors look
at the connections of their ranks, the hub at its own, and ``recovery.monitor.unreachable_hosts``
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from slurm_forge.control import Hub
from slurm_forge.control.messages.links import LinkReport, PortReport, QueryLinks
from slurm_forge.control.messages.message import Message
from slurm_forge.control.tcp.links import (
    Connection,
    Link,
    read_links,
    summarize,
)
from slurm_forge.recovery.monitor.unreachable_hosts import (
    LinkSeen,
    UnreachableHosts,
    find_unreachable_hosts,
    seen_of,
)
from slurm_forge.vocabulary.cause import Evidence

#: Whoever has not answered by then is cut off, or has no monitor that runs; what we asked it is
#: acknowledged by its kernel or it is not, and TCP has tried three times.
_ANSWER_TIMEOUT_S = 3.0
#: With all answers there: until then what we sent, the question, may be on its way still.
_MIN_WAIT_S = 1.6
#: A verdict is of its moment; whoever asks later gets another.
_STALE_S = 5.0
#: What is delayed by less than this share of a probe's deadline makes no probe late.
_LATE_FRACTION = 1 / 60
_SHOWN = 8


@dataclass(slots=True)
class _Inquiry:
    number: int
    asked_at: float
    answers: dict[int, tuple[Link, ...]] = field(default_factory=dict)
    verdict: UnreachableHosts | None = None


class NetworkMonitor:
    """``ask``, pass answers to ``on_message``, and take the ``verdict``.  One inquiry at a time.

    It needs messages from the beginning of the launch: hosts say their addresses then.
    ``deadline`` is that of a probe.
    """

    def __init__(
        self, hub: Hub, clock: Callable[[], float], deadline: timedelta = timedelta(0)
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._late_s = _LATE_FRACTION * deadline.total_seconds()
        self._inquiry: _Inquiry | None = None
        self._number = 0
        self._addresses: dict[str, str] = {}  # host by address
        self._ports: dict[str, tuple[str, ...]] = {}

    def ask(self) -> None:
        """Begin to find out.  Does nothing while that is under way, or has just been found out."""
        now = self._clock()
        if self._inquiry is not None and now - self._inquiry.asked_at < _STALE_S:
            return
        self._number += 1
        self._inquiry = _Inquiry(self._number, now)
        question = QueryLinks(id=self._number)
        self._hub.ask_monitors(question)
        monitors = self._hub.monitors()
        for rank, member in self._hub.members().items():
            if member.connected and (rank not in monitors or not monitors[rank].connected):
                self._hub.ask_rank(rank, question)

    def on_message(self, rank: int, message: Message) -> None:
        """A monitor, or a rank itself, says how its connections are, or what its ports counted."""
        host = self._hub.host_of(rank) or ""
        if isinstance(message, PortReport):
            self._ports[host] = message.lines[:_SHOWN]
        if not isinstance(message, LinkReport):
            return
        for address in message.addresses:
            self._addresses[address] = host
        inquiry = self._inquiry
        if inquiry is None or message.id != inquiry.number:
            return
        if message.how == "refused":
            self._hub.ask_rank(rank, QueryLinks(id=message.id))
        else:
            inquiry.answers[rank] = read_links(message)

    def verdict(self, now: float) -> UnreachableHosts | None:
        """What was found out last; None while answers are awaited, or nobody has asked."""
        inquiry = self._inquiry
        if inquiry is None:
            return None
        if inquiry.verdict is None:
            members = self._hub.members()
            awaited = {rank for rank, member in members.items() if member.connected}
            since = now - inquiry.asked_at
            if since < (_MIN_WAIT_S if awaited <= set(inquiry.answers) else _ANSWER_TIMEOUT_S):
                return None
            inquiry.verdict = self._verdict_of(inquiry)
        return inquiry.verdict

    def _verdict_of(self, inquiry: _Inquiry) -> UnreachableHosts:
        ranks = {rank: member.host for rank, member in self._hub.members().items()}
        own = [(rank, each) for rank, each in self._hub.connections() if rank in ranks]
        # Who sits on the hub's host is connected from one address of it to another.
        local = {each.local for _, each in own}
        here = next((ranks[rank] for rank, each in own if each.peer in local), "")
        host_of = dict(self._addresses)
        for rank, each in own:
            host_of.setdefault(each.peer, ranks[rank])
        for address in local:
            host_of.setdefault(address, here)
        reports = [(ranks[rank], links) for rank, links in inquiry.answers.items() if rank in ranks]
        link_views = [*seen_of(reports, host_of), *_own_view(here, own, ranks)]
        verdict = find_unreachable_hosts(link_views, ranks, late=self._late_s)
        lines = tuple(
            Evidence("ports", f"{host}: {', '.join(lines)}")
            for host, lines in sorted(self._ports.items())
            if lines and (not verdict.hosts or host in verdict.hosts)
        )
        return replace(verdict, evidence=(*verdict.evidence, *lines))


def _own_view(
    here: str, own: Sequence[tuple[int, Connection]], ranks: Mapping[int, str]
) -> list[LinkSeen]:
    """The hub's connections by the host at their other end, whatever its addresses are."""
    by_host: dict[str, list[Connection]] = {}
    for rank, each in own:
        if ranks[rank] != here:
            by_host.setdefault(ranks[rank], []).append(each)
    return [
        LinkSeen(here, host, link)
        for host, connections in by_host.items()
        for link in summarize(connections)
    ]
