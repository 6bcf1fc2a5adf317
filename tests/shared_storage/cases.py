"""What two nodes do with one folder, and what is wrong about what came of it.

Every case begins with the second node having looked, so that its kernel remembers what is old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from tests.crash.shim import Strike
from tests.shared_storage.guest import Node

Case: TypeAlias = Callable[[Node, Node], Iterator[str]]
#: Longer than the granularity of a server's timestamps.
_TICK_S = 0.05


def _expect(what: str, found: Any, wanted: Any) -> Iterator[str]:
    if found != wanted:
        yield f"{what}: {found}, not {wanted}"


def claims_are_exclusive(one: Node, other: Node) -> Iterator[str]:
    """Both claim as fast as they can: no number twice, none forgotten."""
    one.begin("claim", times=12)
    other.begin("claim", times=12)
    taken = [*one.end(), *other.end()]
    yield from _expect("claimed", sorted(taken), list(range(1, 25)))
    for node in (one, other):
        yield from _expect(f"{node.name} sees", node.do("claims"), list(range(1, 25)))


def names_are_created_once(one: Node, other: Node) -> Iterator[str]:
    """Of two that create a file, one is told that it has."""
    for number in range(12):
        one.begin("create_once", name=f"once-{number}")
        other.begin("create_once", name=f"once-{number}")
        got = [one.end(), other.end()]
        yield from _expect(f"once-{number}", sorted(got), [False, True])


def a_newer_attempt_fences(one: Node, other: Node) -> Iterator[str]:
    """The moment that a later attempt is claimed, the earlier one is told so."""
    number = 0
    for _ in range(4):
        number = one.do("claim", times=1)[0]
        yield from _expect("before", one.do("is_fenced", attempt=number), False)
        time.sleep(_TICK_S)
        other.do("claim", times=1)
        yield from _expect("after", one.do("is_fenced", attempt=number), True)


def a_newer_launch_fences(one: Node, other: Node) -> Iterator[str]:
    """The same for a launch of an attempt."""
    one.do("claim", times=1)
    one.do("mark", attempt=1, launch=2)
    for launch in (2, 3, 4):
        fenced = one.do("is_fenced", attempt=1, launch=launch)
        yield from _expect(f"launch {launch} before", fenced, False)
        time.sleep(_TICK_S)
        other.do("mark", attempt=1, launch=launch + 1)
        fenced = one.do("is_fenced", attempt=1, launch=launch)
        yield from _expect(f"launch {launch} after", fenced, True)


def what_is_replaced_is_read_anew(one: Node, other: Node) -> Iterator[str]:
    """``run.yaml`` of a change: the other node reads the new one."""
    for number in range(8):
        one.do("replace", name="run.yaml", text=f"version: {number:03}\n")
        text = other.do("read", name="run.yaml")
        yield from _expect("read", text, f"version: {number:03}\n")


def replacing_while_it_is_read(one: Node, other: Node) -> Iterator[str]:
    """No reader is told of a stale handle."""
    one.do("replace", name="run.yaml", text="version: 000\n")
    other.do("go_on", act="read", name="run.yaml")
    for number in range(30):
        one.do("replace", name="run.yaml", text=f"version: {number:03}\n")
    yield from other.do("pause")


def the_end_is_seen(one: Node, other: Node) -> Iterator[str]:
    """Who starts a run that has ended notices."""
    yield from _expect("before", other.do("is_done"), False)
    time.sleep(_TICK_S)
    one.do("mark_done")
    yield from _expect("after", other.do("is_done"), True)


def a_journal_is_read_while_it_is_written(one: Node, other: Node) -> Iterator[str]:
    """What was synced is read on the other node, once, whatever is rotated meanwhile."""
    one.do("write", attempt=1, first=0, count=3, rotate_at=2000)
    other.do("go_on", act="commits")
    for first in range(3, 150, 6):
        one.do("write", attempt=1, first=first, count=6)
    yield from other.do("pause")
    found = other.do("commits")
    yield from _expect("commits", found, [[1, step] for step in range(0, 153, 3)])


def a_journal_is_archived_while_it_is_read(one: Node, other: Node) -> Iterator[str]:
    """Files that go, archives that come: no event is missed."""
    for attempt in range(1, 7):
        one.do("write", attempt=attempt, first=0, count=9)
    one.do("close_journals")
    other.do("commits")
    other.do("go_on", act="commits")
    for attempt in range(7, 12):
        one.do("write", attempt=attempt, first=0, count=9)
        one.do("close_journals")
        one.do("compact", attempt=attempt)
    yield from other.do("pause")
    wanted = [[attempt, step] for attempt in range(1, 12) for step in (0, 3, 6)]
    yield from _expect("commits", other.do("commits"), wanted)
    left = one.do("compact", attempt=11)
    yield from _expect("archived", [name for name in left if name.startswith("1-")], [])


def both_archive(one: Node, other: Node) -> Iterator[str]:
    """Two that believe to be the newest attempt make the same archives."""
    for attempt in range(1, 10):
        one.do("write", attempt=attempt, first=0, count=9)
    one.do("close_journals")
    other.do("commits")
    one.begin("compact", attempt=9)
    other.begin("compact", attempt=9)
    one.end(), other.end()
    wanted = [[attempt, step] for attempt in range(1, 10) for step in (0, 3, 6)]
    for node in (one, other):
        yield from _expect(node.name, node.do("commits"), wanted)


def a_checkpoint_is_seen_when_it_is_published(one: Node, other: Node) -> Iterator[str]:
    """The next attempt, on the other node, finds and reads the newest one."""
    one.do("claim", times=1)
    for step in range(1, 4):
        other.do("steps")
        one.do("publish", step=step, size=300_000)
        yield from _expect("seen", other.do("steps")[0], step)
        yield from _expect("read", other.do("verify"), step)


def pruning_while_it_is_read(one: Node, other: Node) -> Iterator[str]:
    """Whoever reads finds a whole one, and never an older one than before."""
    one.do("claim", times=1)
    for step in (1, 2):
        one.do("publish", step=step, size=300_000)
    other.do("go_on", act="verify")
    for step in range(3, 10):
        one.do("publish", step=step, size=300_000)
        for problem in one.do("prune", keep=1):
            yield f"prune: {problem}"
    yield from other.do("pause")
    yield from _expect("left", one.do("steps"), [9, 8])
    yield from _expect("hidden", one.do("hidden"), [])


def what_is_open_is_pruned(one: Node, other: Node) -> Iterator[str]:
    """A file that a process still reads does not keep the next prune from deleting it."""
    one.do("claim", times=1)
    one.do("publish", step=1, size=5000)
    one.do("open_newest")  # on the node that deletes: the client keeps it, as .nfs…
    other.do("open_newest")  # on another one: its handle is stale then
    for step in (2, 3, 4):
        one.do("publish", step=step, size=5000)
    one.do("prune", keep=1)
    one.do("read_open")
    other.do("read_open")
    one.do("prune", keep=1)
    yield from _expect("left", other.do("steps"), [4, 3])
    yield from _expect("hidden", one.do("hidden"), [])


def locks_exclude(one: Node, other: Node) -> Iterator[str]:
    """A lock of one node is refused to the other; where locks are local to a node it is not."""
    yield from _expect("taken", one.do("lock"), True)
    yield from _expect("refused", other.do("lock"), False)
    one.do("unlock")
    yield from _expect("given back", other.do("lock"), True)
    other.do("unlock")


def a_stop_is_seen(one: Node, other: Node) -> Iterator[str]:
    """STOP, made on one node, is seen on the other one the next time it looks."""
    for name in ("STOP", "SAVE"):
        yield from _expect(f"{name} before", other.do("is_asked", name=name), False)
        time.sleep(_TICK_S)
        one.do("touch", name=name)
        yield from _expect(f"{name} after", other.do("is_asked", name=name), True)


def _strike(
    one: Node,
    other: Node,
    act: str,
    *,
    attempts: Sequence[int] = (),
    steps: Sequence[int] = (),
    **values: Any,
) -> Iterator[str]:
    """Strike one node at every call of ``act``: the other one goes on, with all that was told.

    ``attempts`` and ``steps`` are those of the journal and of the checkpoints before.
    """
    calls: list[str] = []
    for strike in (Strike.KILL_BEFORE, Strike.EIO_ONCE, Strike.REPEATED):
        for call in range(99):
            if strike is not Strike.KILL_BEFORE and call == len(calls):
                break
            if strike is Strike.REPEATED and calls[call] not in _CHANGES_NAMES:
                continue
            name = f"{act}-{strike}-{call}"
            for node in (one, other):
                node.do("use", name=name)
            one.do("create")
            one.do("claim", times=1)
            for attempt in attempts:
                one.do("write", attempt=attempt, first=0, count=4)
            one.do("close_journals")
            for step in steps:
                one.do("publish", step=step, size=2000)
            for look in ("claims", *["commits"] * bool(attempts), *["steps"] * bool(steps)):
                other.do(look)
            found = one.do("struck", act=act, strike=strike, call=call, **values)
            if found["outcome"] == "over":
                break
            if strike is Strike.KILL_BEFORE:
                calls.append(found["site"].split()[0])
            INJECTED.append(name)
            where = f"{strike.name} at {found['site']} ({found['outcome']})"
            for problem in _goes_on(one, other, found["outcome"], act, attempts, steps):
                yield f"{where}: {problem}"
            if strike is Strike.REPEATED and found["outcome"] != "done":
                yield where


#: What a server that has forgotten its answer answers otherwise the second time.
_CHANGES_NAMES = frozenset({"rename", "link", "unlink", "rmdir", "mkdir"})
#: What was struck so far.
INJECTED: list[str] = []
#: The attempt whose lines are struck.
_STRUCK_ATTEMPT = 5


def _goes_on(
    one: Node,
    other: Node,
    outcome: str,
    act: str,
    attempts: Sequence[int],
    steps: Sequence[int],
) -> Iterator[str]:
    if outcome.startswith("crashed"):
        yield outcome
    claims = other.do("claims")
    attempt = other.do("claim", times=1)[0]
    if attempt in claims or (act == "claim" and outcome == "done" and claims != [1, 2]):
        yield f"attempt {attempt} after {claims}"
    yield from _expect("fenced", one.do("is_fenced", attempt=1), True)
    if attempts:
        yield from _lines_go_on(one, other, outcome, act, attempts, attempt + 6)
    if steps:
        yield from _saves_go_on(one, other, outcome, act, attempt)


def _lines_go_on(
    one: Node, other: Node, outcome: str, act: str, attempts: Sequence[int], later: int
) -> Iterator[str]:
    told = [[attempt, step] for attempt in attempts for step in (0, 3)]
    if act == "write" and outcome == "done":
        told += [[_STRUCK_ATTEMPT, step] for step in (0, 3)]
    commits = other.do("commits")
    if commits[: len(told)] != told:
        yield f"commits {commits}"
    other.do("write", attempt=later, first=0, count=4)
    other.do("compact", attempt=later)
    other.do("close_journals")
    more = [each for each in one.do("commits") if each not in commits]
    yield from _expect("the next lines", more, [[later, 0], [later, 3]])


def _saves_go_on(one: Node, other: Node, outcome: str, act: str, attempt: int) -> Iterator[str]:
    newest = {"publish": 4}.get(act, 3)
    step = other.do("verify")
    if step not in ({newest} if outcome == "done" else {3, newest}):
        yield f"a restart finds step {step}"
    other.do("publish", step=9, size=2000, attempt=attempt)
    yield from _expect("the next save", one.do("verify"), 9)
    yield from _expect("prune", other.do("prune", keep=1, attempt=attempt), [])
    yield from _expect("hidden", one.do("hidden"), [])


def struck_while_it_publishes(one: Node, other: Node) -> Iterator[str]:
    """A save."""
    yield from _strike(one, other, "publish", steps=(3,), step=4, size=2000)


def struck_while_it_claims(one: Node, other: Node) -> Iterator[str]:
    """A start."""
    yield from _strike(one, other, "claim", times=1)


def struck_while_it_prunes(one: Node, other: Node) -> Iterator[str]:
    """A deletion."""
    yield from _strike(one, other, "prune", steps=(1, 2, 3), keep=1)


def struck_while_it_archives(one: Node, other: Node) -> Iterator[str]:
    """A start that archives."""
    yield from _strike(one, other, "compact", attempts=(1, 2, 3), attempt=3)


def struck_while_it_writes(one: Node, other: Node) -> Iterator[str]:
    """Lines of a journal that is rotated once."""
    yield from _strike(
        one, other, "write",
        attempts=(1,), attempt=_STRUCK_ATTEMPT, first=0, count=5, rotate_at=700,
    )  # fmt: skip


STRUCK: tuple[Case, ...] = (
    struck_while_it_publishes,
    struck_while_it_claims,
    struck_while_it_prunes,
    struck_while_it_archives,
    struck_while_it_writes,
)
CASES: tuple[Case, ...] = (
    claims_are_exclusive,
    names_are_created_once,
    a_newer_attempt_fences,
    a_newer_launch_fences,
    what_is_replaced_is_read_anew,
    replacing_while_it_is_read,
    the_end_is_seen,
    a_stop_is_seen,
    a_journal_is_read_while_it_is_written,
    a_journal_is_archived_while_it_is_read,
    both_archive,
    a_checkpoint_is_seen_when_it_is_published,
    pruning_while_it_is_read,
    what_is_open_is_pruned,
    locks_exclude,
)
