"""What a server does to two nodes: it restarts, withdraws its export, refuses, or is full.

What a node was told is done must be seen by the other one; what was refused may be missing, and the
same process goes on once the fault is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.shared_storage.guest import (
    FOLDER,
    Node,
    disk_full,
    export_withdrawn,
    exported,
    quota,
    server_down,
)

_USER = 1000
_PATIENCE_S = 240.0
#: More refused lines than a journal would ever have tried new files for.
_REFUSED = 10


def the_server_restarts(one: Node, other: Node) -> Iterator[str]:
    """Thrice, for longer and longer, in the middle of saves and appends: none is refused."""
    yield from _begin_to_work(one)
    for down_s in (0.2, 3.0, 25.0):
        yield from _until_it_goes_on(one)
        with server_down():
            time.sleep(down_s)
    yield from _until_it_goes_on(one)
    yield from one.do("pause")
    for what in one.do("told")["refused"]:
        yield f"refused: {what}"
    yield from _nothing_is_lost(one, other)


def the_export_is_withdrawn(one: Node, other: Node) -> Iterator[str]:
    """Every handle is stale for a while: what is refused is refused, the rest is there."""
    yield from _begin_to_work(one)
    yield from _until_it_goes_on(one)
    with export_withdrawn():
        for what in ("saved", "appended"):
            yield from _until(one, lambda told, what=what: _refused(told, what) >= 2)
        time.sleep(10)
        if not one.refused("is_fenced", attempt=1):
            yield "the fence of a run that can't be read does not fail"
    yield from _until_it_goes_on(one)
    yield from one.do("pause")
    yield from _nothing_is_lost(one, other)


def the_disk_is_full(one: Node, other: Node) -> Iterator[str]:
    """ENOSPC, which a client hears of when it syncs or closes a file."""
    yield from _begin(one)
    with disk_full():
        yield from _is_refused(one, "ENOSPC")
    yield from _goes_on(one)
    yield from _nothing_is_lost(one, other)


def a_quota_is_exceeded(one: Node, other: Node) -> Iterator[str]:
    """EDQUOT, likewise, of a user who is not root."""
    FOLDER.chmod(0o777)
    for node in (one, other):
        node.do("become", user=_USER)
        node.do("use", name="theirs")
    one.do("create")
    yield from _begin(one)
    with quota(_USER):
        yield from _is_refused(one, "EDQUOT")
    yield from _goes_on(one)
    yield from _nothing_is_lost(one, other)


def a_read_only_export_is_read(one: Node, other: Node) -> Iterator[str]:
    """Who can't write is refused, and reads what is there."""
    yield from _begin(one)
    with exported("ro,no_root_squash"):
        one.do("save_next")
        one.do("append_next")
        refused = [why.partition(" ")[0] for _, why in one.do("told")["refused"]]
        if refused != ["EROFS", "EROFS"]:
            yield f"refused: {one.do('told')['refused']}"
        yield from _is_there(one, other)
    yield from _goes_on(one)
    yield from _nothing_is_lost(one, other)


def root_is_squashed(one: Node, other: Node) -> Iterator[str]:
    """Root is nobody to the server: refused, and with the reason; a user is not concerned."""
    FOLDER.chmod(0o777)
    with exported("rw,root_squash"):
        one.do("become", user=_USER)
        for node in (one, other):
            node.do("use", name="theirs")
        one.do("create")
        yield from _begin(one)
        for what in ("claims", "steps", "commits", "is_done"):
            if "Permission" not in (why := other.refused(what)):
                yield f"root asks for {what}: {why or 'answered'}"
        other.do("use", name="roots")
        why = other.refused("create")
        if "root_squash" not in why:
            yield f"root creates a run: {why or 'done'}"
        if (FOLDER / "roots").exists():
            yield "what root could not own is left behind"
        other.do("become", user=_USER)
        other.do("use", name="theirs")
        yield from _goes_on(one)
        yield from _nothing_is_lost(one, other)


