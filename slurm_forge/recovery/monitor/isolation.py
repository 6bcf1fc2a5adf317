"""Find the bad node, or the bad link, that makes a collective of many nodes fail.  Pure.

``isolate`` yields groups of nodes to be tried side by side, one round at a time, receives which of
them failed, and finally returns what it knows.  A node is in at most one group of a round.

1. All together.  If that works, nothing is wrong.
2. Pairs of neighbours.  A bad node makes its own pair fail and no other.
3. Each node of a failed pair beside one of a pair that worked, and a node that fails again beside
   another one.  A node that fails beside both is bad.  If both of a pair work now, the link between
   them is bad.
4. If all pairs work but all together fail, it is a link between nodes that were not paired, or it
   only shows at scale: halves, then parts of one half with parts of the other, so that at most two
   rounds halve the rest.

So any number of bad nodes takes four rounds, and a bad link at most 4 + 2 log2 n.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

Group = tuple[str, ...]
#: Whether each group of the round worked, in the order of the groups.
Outcomes = Sequence[bool]
Isolation = Generator[tuple[Group, ...], Outcomes, "Isolated"]

#: There may be more suspects than nodes known to work: at most this many rounds are spent on them.
_MOST_ROUNDS_OF_PAIRS = 8


class Why(str, Enum):
    """The result of the search."""

    FINE = "fine"
    #: Nodes or links are named.
    FOUND = "found"
    #: No pair works: the network as a whole, or the collective itself, but no node.
    EVERYBODY = "everybody"
    #: It failed once and did not fail again.
    NOT_AGAIN = "not_again"
    #: All of them together fail, but no part of them does.
    AT_SCALE = "at_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolated:
    """The result: bad ``nodes``, and bad ``links`` between nodes that are good.

    It took ``rounds`` rounds, in which ``groups`` groups were tried.
    """

    why: Why
    nodes: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    rounds: int = 0
    groups: int = 0


@dataclass(slots=True)
class _Count:
    rounds: int = 0
    groups: int = 0
    #: Nodes that worked with another one in the pairs.
    good: set[str] = field(default_factory=set)

    def result(
        self,
        why: Why,
        nodes: Sequence[str] = (),
        links: Sequence[tuple[str, str]] = (),
    ) -> Isolated:
        return Isolated(
            why=why,
            nodes=tuple(sorted(nodes)),
            links=tuple(sorted(links)),
            rounds=self.rounds,
            groups=self.groups,
        )


def isolate(nodes: Sequence[str], *, most: int | None = None) -> Isolation:
    """Find what is bad among ``nodes``.  Prime it with ``next``, then ``send`` outcomes.

    ``most`` limits the size of a group, if all nodes are too many for one: then links between nodes
    of different groups are not checked.
    """
    count, everybody = _Count(), tuple(dict.fromkeys(nodes))
    if len(everybody) < 2:
        return count.result(Why.FINE)
    parts = _parts(everybody, most)
    outcomes = yield from _round(count, parts)
    worse = [part for part, ok in zip(parts, outcomes, strict=True) if not ok]
    if not worse:
        return count.result(Why.FINE)
    count.good = {node for part in parts if part not in worse for node in part}
    if len(everybody) == 2:
        (worked,) = yield from _round(count, parts)
        return count.result(Why.NOT_AGAIN if worked else Why.EVERYBODY)
    if len(everybody) == 3:
        return (yield from _three(count, everybody))
    pairs = [pair for part in worse for pair in _pairs(part)]
    outcomes = yield from _round(count, pairs)
    count.good |= {node for pair, ok in zip(pairs, outcomes, strict=True) if ok for node in pair}
    failed = [(a, b) for (a, b), ok in zip(pairs, outcomes, strict=True) if not ok]
    if not count.good:
        return count.result(Why.EVERYBODY)
    alone = [part[-1] for part in worse if len(part) % 2]
    if failed or alone:
        isolated = yield from _beside_good_ones(count, failed, alone)
        if failed or isolated.why is Why.FOUND:
            return isolated
    return (yield from _between(count, worse))


def _parts(nodes: Group, most: int | None) -> list[Group]:
    """All of them, or as few groups of similar size as possible."""
    number = 1 if most is None else max(1, -(-len(nodes) // max(2, most)))
    size, more = divmod(len(nodes), number)
    parts, at = [], 0
    for index in range(number):
        end = at + size + (index < more)
        parts.append(nodes[at:end])
        at = end
    return parts


def _round(
    count: _Count, groups: Sequence[Group]
) -> Generator[tuple[Group, ...], Outcomes, Outcomes]:
    count.rounds += 1
    count.groups += len(groups)
    outcomes = yield tuple(groups)
    if len(outcomes) != len(groups):
        raise ValueError(f"{len(outcomes)} outcomes for {len(groups)} groups")
    return tuple(bool(each) for each in outcomes)


def _pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of neighbours; if the number is odd, the last node stays alone."""
    return [(nodes[at], nodes[at + 1]) for at in range(0, len(nodes) - 1, 2)]


