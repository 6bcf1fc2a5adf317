"""What one compute node is like, looked at from inside a job: ``doctor --live``.

The process ``live_node FOLDER ADDRESSES`` on the other nodes of the job; on its own node the job
calls ``inspect_node``.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.control.addresses import candidates, format_addresses, parse_addresses
from slurm_forge.control.handshake import Credentials, Role, accept, dial, welcome
from slurm_forge.control.interfaces import interface_addresses, interfaces
from slurm_forge.errors import ForgeError
from slurm_forge.files import fsync_directory
from slurm_forge.knobs import process_environ
from slurm_forge.launch.diagnose.live_meeting import (
    LOGIN_LOCK,
    ONCE,
    is_locked,
    is_taken,
    read_card,
)
from slurm_forge.open_files import open_files_allowed
from slurm_forge.recovery.live_observations import NodeSeen, NodeStorage, Reach
from slurm_forge.slurm.environment import node_name
from slurm_forge.slurm.kernel import available_memory, read_memory_limit
from slurm_forge.slurm.process import Runner, run_command
from slurm_forge.store.room import free_space

#: What a node prints before its report.
PREFIX = "forge-live-node "

_ANSWER = timedelta(seconds=10)
_TORCH = timedelta(seconds=90)
_CONNECT_S = 3.0
#: Where Python's packages come from: whoever can't connect to it can't install on the way.
_OUTSIDE = ("pypi.org", 443)
_MIB = 1 << 20


def inspect_node(
    folder: Path,
    *,
    environ: Mapping[str, str],
    runner: Runner = run_command,
    python: str = sys.executable,
) -> NodeSeen:
    """Everything but the way to other nodes; never raises for what the node is like."""
    job = environ.get("SLURM_JOB_ID", "")
    node = NodeSeen(
        host=node_name(environ),
        storage=look_at_storage(folder, node_name(environ)),
        python=python,
        proxy=any(environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy")),
        internet=_reaches_outside(),
        memory_free=available_memory(),
        shm_free=_shared_memory(),
        memory_limit=read_memory_limit()[0],
        memory_asked=_requested_memory(environ),
        locked_memory=_locked(),
        open_files=open_files_allowed(),
        interfaces=interfaces(),
        package=True,
    )
    node = _with_commands(node, job, environ, runner)
    return _with_torch(node, environ, runner, python)


def look_at_storage(folder: Path, host: str) -> NodeStorage:
    """Visible, writable, exclusive creation, rename, fsync, and whether the login's lock holds."""
    storage = NodeStorage()
    try:
        nonce = read_card(folder)
        storage = replace(storage, visible=True)
        name = f"from-{host}"
        began = time.monotonic()
        with (folder / f".{name}").open("xb") as file:
            file.write(nonce.encode())
            file.flush()
            os.fsync(file.fileno())
        synced = time.monotonic()
        (folder / f".{name}").replace(folder / name)
        fsync_directory(folder)
        storage = replace(
            storage,
            writable=True,
            synced_s=synced - began,
            renamed_s=time.monotonic() - synced,
            exclusive=is_taken(folder / ONCE),
        )
        refused = is_locked(folder / LOGIN_LOCK)
        return replace(storage, lock_refused=refused, no_locks=refused is None)
    except OSError as error:
        return replace(storage, problem=f"{error.strerror or error}")
    except ForgeError as error:
        return replace(storage, problem=error.message)


# --- Slurm and Python -----------------------------------------------------------------------------


def _with_commands(
    node: NodeSeen, job: str, environ: Mapping[str, str], runner: Runner
) -> NodeSeen:
    """Which of Slurm's commands are here and answer; ``sbatch`` by a job that is not submitted."""
    path = environ.get("PATH", os.defpath)
    questions = {
        "scontrol": ("scontrol", "show", "job", job),
        "squeue": ("squeue", "-h", "-j", job),
        "sacct": ("sacct", "-n", "-X", "-j", job, "-o", "JobID"),
    }
    missing, silent, answered = [], [], []
    for name, argv in questions.items():
        if shutil.which(name, path=path) is None:
            missing.append(name)
        elif _works(argv, environ, runner):
            answered.append(name)
        else:
            silent.append(name)
    submits = None
    if shutil.which("sbatch", path=path) is None:
        missing.append("sbatch")
    else:
        submits = _works(_nothing(environ), _outside_of_job(environ), runner)
    return replace(
        node,
        commands=tuple(answered),
        missing=tuple(missing),
        silent=tuple(silent),
        may_submit=submits,
    )


