"""Facts about this machine: programs, Slurm's version, control groups, free ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from slurm_forge.errors import ConfigError, UnsupportedError
from slurm_forge.testing.cluster.layout import CgroupKind, Platform, Ports, SlurmVersion

# Debian's and Ubuntu's package for each program; a Slurm built from source has them as well.
_PROGRAMS = (
    ("munged", "munge"),
    ("slurmctld", "slurmctld"),
    ("slurmd", "slurmd"),
    ("sbatch", "slurm-client"),
    ("srun", "slurm-client"),
)
_ACCOUNTING_PROGRAMS = (
    ("slurmdbd", "slurmdbd"),
    ("sacctmgr", "slurm-client"),
    ("mariadbd", "mariadb-server"),
    ("mariadb-install-db", "mariadb-server"),
)
# Debian puts daemons where an ordinary user's PATH does not look.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")

_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Below the kernel's range for outgoing connections (32768 on), so nothing drifts into a block.
_FIRST_PORT = 21_000
_BLOCK = 40
_SLOTS = 64


def path_with_prefix(path: str, prefix: Path | None) -> str:
    """``path`` with the programs of the Slurm below ``prefix`` first; ConfigError without one."""
    if prefix is None:
        return path
    if not (prefix / "sbin" / "slurmctld").is_file():
        raise ConfigError(
            f"{prefix} holds no Slurm: there is no sbin/slurmctld below it",
            next_step="Name what Slurm was built with as --prefix; scripts/build-slurm builds one.",
        )
    own = [str(prefix / name) for name in ("bin", "sbin")]
    return os.pathsep.join([*own, *(entry for entry in path.split(os.pathsep) if entry not in own)])


def search_path(path: str) -> str:
    """``path`` with the directories of daemons added at its end."""
    return os.pathsep.join([*path.split(os.pathsep), *_SBIN])


def missing_packages(path: str, *, accounting: bool = True) -> tuple[str, ...]:
    """The packages whose programs are not on ``path``, sorted."""
    wanted = _PROGRAMS + (_ACCOUNTING_PROGRAMS if accounting else ())
    where = search_path(path)
    return tuple(sorted({pkg for program, pkg in wanted if not shutil.which(program, path=where)}))


def why_not_here(path: str, *, accounting: bool = True) -> str | None:
    """Why no cluster can be started on this machine, in words; None where one can."""
    missing = missing_packages(path, accounting=accounting)
    if missing:
        return f"these packages are not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "slurmd can start jobs only as root, and this is not root"
    return None


def parse_version(text: str) -> SlurmVersion:
    """``slurm-wlm 22.05.8`` or ``slurm 26.05.3-rc1``; ValueError for anything else."""
    version = SlurmVersion.parse(text)
    if version is None:
        raise ValueError(f"not a Slurm version: {text!r}")
    return version


def detect_platform(path: str) -> Platform:
    """Ask slurmctld and the kernel.  The host name is the short one, as Slurm uses it."""
    program = shutil.which("slurmctld", path=search_path(path))
    if program is None:
        raise UnsupportedError(
            "slurmctld is not installed", next_step="Start the cluster with --install."
        )
    answer = subprocess.run(
        [program, "-V"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    return Platform(
        hostname=socket.gethostname().partition(".")[0],
        version=parse_version(answer),
        cgroup=_detect_cgroup(),
        swap_accounting=(_CGROUP_ROOT / "memory/memory.memsw.limit_in_bytes").exists()
        or bool(list(_CGROUP_ROOT.glob("*/memory.swap.max"))),
    )


def _detect_cgroup() -> CgroupKind:
    """Tried, not guessed: a container may show control groups that it may not write to."""
    # task/cgroup and proctrack/cgroup of version 1 need these two.
    if all(_can_make_group(_CGROUP_ROOT / name) for name in ("memory", "freezer")):
        return CgroupKind.V1
    controllers = _CGROUP_ROOT / "cgroup.controllers"
    with contextlib.suppress(OSError):
        if "memory" in controllers.read_text().split() and _can_make_group(_CGROUP_ROOT):
            return CgroupKind.V2
    return CgroupKind.NONE


def _can_make_group(parent: Path) -> bool:
    probe = parent / f"slurm_forge_probe_{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _groups_of(node: str) -> Iterator[Path]:
    """The top control group of a node in each hierarchy, as Slurm names it (1, then 2)."""
    yield from _CGROUP_ROOT.glob(f"*/slurm_{node}")
    yield from _CGROUP_ROOT.glob(f"system.slice/{node}_slurmstepd.scope")


def processes_in_cgroups(node: str) -> set[int]:
    """The ids of the processes in the control groups of a node."""
    pids: set[int] = set()
    for top in _groups_of(node):
        for members in top.glob("**/cgroup.procs"):
            with contextlib.suppress(OSError):
                pids |= {int(line) for line in members.read_text().split()}
    return pids


def remove_cgroups(node: str) -> bool:
    """Remove the node's control groups, deepest first; False where one is still in use."""
    for top in _groups_of(node):
        folders = sorted((p for p in top.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts))
        for folder in (*folders, top):
            with contextlib.suppress(OSError):
                folder.rmdir()
    return not list(_groups_of(node))


@contextlib.contextmanager
def claimed_ports(nodes: int) -> Iterator[Ports]:
    """A block of ports that nobody listens on, kept from other starters until the block ends.

    The claim is a listening socket on the block's first port: the kernel arbitrates, and a crash
    leaves nothing behind.  A block whose node names still have processes is passed over too.
    """
    for slot in range(_SLOTS):
        ports = Ports(slot, _FIRST_PORT + slot * _BLOCK)
        with contextlib.ExitStack() as stack:
            guard = _listen(ports.base)
            if guard is None:
                continue
            stack.enter_context(guard)
            others = [_listen(port) for port in range(ports.base + 1, ports.node(nodes) + 1)]
            free = all(other is not None for other in others)
            for other in others:
                if other is not None:
                    other.close()
            if not free or any(
                processes_in_cgroups(f"{ports.node_prefix}{i}") for i in range(1, nodes + 1)
            ):
                continue
            yield ports
            return
    raise UnsupportedError(
        f"no free block of TCP ports between {_FIRST_PORT} and {_FIRST_PORT + _BLOCK * _SLOTS}",
        next_step="Stop the clusters that are not needed: python -m slurm_forge.testing.cluster"
        " down --dir DIR",
    )


def _listen(port: int) -> socket.socket | None:
    sock = socket.socket()
    try:
        # As the daemons do, or connections that were just closed would look like owners.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))  # noqa: S104  slurmd binds all addresses; so does the test
        sock.listen(1)
    except OSError:
        sock.close()
        return None
    return sock
