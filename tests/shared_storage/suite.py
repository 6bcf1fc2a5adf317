"""The first process of the machine that is ours: every case with every way of mounting."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from tests.shared_storage.cases import CASES, INJECTED, STRUCK, Case
from tests.shared_storage.faults import FAULTS, a_run_is_resumed_on_the_other_node
from tests.shared_storage.guest import SERVER, Node, mounted, start_server
from tests.shared_storage.repeater import PORT, Repeater

#: What a line begins with that says which case is next, and one that says what came of it.
BEGUN = "begun: "
MARK = "result: "
#: The last line, once every case has come to an end.
OVER = "all cases are over"
MOUNTS = (
    "vers=3",
    "vers=4.2",
    "vers=4.0",
    "vers=4.1",
    "vers=3,nolock",
    "vers=3,noac",
    "vers=4.2,actimeo=600",
    "vers=4.2,nocto",
    f"vers=3,proto=tcp,mountproto=tcp,port={PORT}",
    f"vers=4.0,port={PORT}",
)
#: What a mount does not promise: locks of one node alone (nfs(5)).
PROMISES_LESS = {"vers=3,nolock": {"locks_exclude"}}
#: Every call is struck, and ranks train, on these alone: it takes minutes.
_STRUCK_ON = ("vers=3", "vers=4.2")
_FAULTS_ON = ("vers=3", "vers=4.1", "vers=4.2")


def main(mounts: Sequence[str], names: Sequence[str]) -> int:
    """Print a line of JSON for each."""
    start_server()
    repeater = Repeater(SERVER)
    nodes = [Node(1), Node(2)]
    # What takes longest comes last, for every way of mounting.  What changes the server or the
    # user begins with a fresh mount; to all others a folder of their own is as good.
    groups: tuple[tuple[tuple[Case, ...], Sequence[str]], ...] = (
        (CASES, tuple(mounts)),
        *(((case,), _FAULTS_ON) for case in FAULTS),
        (STRUCK, _STRUCK_ON),
        ((a_run_is_resumed_on_the_other_node,), _STRUCK_ON),
    )
    for cases, only in groups:
        wanted = [case for case in cases if not names or case.__name__ in names]
        for options in [each for each in mounts if each in only and wanted]:
            with mounted(nodes, options):
                for case in wanted:
                    _run_case(case, options, nodes, repeater)
    print(f"\n{OVER}", flush=True)
    return 0


def _run_case(case: Case, options: str, nodes: Sequence[Node], repeater: Repeater) -> None:
    print(f"\n{BEGUN}{options}, {case.__name__}", flush=True)
    begun, before = time.monotonic(), repeater.repeated
    one, other = nodes
    INJECTED.clear()
    try:
        for node in nodes:
            node.do("use", name=f"run-{case.__name__}")
        one.do("create")
        other.do("claims")
        problems = list(case(one, other))
        for node in nodes:
            node.do("clear")
    except RuntimeError as error:
        problems = [str(error)]
    found = {
        "mount": options, "case": case.__name__, "problems": problems,
        "struck": len(INJECTED), "repeated": repeater.repeated - before,
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    sys.exit(main([m for m in sys.argv[1].split(";") if m] or MOUNTS, sys.argv[2:]))
