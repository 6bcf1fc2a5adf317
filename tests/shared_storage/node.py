"""One node of the machine: does what standard input asks for, a line of JSON each."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.shared_storage.guest import SHARED, run
from tests.shared_storage.operations import Operations


def mount(source: str, options: str) -> None:
    """Mount the shared folder, in this node alone."""
    run("mount", "-t", "nfs", "-o", options, source, str(SHARED))


def unmount() -> None:
    """Take it away again; whoever still has it open keeps it."""
    run("umount", "-l", str(SHARED))


def main(name: str) -> int:
    """Answer until there are no more questions."""
    socket.sethostname(name)
    for folder in ("/run", "/var/lib/nfs"):
        run("mount", "-t", "tmpfs", "tmpfs", folder)
    for folder in ("sm", "sm.bak"):
        Path("/var/lib/nfs", folder).mkdir()
    Path("/var/lib/nfs/state").touch()
    for words in (("rpcbind", "-w"), ("rpc.statd", "--no-notify")):
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    operations = Operations(SHARED)
    own = {"mount": mount, "unmount": unmount}
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any]
        try:
            act = own.get(question["what"]) or getattr(operations, question["what"])
            answer = {"value": act(**question["values"])}
        except Exception as error:
            answer = {"error": f"{error!r} {traceback.format_exc()[-1500:]}"}
        sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
