#!/usr/bin/env python3
"""Stands in for apptainer, which Debian does not have: its words, and namespaces that are real.

``apptainer exec [options] IMAGE COMMAND…``: the image is a folder ("sandbox" in apptainer's words).
A process of its own stays outside, as apptainer's does, and passes signals on; the command runs in
another mount namespace and root, in which nothing of the host is seen but the system's own folders
and what ``--bind`` names.  An option that apptainer does not know is refused.  Runs as root.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
_REMOUNT, _READ_ONLY = 0x20, 0x1
#: apptainer has these in its image, or mounts them by default; /tmp is the container's own here.
_SYSTEM = ("/usr", "/etc", "/proc", "/sys", "/dev", "/root")
_FLAGS = {"--nv", "--rocm", "--cleanenv", "--containall", "--writable-tmpfs", "-e", "-C"}
_WITH_VALUE = {"--bind", "-B", "--pwd", "--env", "--home"}


def _fail(text: str) -> None:
    sys.stderr.write(f"FATAL:   {text}\n")
    sys.exit(255)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    given = (source.encode(), target.encode(), None if kind is None else kind.encode(), flags, None)
    if _LIBC.mount(*given) != 0:
        _fail(f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def _parsed(words: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
    if words[:1] != ["exec"]:
        _fail(f"unknown command {words[:1]}")
    given: dict[str, list[str]] = {}
    rest = words[1:]
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in _FLAGS and not equals:
            given.setdefault(name, []).append("")
        elif name in _WITH_VALUE:
            given.setdefault(name, []).append(value if equals else rest.pop(0))
        else:
            _fail(f"unknown flag: {name}")
    if len(rest) < 2:
        _fail("requires at least 2 args")
    return given, rest[0], rest[1:]


def _environment(given: dict[str, list[str]], image: str) -> dict[str, str]:
    found = dict(os.environ)
    if {"--cleanenv", "-e", "--containall", "-C"} & given.keys():
        found = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
    prefix = "APPTAINERENV_"
    for name, value in os.environ.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = value
            found.pop(name, None)
    found["APPTAINER_CONTAINER"] = image
    return found


def _enter(given: dict[str, list[str]], image: str) -> None:
    if _LIBC.unshare(_NEW_MOUNTS) != 0:
        _fail(f"unshare: {os.strerror(ctypes.get_errno())}")
    _mount("none", "/", None, _PRIVATE | _RECURSIVE)
    root = image.rstrip("/")
    # The image itself is shared by all containers of it: a tmpfs over it is this one's own.
    binds = [
        each for value in given.get("--bind", []) + given.get("-B", []) for each in value.split(",")
    ]
    wanted = [(each, each, "") for each in _SYSTEM]
    for each in binds:
        source, _, rest = each.partition(":")
        target, _, how = rest.partition(":")
        wanted.append((source, target or source, how))
    held = [(os.open(source, os.O_PATH), target, how) for source, target, how in wanted]
    marks = {path.name: path.read_text() for path in Path(root).iterdir() if path.is_file()}
    _mount("tmpfs", root, "tmpfs", 0)
    for name, text in marks.items():
        Path(root, name).write_text(text)
    for name in ("bin", "sbin", "lib", "lib64"):
        Path(root, name).symlink_to(f"usr/{name}")
    Path(root, "tmp").mkdir(mode=0o1777)
    for descriptor, target, how in held:
        place = root + target
        Path(place).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", place, None, _BIND | _RECURSIVE)
        if how == "ro":
            _mount("none", place, None, _BIND | _REMOUNT | _READ_ONLY)
        os.close(descriptor)
    os.chroot(root)
    os.chdir((given.get("--pwd") or ["/"])[-1])


def main() -> None:
    given, image, command = _parsed(sys.argv[1:])
    if not Path(image).is_dir():
        _fail(f"could not open image {image}")
    environment = _environment(given, image)
    pid = os.fork()
    if pid == 0:
        _LIBC.prctl(1, signal.SIGKILL)
        _enter(given, image)
        os.execvpe(command[0], command, environment)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda found, _: os.kill(pid, found))
    _, status = os.waitpid(pid, 0)
    os._exit(
        os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    )


if __name__ == "__main__":
    main()
