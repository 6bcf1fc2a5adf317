"""In the machine: an NFS server, and nodes, each with an NFS client of its own.

A node is a process in namespaces of its own for network, mounts and host name: the kernel keeps a
client of its own for each, with caches and locks of its own, as of two hosts.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Where every node has the shared folder.
SHARED = Path("/mnt/shared")
#: Where the machine has what strikes at calls (``tests/crash/shim.c``), built on the host.
SHIM = Path("/usr/lib/crash-shim.so")
_BACKING = Path("/srv/shared")
#: What the nodes mount: empty whenever a case begins.
FOLDER = _BACKING / "shared"
_FILLER = _BACKING / "filler"
#: Of linux/quota.h: set limits of a user's blocks, which are counted in KiB.
_SET_USER_QUOTA = 0x800008 << 8
_BLOCK_LIMITS = 1
#: The address of the server, for the nodes.
SERVER = "10.77.0.1"


def run(*words: str, check: bool = True) -> str:
    """A command of the system; what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def start_server() -> None:
    """Export a fresh ext4 through the kernel's server, which the nodes reach over a bridge."""
    for module in ("nfsd", "nfs", "nfsv3", "nfsv4", "veth", "bridge", "loop", "ext4", "quota_v2"):
        run("modprobe", module)
    for folder in ("/run", "/dev/shm", "/srv", "/var/lib/nfs"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", folder)
    for folder in Path(sys.base_prefix).parents:  # a user who is not root imports modules, too
        folder.chmod(folder.stat().st_mode | 0o001)
    Path("/dev/pts").mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "devpts", "devpts", "/dev/pts", check=False)
    state = [f"/var/lib/nfs/{name}" for name in ("rpc_pipefs", "v4recovery", "sm", "sm.bak")]
    for folder in (*state, str(_BACKING), str(SHARED)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "rpc_pipefs", "rpc_pipefs", "/var/lib/nfs/rpc_pipefs")
    for name in ("etab", "rmtab", "xtab", "state"):
        Path("/var/lib/nfs", name).touch()
    image = Path("/srv/image")
    with image.open("wb") as file:
        file.truncate(512 << 20)
    run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "quota", str(image))
    run("mount", "-o", "loop,iversion,usrquota", str(image), str(_BACKING))
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "br0", "type", "bridge")
    run("ip", "addr", "add", f"{SERVER}/24", "dev", "br0")
    run("ip", "link", "set", "br0", "up")
    run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    for name in ("nfsv4leasetime", "nfsv4gracetime"):
        Path("/proc/fs/nfsd", name).write_text("10")
    with Path("/etc/passwd").open("a") as passwords:
        passwords.write("_rpc:x:65533:65534::/run/rpcbind:/usr/sbin/nologin\n")
    run("rpcbind", "-w")
    run("rpc.statd", "--no-notify")
    _export("rw,no_root_squash")
    run("rpc.nfsd", "8")
    run("rpc.mountd")


def _export(options: str) -> None:
    line = f"{_BACKING} *({options},sync,insecure,no_subtree_check,fsid=0)\n"
    Path("/etc/exports").write_text(line)
    run("exportfs", "-ra")


@contextmanager
def exported(options: str) -> Iterator[None]:
    """The folder is exported in another way; what is mounted stays mounted."""
    _export(options)
    try:
        yield
    finally:
        _export("rw,no_root_squash")


@contextmanager
def server_down() -> Iterator[None]:
    """The server is gone, and comes back without what it had in memory, as after a crash."""
    run("rpc.nfsd", "0")
    try:
        yield
    finally:
        run("rpc.nfsd", "8")


@contextmanager
def export_withdrawn() -> Iterator[None]:
    """The server answers, and has never heard of the folder: every handle is stale."""
    run("exportfs", "-ua")
    run("exportfs", "-f")
    try:
        yield
    finally:
        run("exportfs", "-ra")


@contextmanager
def disk_full() -> Iterator[None]:
    """The server's file system has no block left."""
    descriptor, size = os.open(_FILLER, os.O_RDWR | os.O_CREAT), 0
    try:
        for step in (64 << 20, 4 << 20, 256 << 10, 16 << 10, 4 << 10):
            while True:
                try:
                    os.posix_fallocate(descriptor, size, step)
                except OSError:
                    break
                size += step
        yield
    finally:
        os.close(descriptor)
        _FILLER.unlink()


@contextmanager
def quota(user: int) -> Iterator[None]:
    """The user may have no more blocks than now."""
    run("sync")
    used = sum(each.lstat().st_blocks for each in FOLDER.rglob("*") if each.lstat().st_uid == user)
    _set_quota(user, max(used // 2, 1))
    try:
        yield
    finally:
        _set_quota(user, 0)


def _set_quota(user: int, kib: int) -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    (device,) = (words[0] for words in mounts if words[1] == str(_BACKING))
    limits = struct.pack("8QI4x", kib, 0, 0, 0, 0, 0, 0, 0, _BLOCK_LIMITS)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.quotactl(_SET_USER_QUOTA, device.encode(), user, limits):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), device)


class Node:
    """One host: a process that does what it is asked for in its own mount of the folder."""

    def __init__(self, number: int) -> None:
        self.name = f"node{number}"
        space, outside = f"space{number}", f"veth{number}"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", outside, "master", "br0", "up")
        run("ip", "-n", space, "addr", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        self._process = subprocess.Popen(
            [
                *("ip", "netns", "exec", space, "unshare", "--uts", "--mount"),
                *("env", f"LD_PRELOAD={SHIM}"),
                *(sys.executable, "-u", "-m", "tests.shared_storage.node", self.name),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, what: str, **values: Any) -> None:
        """Have it do something; ``end`` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, "values": values}) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """What came of it; RuntimeError where it raised."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended: {self._process.wait()}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def refused(self, what: str, **values: Any) -> str:
        """Why it could not be done; empty where it could."""
        try:
            self.do(what, **values)
        except RuntimeError as error:
            return str(error)
        return ""

    def do(self, what: str, **values: Any) -> Any:
        """Both."""
        self.begin(what, **values)
        return self.end()


@contextmanager
def mounted(nodes: list[Node], options: str) -> Iterator[None]:
    """The folder, empty, mounted by all nodes in that way."""
    for path in _BACKING.iterdir():
        run("rm", "-rf", str(path))
    FOLDER.mkdir(mode=0o700)
    for node in nodes:
        path = f"{_BACKING}/shared" if "vers=3" in options else "/shared"
        node.do("mount", source=f"{SERVER}:{path}", options=options)
    try:
        yield
    finally:
        for node in nodes:
            node.do("become", user=0)
            node.do("unmount")
