"""The private directory of a cluster: made, filled, and wiped only if it is one."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

from slurm_forge.errors import UnsafeFileError
from slurm_forge.testing.cluster import render
from slurm_forge.testing.cluster.layout import Layout, Platform, Ports
from slurm_forge.testing.cluster.spec import ClusterSpec


def claim_directory(layout: Layout) -> None:
    """Make the directory ours, or raise UnsafeFileError: it holds something else, or is shared."""
    layout.directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    info = layout.directory.lstat()
    if layout.directory.is_symlink() or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise UnsafeFileError(
            f"{layout.directory} is a link, or others may write to it",
            next_step="Choose a directory that is yours alone with --dir.",
        )
    if not layout.marker.exists() and any(layout.directory.iterdir()):
        raise UnsafeFileError(
            f"{layout.directory} is not empty and was not made by a test cluster",
            next_step="Choose an empty directory with --dir; its content would be wiped.",
        )
    layout.marker.touch()


def wipe(layout: Layout) -> None:
    """Remove all that lies in a directory that ``claim_directory`` made ours, but the marker."""
    if not layout.marker.exists():
        return
    for entry in layout.directory.iterdir():
        if entry == layout.marker:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def write_credentials(layout: Layout, ports: Ports, platform: Platform) -> None:
    """Folders, munge's key, and the accounting database's password: fresh for each start."""
    for folder in (
        layout.slurm_conf.parent,
        layout.logs,
        layout.run,
        layout.controller_state,
        layout.jobs,
        layout.gpu(0).parent,
    ):
        folder.mkdir()
    _write(layout.munge_key, secrets.token_bytes(128), 0o400)
    password = secrets.token_hex(16)
    _write(layout.database_setup, render.database_setup(password).encode(), 0o600)
    dbd = render.slurmdbd_conf(layout, ports, platform, password)
    _write(layout.slurm_conf.with_name("slurmdbd.conf"), dbd.encode(), 0o600)
    _write(layout.database_options, render.database_conf(layout, ports).encode(), 0o600)


def write_configuration(
    spec: ClusterSpec, layout: Layout, ports: Ports, platform: Platform
) -> None:
    """slurm.conf and what lies beside it.  May be called again with another spec."""
    for name in render.node_names(spec, ports):
        layout.spool(name).mkdir(parents=True, exist_ok=True)
    _write(layout.epilog, render.epilog(spec).encode(), 0o755)
    gpus = spec.gpus * max(1, len(spec.gpu_kinds))
    devices = all(_make_device(layout.gpu(index)) for index in range(gpus))
    for name, text in (
        ("slurm.conf", render.slurm_conf(spec, layout, ports, platform)),
        ("cgroup.conf", render.cgroup_conf(platform)),
        ("gres.conf", render.gres_conf(spec, layout, devices=devices)),
    ):
        _write(layout.slurm_conf.with_name(name), text.encode(), 0o644)


def nodes_with_spool(layout: Layout) -> tuple[str, ...]:
    """The nodes that the directory knows of, even where the state file is lost."""
    spools = layout.spool("any").parent
    return tuple(sorted(entry.name for entry in spools.iterdir())) if spools.is_dir() else ()


def _make_device(path: Path) -> bool:
    """A twin of /dev/null, since slurmd takes nothing but devices; False where we may not."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def _write(path: Path, content: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask
        file.write(content)
