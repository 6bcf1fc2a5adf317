"""Which bad node, or which bad link, makes a collective of many fail.  Pure.

``isolate`` asks for groups of nodes to be tried side by side, a round at a time, is sent which of
them failed, and says in the end what it knows.  A node is in one group of a round at most.

1. All together.  Where that works, nothing is wrong.
2. Pairs of neighbours.  A bad node makes its own pair fail and no other.
3. Each node of a failed pair beside one of a pair that worked, and who fails again beside another
   one.  Who fails beside both is bad.  Where both of a pair work now, it is what lies between.
4. Where all pairs work and all together don't, it is a link between nodes that were not paired, or
   it only shows at scale: halves, then parts of one half with parts of the other, so that at most
   two rounds halve what is left.

So bad nodes of any number take four rounds, a bad link 4 + 2 log2 n at most.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

Group = tuple[str, ...]
#: Whether each group of the round worked, in the order in which they were asked for.
Outcomes = Sequence[bool]
Isolation = Generator[tuple[Group, ...], Outcomes, "Isolated"]

#: Suspects may be more than those who can vouch for them: so many rounds at most are spent on it.
_MOST_ROUNDS_OF_PAIRS = 8


class Why(str, Enum):
    """What the search has come to."""

    FINE = "fine"
    #: Nodes or links are named.
    FOUND = "found"
    #: Nobody works with anybody: the network as a whole, or what is tried, and no node.
    EVERYBODY = "everybody"
    #: It failed once and did not again.
    NOT_AGAIN = "not_again"
    #: All of them together fail, and no part of them does.
    AT_SCALE = "at_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolated:
    """What is known in the end: bad ``nodes``, and ``links`` between nodes that are good.

    ``rounds`` were needed, in which so many ``groups`` were tried.
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
    #: Who has worked with somebody in the pairs.
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

    ``most`` is how many may be in one group, where all of them are too many: then links between
    nodes of different groups are not looked at.
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
    """All of them, or as few groups of about the same size as can be."""
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
    """Neighbours; where the number is odd, the last one has none."""
    return [(nodes[at], nodes[at + 1]) for at in range(0, len(nodes) - 1, 2)]


def _three(count: _Count, nodes: Group) -> Generator[tuple[Group, ...], Outcomes, Isolated]:
    """Of three each pair, one after the other: there is nobody else."""
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
    """Each suspect beside two who have worked, one after the other.

    Who works now can vouch for the next.  ``failed`` are pairs, ``alone`` has not been in any.
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
    # Both ends of a pair that failed work with somebody else: it is what lies between them.
    links += [pair for pair in failed if set(pair) <= count.good]
    return count.result(Why.FOUND if bad or links else Why.NOT_AGAIN, bad, links)


def _beside(
    waiting: Sequence[str], good: Sequence[str], before: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Who is tried beside whom: nobody beside the same one twice, and nobody in two groups."""
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
    """Nodes that fail together: all of ``left``, or with a ``right``, across the two only.

    ``crossed``: of two quarters each, the parallel ones have worked; the diagonal ones come now.
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
        """What is left to look at; nothing where it did not fail again."""
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
        """The two nodes that are left, once they are."""
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
    """All pairs of neighbours work, all together don't: halve until two nodes are left."""
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
    # Once more: the two alone were in no group yet.
    links = []
    for link in sorted(pairs):  # regions are disjoint, but a link may be found beside its region
        (worked,) = yield from _round(count, [link])
        if not worked:
            links.append(link)
    return count.result(Why.FOUND if links else Why.NOT_AGAIN, (), links)