def _three(count: _Count, nodes: Group) -> Generator[tuple[Group, ...], Outcomes, Isolated]:
    """With three nodes each pair in turn: there is no other node."""
    a, b, c = nodes
    failed: list[tuple[str, str]] = []
    for pair in ((a, b), (a, c), (b, c)):
        (worked,) = yield from _round(count, [pair])
        failed += [] if worked else [pair]
    if not failed:
        (worked,) = yield from _round(count, [nodes])
        return count.result(Why.NOT_AGAIN if worked else Why.AT_SCALE)
    if len(failed) == 1:
        return count.result(Why.FOUND, (), failed)
    if len(failed) == 2:
        return count.result(Why.FOUND, [node for node in nodes if all(node in p for p in failed)])
    return count.result(Why.EVERYBODY)


def _beside_good_ones(
    count: _Count, failed: Sequence[tuple[str, str]], alone: Sequence[str]
) -> Generator[tuple[Group, ...], Outcomes, Isolated]:
    """Each suspect beside two nodes that have worked, one after the other.

    A node that works now can serve as a partner next.  ``failed`` are pairs, ``alone`` was in none.
    """
    waiting = [*(node for pair in failed for node in pair), *alone]
    failed_beside: dict[str, str] = {}
    bad: list[str] = []
    links: list[tuple[str, str]] = []
    for _ in range(_MOST_ROUNDS_OF_PAIRS):
        groups = _beside(waiting, sorted(count.good), failed_beside)
        if not groups:
            break
        outcomes = yield from _round(count, groups)
        for (suspect, vouching), worked in zip(groups, outcomes, strict=True):
            before = failed_beside.get(suspect)
            if worked:
                count.good.add(suspect)
                links += [] if before is None else [(suspect, before)]
            elif before is None:
                failed_beside[suspect] = vouching
                continue
            else:
                bad.append(suspect)
            waiting.remove(suspect)
    # Both ends of a failed pair work with another node: the link between them is bad.
    links += [pair for pair in failed if set(pair) <= count.good]
    return count.result(Why.FOUND if bad or links else Why.NOT_AGAIN, bad, links)


def _beside(
    waiting: Sequence[str], good: Sequence[str], before: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Choose partners: no pair is tried twice, and no node is in two groups."""
    groups: list[tuple[str, str]] = []
    free = list(good)
    for suspect in waiting:
        partner = next((node for node in free if node != before.get(suspect)), None)
        if partner is None:
            continue
        free.remove(partner)
        groups.append((suspect, partner))
    return groups


@dataclass(frozen=True, slots=True)
class _Region:
    """Nodes that fail together: all of ``left``, or with a ``right``, only across the two.

    ``crossed``: with two quarters each, the parallel ones worked; now the diagonal ones are tried.
    """

    left: Group
    right: Group = ()
    crossed: bool = False

    def groups(self) -> tuple[Group, ...]:
        if not self.right:
            return tuple(half for half in _halves(self.left) if len(half) > 1)
        (a, b), (c, d) = _halves(self.left), _halves(self.right)
        if self.crossed:
            c, d = d, c
        return tuple((*one, *other) for one, other in ((a, c), (b, d)) if one and other)

    def next(self, outcomes: Sequence[bool]) -> tuple[_Region, ...]:
        """The part to search next; nothing if it did not fail again."""
        if not self.right:
            halves = _halves(self.left)
            tried = [half for half in halves if len(half) > 1]
            worse = [half for half, ok in zip(tried, outcomes, strict=True) if not ok]
            return tuple(map(_Region, worse)) or (_Region(*halves),)
        (a, b), (c, d) = _halves(self.left), _halves(self.right)
        if self.crossed:
            c, d = d, c
        across = [(one, other) for one, other in ((a, c), (b, d)) if one and other]
        still = [pair for pair, ok in zip(across, outcomes, strict=True) if not ok]
        if still:
            return tuple(_Region(one, other) for one, other in still)
        return () if self.crossed else (_Region(self.left, self.right, crossed=True),)

    @property
    def link(self) -> tuple[str, str] | None:
        """The last two nodes, once only they are left."""
        if len(self.left) == len(self.right) == 1:
            return self.left[0], self.right[0]
        if not self.right and len(self.left) == 2:
            return self.left[0], self.left[1]
        return None


def _halves(nodes: Group) -> tuple[Group, Group]:
    middle = (len(nodes) + 1) // 2
    return nodes[:middle], nodes[middle:]


def _between(
    count: _Count, failing: Sequence[Group]
) -> Generator[tuple[Group, ...], Outcomes, Isolated]:
    """All pairs of neighbours work, all together fail: halve until two nodes are left."""
    regions = tuple(map(_Region, failing))
    pairs: set[tuple[str, str]] = set()
    while regions:
        trials = [region.groups() for region in regions]
        outcomes = list((yield from _round(count, [group for each in trials for group in each])))
        following: list[_Region] = []
        for region, groups in zip(regions, trials, strict=True):
            answers, outcomes = outcomes[: len(groups)], outcomes[len(groups) :]
            following += region.next(answers)
        pairs |= {link for region in following if (link := region.link) is not None}
        regions = tuple(region for region in following if region.link is None)
    if not pairs:
        outcomes = list((yield from _round(count, failing)))
        return count.result(Why.NOT_AGAIN if all(outcomes) else Why.AT_SCALE)
    # Once more: these two have not been tried alone.
    links = []
    for link in sorted(pairs):  # regions are disjoint, but a link may be found beside its region
        (worked,) = yield from _round(count, [link])
        if not worked:
            links.append(link)
    return count.result(Why.FOUND if links else Why.NOT_AGAIN, (), links)