def _works(argv: Sequence[str], environ: Mapping[str, str], runner: Runner) -> bool:
    try:
        return runner(argv, _ANSWER, environ).returncode == 0
    except OSError:
        return False


def _nothing(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A job like this one, of which Slurm only says whether it would take it."""
    like = {"partition": "PARTITION", "account": "ACCOUNT", "qos": "QOS"}
    values = {option: environ.get(f"SLURM_JOB_{name}", "") for option, name in like.items()}
    options = [f"--{option}={value}" for option, value in values.items() if value]
    return ("sbatch", "--test-only", "--time=1", "--ntasks=1", *options, "--wrap=true")


def _outside_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    return {n: v for n, v in environ.items() if not n.startswith("SLURM") or n == "SLURM_CONF"}


def _with_torch(
    node: NodeSeen, environ: Mapping[str, str], runner: Runner, python: str
) -> NodeSeen:
    """The version of torch that ranks import, and how long that takes; None where they can't."""
    began = time.monotonic()
    try:
        result = runner([python, "-c", "import torch; print(torch.__version__)"], _TORCH, environ)
    except OSError:
        return node
    if result.returncode != 0:
        return node
    return replace(node, torch=result.stdout.strip()[:60], torch_s=time.monotonic() - began)


# --- the machine ----------------------------------------------------------------------------------


def _reaches_outside() -> bool:
    try:
        socket.create_connection(_OUTSIDE, timeout=_CONNECT_S).close()
    except (OSError, UnicodeError):
        return False
    return True


def _shared_memory() -> int | None:
    with suppress(OSError):
        return free_space(Path("/dev/shm")).size  # noqa: S108  nothing is written there
    return None


def _requested_memory(environ: Mapping[str, str]) -> int | None:
    """What the job has been given on this node, in bytes; Slurm counts in MiB."""
    per_node = environ.get("SLURM_MEM_PER_NODE", "")
    if per_node.isdecimal():
        return int(per_node) * _MIB
    each, cpus = environ.get("SLURM_MEM_PER_CPU", ""), environ.get("SLURM_CPUS_ON_NODE", "")
    return int(each) * int(cpus) * _MIB if each.isdecimal() and cpus.isdecimal() else None


def _locked() -> int | None:
    """How much memory a process may pin, which fabrics need; None is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


# --- from one node to another ---------------------------------------------------------------------


@contextmanager
def open_door(nonce: str) -> Iterator[str]:
    """Listen on a port of this node for the other ones, who have to know what the card says.

    Every way here, as ``host1,host2:port``: names, then the address of each interface.
    """
    with socket.create_server(("", 0)) as server:
        known = [host for host in candidates() if not host.startswith("local-")]
        known += [address for _, address in interface_addresses()]
        hosts = tuple(dict.fromkeys(known)) or ("127.0.0.1",)
        serving = threading.Thread(target=_serve, args=(server, nonce), daemon=True)
        serving.start()
        yield format_addresses(hosts, server.getsockname()[1])


def _serve(server: socket.socket, nonce: str) -> None:
    with suppress(OSError):  # closed
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError, EOFError, ForgeError):
                connection.settimeout(_CONNECT_S)
                welcome(accept(connection, _credentials(nonce))[0])


def knock(addresses: str, nonce: str) -> tuple[Reach, ...]:
    """Try each address of ``host1,host2:port`` by itself; who listens must know the card, too."""
    hosts, port = parse_addresses(addresses)
    return tuple(_one(host, port, nonce) for host in hosts)


def _credentials(card: str) -> Credentials:
    """The card is their secret: it lies in a folder that is the user's alone."""
    return Credentials("live", card)


def _one(host: str, port: int, card: str) -> Reach:
    began = time.monotonic()
    try:
        dial(
            (host,), port, _credentials(card), Role.NODE, b"live", who=host, within_s=_CONNECT_S
        ).close()
    except ForgeError as error:
        return Reach(address=host, problem=error.message)
    return Reach(address=host, connected_s=time.monotonic() - began)


def main(argv: Sequence[str] | None = None) -> int:
    """``FOLDER ADDRESSES``: look, knock at the first node, print the report."""
    folder, addresses = sys.argv[1:] if argv is None else argv
    node = inspect_node(Path(folder), environ=process_environ())
    with suppress(OSError):  # without the card nobody would answer
        node = replace(node, reaches=knock(addresses, read_card(Path(folder))))
    sys.stdout.write(f"{PREFIX}{json.dumps(asdict(node))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
