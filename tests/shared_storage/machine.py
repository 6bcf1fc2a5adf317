"""A virtual machine with a kernel of Debian's, its NFS server and its NFS client.

The kernel of the host needs no NFS: packages are unpacked into a cache, not installed.  The machine
sees the file system of the host read-only through 9p, below an overlay in memory, so it runs the
very files of this checkout, and what it writes is gone with it.
"""

from __future__ import annotations

import gzip
import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

#: What runs in the machine, and is not expected on the host.
PACKAGES = (
    "busybox-static", "keyutils", "kmod", "libdevmapper1.02.1", "libevent-core-2.1-7",
    "libkeyutils1", "libkmod2", "libnfsidmap1", "libtirpc-common", "libtirpc3", "libwrap0",
    "nfs-common", "nfs-kernel-server", "rpcbind",
)  # fmt: skip
_METAPACKAGE = "linux-image-amd64"
_TO_BOOT = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
_QEMU = "qemu-system-x86_64"

_INIT = """#!/bin/sh
export PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t devtmpfs dev /dev
for module in {modules}; do busybox modprobe $module; done
busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /lower
busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro packages /packages
busybox mount -t tmpfs tmp /upper
busybox mkdir /upper/changes /upper/work
busybox mount -t overlay root /newroot -o \
lowerdir=/packages:/lower,upperdir=/upper/changes,workdir=/upper/work
busybox mount -t proc proc /newroot/proc
busybox mount -t sysfs sys /newroot/sys
busybox mount -t devtmpfs dev /newroot/dev
exec busybox switch_root /newroot /bin/bash {script}
"""


class MachineError(Exception):
    """The machine can't be built or started; the message says what to install."""


def missing() -> str:
    """What keeps a machine from running here; empty where nothing does."""
    if shutil.which(_QEMU) is None:
        return f"no {_QEMU} here: apt-get install qemu-system-x86"
    if shutil.which("apt-get") is None:
        return "no apt-get here: the packages of the machine are Debian's"
    return ""


def unpack(cache: Path) -> str:
    """Have everything below ``cache``, which is kept; the version of the kernel."""
    root = cache / "packages"
    if not (cache / "whole").exists():
        shutil.rmtree(cache, ignore_errors=True)
        root.mkdir(parents=True)
        shown = _run(["apt-cache", "depends", _METAPACKAGE], cache)
        kernel = next(word for word in shown.split() if word.startswith("linux-image-6"))
        _run(["apt-get", "download", kernel, *PACKAGES], cache)
        for file in sorted(cache.glob("*.deb")):
            _run(["dpkg", "-x", str(file), str(root)], cache)
            file.unlink()
        for name in ("bin", "sbin", "lib"):  # as on the host, where these are links into usr
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
        (cache / "whole").touch()
    (folder,) = (root / "usr/lib/modules").iterdir()
    if not (folder / "modules.dep.bin").exists():
        _kmod(root, "depmod", "-b", str(root / "usr"), folder.name)
    return folder.name


def boot(cache: Path, script: Path, console: Path, *, memory_mib: int, within_s: float) -> str:
    """Run ``script`` (bash) in a machine as its first process, until it powers off.

    Returns what it printed, which can be followed in ``console``.
    """
    kernel = unpack(cache)
    initrd = script.with_name("initrd.gz")
    initrd.write_bytes(gzip.compress(_initrd(cache / "packages", kernel, script), 1))
    command = [
        _QEMU, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(memory_mib),
        "-nographic", "-no-reboot", "-nic", "none",
        "-kernel", str(cache / f"packages/boot/vmlinuz-{kernel}"), "-initrd", str(initrd),
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
    ]  # fmt: skip
    for tag, path in (("host", "/"), ("packages", cache / "packages")):
        share = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap,readonly=on"
        command += ["-virtfs", share]
    with console.open("wb") as output:
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                timeout=within_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            output.write(f"\n[the machine was ended after {within_s:g} s]\n".encode())
    return console.read_text(errors="replace").replace("\r", "")


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"{' '.join(command)}: {done.stderr.strip()[-600:]}")
    return done.stdout


def _kmod(root: Path, name: str, *words: str) -> str:
    """A command of kmod's, which tells them apart by the name that it is called by."""
    done = subprocess.run(
        [name, *words],
        executable=root / "usr/bin/kmod",
        env={"LD_LIBRARY_PATH": str(root / "usr/lib/x86_64-linux-gnu")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MachineError(f"{name}: {done.stderr.strip()[-600:]}")
    return done.stdout


def _initrd(root: Path, kernel: str, script: Path) -> bytes:
    """What the kernel starts with: enough to mount the host's files, and no more."""
    modules = root / "usr/lib/modules" / kernel
    needed = _kmod(
        root, "modprobe", "-d", str(root / "usr"), "-S", kernel, "-a", "--show-depends", *_TO_BOOT
    )
    files = {Path(line.split()[1]) for line in needed.splitlines() if line.startswith("insmod")}
    init = _INIT.format(modules=" ".join(_TO_BOOT), script=script)
    entries: list[tuple[str, int, bytes]] = [
        ("init", 0o755, init.encode()),
        ("bin/busybox", 0o755, (root / "usr/bin/busybox").read_bytes()),
        ("bin/sh", stat.S_IFLNK | 0o777, b"busybox"),
        ("sbin/modprobe", stat.S_IFLNK | 0o777, b"/bin/busybox"),
    ]
    for path in [*files, *modules.glob("modules.*")]:
        entries.append((str(path.relative_to(root / "usr")), 0o644, path.read_bytes()))
    folders = {"proc", "dev", "lower", "packages", "upper", "newroot"}
    for name, _, _ in entries:
        folders |= {str(parent) for parent in Path(name).parents if parent != Path()}
    return _cpio([*((name, stat.S_IFDIR | 0o755, b"") for name in sorted(folders)), *entries])


def _cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """An archive as the kernel reads it (``newc``)."""
    parts: list[bytes] = []
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        kind = mode if stat.S_IFMT(mode) else stat.S_IFREG | mode
        fields = (number, kind, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % each for each in fields) + name.encode() + b"\0"
        parts += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]
    return b"".join(parts)
