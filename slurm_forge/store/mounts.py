"""Which file system a folder lies on, from the kernel's own list.  Facts: text into a value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system: where, of what kind (``nfs4``, ``lustre``), from what."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...] = ()

    @property
    def over_network(self) -> bool:
        """Whether several hosts see it, by its kind."""
        return self.kind in _SHARED or self.kind.startswith(("nfs", "fuse."))

    @property
    def caches_attributes(self) -> bool:
        """Whether what another host has written may be seen late (nfs(5), acregmin to acdirmax)."""
        off = {"noac", "actimeo=0", "lookupcache=none"}
        return self.kind.startswith("nfs") and off.isdisjoint(self.options)

    @property
    def opens_from_cache(self) -> bool:
        """Whether not even opening a file asks the server for changes (nfs(5), nocto)."""
        return self.kind.startswith("nfs") and "nocto" in self.options

    @property
    def gives_up(self) -> bool:
        """Whether calls fail while an NFS server does not answer, done or not (nfs(5), soft)."""
        soft = {"soft", "softerr"}
        return self.kind.startswith("nfs") and not soft.isdisjoint(self.options)

    @property
    def has_local_locks(self) -> bool:
        """Whether a lock holds on one host alone, by the options (nfs(5), mount.lustre(8))."""
        local = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}
        return not local.isdisjoint(self.options)

    @property
    def oldest_listing_s(self) -> int | None:
        """How old what an NFS client knows of a folder may get (acdirmax), where that is set."""
        found = [o.partition("=")[2] for o in self.options if o.startswith("acdirmax=")]
        return int(found[-1]) if found and found[-1].isascii() and found[-1].isdigit() else None

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written there."""
        return "ro" in self.options


_SHARED = frozenset(
    {"lustre", "gpfs", "beegfs", "ceph", "panfs", "weka", "wekafs", "pvfs2", "orangefs", "cifs",
     "smb3", "afs", "9p", "virtiofs", "glusterfs", "gfs2", "ocfs2", "daos"}
)  # fmt: skip


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Lines of ``/proc/self/mountinfo`` (proc(5)), in order; others are left out."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        options = (*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ()))
        mounts.append(
            Mount(_plain(fields[4]), rest[0], _plain(rest[1]), tuple(dict.fromkeys(options)))
        )
    return tuple(mounts)


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, no links) lies on: the deepest, of those the last."""
    best: Mount | None = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        inside = path == point or path.startswith(f"{point}/")
        if inside and (best is None or len(point) >= len(best.point.rstrip("/"))):
            best = mount
    return best


def read_mounts() -> tuple[Mount, ...]:
    """Those of this process; none where the kernel does not say."""
    try:
        return parse_mounts(Path("/proc/self/mountinfo").read_text(errors="backslashreplace"))
    except OSError:
        return ()


def _plain(text: str) -> str:
    # The kernel writes spaces and the like as \040.
    return os.fsdecode(
        _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text).encode("latin-1", "replace")
    )