def modes_refuse(one: Node, other: Node) -> Iterator[str]:
    """A folder that a user may not write into: refused, and nothing is left."""
    closed = FOLDER / "closed"
    closed.mkdir(mode=0o555)
    FOLDER.chmod(0o777)
    for node in (one, other):
        node.do("become", user=_USER)
        node.do("use", name="closed/run")
        if "Permission" not in (why := node.refused("create")):
            yield f"{node.name}: {why or 'created'}"
    left = [each.name for each in closed.iterdir()]
    if left:
        yield f"left: {left}"
    closed.chmod(0o777)
    one.do("create")
    yield from _begin(one)
    yield from _nothing_is_lost(one, other)


def a_run_is_resumed_on_the_other_node(one: Node, other: Node) -> Iterator[str]:
    """Ranks train, save and stop on one node; ranks on the other one resume, and end the same."""
    one.begin("train", until=9)
    other.begin("train", until=None)
    for node in (one, other):
        yield from node.end()


def _begin_to_work(one: Node) -> Iterator[str]:
    one.do("claim", times=1)
    for act in ("save_next", "append_next"):
        one.do("go_on", act=act)
    yield from ()


def _begin(one: Node) -> Iterator[str]:
    one.do("claim", times=1)
    yield from _goes_on(one)


def _goes_on(one: Node) -> Iterator[str]:
    """Two of each are done, at once."""
    before = one.do("told")
    for act in ("save_next", "append_next") * 2:
        one.do(act)
    told = one.do("told")
    for what in ("saved", "appended"):
        if len(told[what]) != len(before[what]) + 2:
            yield f"{what} {told[what]} after {before[what]}: {told['refused'][-2:]}"


def _is_refused(one: Node, error: str) -> Iterator[str]:
    """Each save, and each line once what was allocated before is full."""
    for _ in range(60):
        one.do("append_next")
        if _refused(one.do("told"), "appended") >= _REFUSED:
            break
    for _ in range(2):
        one.do("save_next")
    told = one.do("told")
    refused = told["refused"]
    if _refused(told, "appended") < _REFUSED or _refused(told, "saved") < 2:
        yield f"only {len(refused)} were refused"
    if wrong := [why for _, why in refused if not why.startswith(error)]:
        yield f"refused with {wrong[:3]}"
    if not any("fsync" in why or "close" in why for _, why in refused):
        yield f"no error came as late as in fsync or close: {refused[:3]}"


def _refused(told: dict[str, Any], what: str) -> int:
    return sum(each == what for each, _ in told["refused"])


def _until(one: Node, condition: Callable[[dict[str, Any]], bool]) -> Iterator[str]:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition(told := one.do("told")):
        if time.monotonic() > deadline:
            yield f"nothing goes on: {told}"
            return
        time.sleep(0.2)


def _until_it_goes_on(one: Node) -> Iterator[str]:
    """Until one more of each is done."""
    before = one.do("told")
    yield from _until(
        one, lambda told: all(len(told[w]) > len(before[w]) for w in ("saved", "appended"))
    )


def _is_there(one: Node, other: Node) -> Iterator[str]:
    """All that one node was told is done is read on the other one."""
    told = one.do("told")
    steps = other.do("steps")
    if missing := set(told["saved"]) - set(steps):
        yield f"saved, and not there: {missing}"
    if other.do("verify") != max(steps):
        yield f"the newest checkpoint can't be read: {other.do('verify')} of {steps}"
    commits = other.do("commits")
    if missing := {step for step in told["appended"] if [1, step] not in commits}:
        yield f"appended, and not there: {missing}"


def _nothing_is_lost(one: Node, other: Node) -> Iterator[str]:
    yield from _is_there(one, other)
    attempt = other.do("claim", times=1)[0]
    if not one.do("is_fenced", attempt=1):
        yield "not fenced"
    yield from other.do("prune", keep=2, attempt=attempt)
    if hidden := other.do("hidden"):
        yield f"left: {hidden}"


FAULTS = (
    the_server_restarts,
    the_export_is_withdrawn,
    the_disk_is_full,
    a_quota_is_exceeded,
    a_read_only_export_is_read,
    root_is_squashed,
    modes_refuse,
)
