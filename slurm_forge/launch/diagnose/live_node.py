"""What one compute node is like, looked at from inside a job: ``doctor --live``.

Run by its module name on the other nodes of the job; the driver calls ``inspect_node`` on its own.
The folder is one that the login node has laid files out in: a card with the nonce, a file to be
created exclusively, and a lock that it holds.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.interfaces import interfaces
from slurm_forge.errors import ForgeError
from slurm_forge.files import fsync_directory, read_trusted
from slurm_forge.knobs import process_environ
from slurm_forge.lock import exclusive
from slurm_forge.recovery.live_observations import (
    NodeSeen,
    NodeStorage,
    Reach,
)
from slurm_forge.slurm.environment import node_name
from slurm_forge.slurm.kernel import read_memory_limit
from slurm_forge.slurm.process import Runner, run_command

#: Files that the login node lays out, and what a node prints before its report.
CARD, ONCE, LOGIN_LOCK = "card", "once", "login.lock"
PREFIX = "forge-live-node "
GREETING = b"forge-live "

_ANSWER = timedelta(seconds=10)
_TORCH = timedelta(seconds=90)
_CONNECT_S = 3.0
#: Where Python's packages come from: whoever can't connect to it can't install on the way.
_OUTSIDE = ("pypi.org", 443)
_MIB = 1 << 20


def read_card(folder: Path) -> str:
    """The nonce of this look: in a folder that is the user's alone, never on a command line."""
    return read_trusted(folder / CARD, 256).decode()


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
        memory_free=_available(),
        shm_free=_free("/dev/shm"),  # noqa: S108  nothing is written there
        memory_limit=read_memory_limit()[0],
        memory_asked=_requested_memory(environ),
        locked_memory=_locked(),
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
        renamed = time.monotonic()
        storage = replace(
            storage, writable=True, synced_s=synced - began, renamed_s=renamed - synced
        )
        return _with_locks(replace(storage, exclusive=_refused(folder / ONCE)), folder / LOGIN_LOCK)
    except OSError as error:
        return replace(storage, problem=f"{error.strerror or error}")
    except ForgeError as error:
        return replace(storage, problem=error.message)


def _with_locks(storage: NodeStorage, lock: Path) -> NodeStorage:
    try:
        with exclusive(lock, timedelta(0)) as locked:
            return replace(storage, lock_refused=False if locked else None, no_locks=not locked)
    except ForgeError:
        return replace(storage, lock_refused=True)


def _refused(once: Path) -> bool:
    """Whether a name that is taken can't be created once more."""
    try:
        os.close(os.open(once, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        return error.errno == errno.EEXIST
    return False


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


def _available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _free(place: str) -> int | None:
    try:
        stat = os.statvfs(place)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


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


def knock(addresses: str, nonce: str) -> tuple[Reach, ...]:
    """Try each address of ``host1,host2:port`` by itself; who listens there must know the nonce."""
    hosts, port = parse_addresses(addresses)
    return tuple(_one(host, port, nonce) for host in hosts)


def _one(host: str, port: int, nonce: str) -> Reach:
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            connection.sendall(GREETING + nonce.encode() + b"\n")
            answer = connection.recv(64)
    except (OSError, UnicodeError) as error:
        return Reach(address=host, problem=str(getattr(error, "strerror", None) or error))
    if answer != nonce.encode():
        return Reach(address=host, problem="another program answers there")
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
