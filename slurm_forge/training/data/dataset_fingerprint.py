"""What a run is trained on, seen from outside: files with sizes and times, or a version.

Enough to notice that data was damaged, swapped or added between two attempts, and to name where.
Files are read only on request; symbolic links are recorded by their target and never followed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import xxhash

from slurm_forge.json_codec import from_json
from slurm_forge.recovery.fingerprint import Fingerprint
from slurm_forge.units import format_duration
from slurm_forge.vocabulary.json_value import Json

#: Entries of a manifest's list: files if they are few, else folders.
_MOST_PARTS = 256
_MOST_UNREADABLE = 20
_MOST_LINES = 20
_READERS = 4
_CHUNK = 1 << 20
#: Length of a digest: 64 bits detect any damage; protection from forgery is not needed here.
_DIGITS = 16
#: All ranks wait for rank 0, but not for ever.
_WITHIN = timedelta(minutes=10)


class Part(NamedTuple):
    """A file, or all files below a folder: how many, bytes in all, a digest of all but times."""

    files: int
    size: int
    digest: str

    def __str__(self) -> str:
        count = f"{self.files:,}".replace(",", " ")
        return f"{count} files, {_size(self.size)}" if self.files != 1 else _size(self.size)


_NO_FILES = Part(0, 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataVersion:
    """One source of data at one time; ``version`` is the user's name for it.

    ``whole`` is over names and sizes, ``contents`` over file contents (empty: not read),
    ``times`` over modification times (empty if contents are more conclusive).  ``parts`` are the
    files by name, or folders (ending in ``/``) if there are too many files to list.  ``stopped``
    says what was not examined for lack of time; without contents the rest is as if they had not
    been requested, without files there is only the version.
    """

    version: str | None = None
    whole: Part = _NO_FILES
    contents: str = ""
    times: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    stopped: str = ""

    @classmethod
    def of(
        cls,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        *,
        version: str | None = None,
        contents: bool = False,
        within: timedelta = _WITHIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> DataVersion:
        """Examine files or folders, including every file below; reads only for ``contents``.

        Names are relative, so that data staged elsewhere is the same data.  Unreadable files are
        named in ``unreadable``.  After ``within`` no further contents are read, or no further files
        examined, and ``stopped`` says so.
        """
        if isinstance(files, (str, os.PathLike)):
            files = (files,)
        deadline = _Deadline(within, clock)
        try:
            data_files, unreadable = _list_files(files, deadline)
        except _TooLateError:
            # A part of the files would be mistaken for all of them.
            return cls(version=version, stopped=f"{deadline}: files not compared")
        data_files.sort(key=lambda each: each.name)
        stopped = ""
        if contents:
            try:
                unreadable += _read(data_files, deadline)
            except _TooLateError:
                contents, stopped = False, f"{deadline}: contents not compared"
        return cls(
            version=version,
            whole=Part(
                len(data_files),
                sum(each.size for each in data_files),
                _digest(data_files, "outside"),
            ),
            contents=_digest(data_files, "content") if contents else "",
            times="" if contents else _digest(data_files, "time"),
            parts={_text(name): part for name, part in _parts(data_files).items()},
            unreadable=tuple(_text(name) for name in sorted(unreadable)[:_MOST_UNREADABLE]),
            stopped=stopped,
        )

    def to_json(self) -> dict[str, Json]:
        """For the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> DataVersion | None:
        """Parse a manifest's entry; None if it is not understood."""
        try:
            return from_json(cls, value)
        except ValueError:
            return None

    def differences(self, now: DataVersion) -> tuple[str, ...]:
        """What changed between this one, which was saved, and ``now``; empty for the same data.

        Times are the last resort: they are reported only if nothing else differs.
        """
        lines = []
        if self.version != now.version:
            lines.append(f"version {now.version or 'not given'}, was {self.version or 'not given'}")
        if now.stopped:
            lines.append(now.stopped)
        elif self.stopped:
            lines.append(f"when it was saved: {self.stopped}")
        if self._without_files or now._without_files:
            return tuple(lines)
        lines += [f"{n} can't be read now" for n in now.unreadable if n not in self.unreadable]
        read = bool(self.contents and now.contents)
        if self.whole != now.whole or (read and self.contents != now.contents):
            lines += self._changed_parts(now, read) or [f"{now.whole}, was {self.whole}"]
        elif self.times and now.times and self.times != now.times and not lines:
            lines.append("files have other modification times, and the same names and sizes")
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more differences"]
        return tuple(lines)

    @property
    def _without_files(self) -> bool:
        return bool(self.stopped) and not self.whole.digest

    def _changed_parts(self, now: DataVersion, read: bool) -> list[str]:
        both = (self, now)
        if any(source.whole.files and not source.parts for source in both):
            return []  # too many to list on one side
        folders = {name.endswith("/") for source in both for name in source.parts}
        if len(folders) > 1 or (folders == {True} and not self.parts.keys() & now.parts.keys()):
            return []  # files and folders, or folders and their parents, can't be compared
        comparable = read or not (self.contents or now.contents)
        lines = []
        for name in sorted({*self.parts, *now.parts}):
            was, here = self.parts.get(name), now.parts.get(name)
            if was is None:
                lines.append(f"{name} is new: {here}")
            elif here is None:
                lines.append(f"{name} is gone: {was}")
            elif (was.files, was.size) != (here.files, here.size):
                lines.append(f"{name} changed: {was} -> {here}")
            elif comparable and was.digest != here.digest:
                lines.append(f"{name} changed, and is {here} as before")
        return lines


def data_facts(sources: Mapping[str, DataVersion]) -> Fingerprint:
    """Facts for the fingerprint, by the user's names of the sources."""
    facts: dict[str, str] = {}
    for name, source in sources.items():
        values = {
            "version": source.version,
            "files": f"{source.whole} ({source.whole.digest})" if source.whole.digest else None,
            "contents": source.contents,
            "times": source.times,
        }
        facts.update({f"data.{what}.{name}": fact for what, fact in values.items() if fact})
    return Fingerprint(facts)


@dataclass(slots=True)
class _DataFile:
    name: str
    path: str
    size: int
    mtime: int
    #: Where a symbolic link points.
    link: str = ""
    #: Digest of the content, if it was read.
    content: str = ""

    def line(self, what: str) -> bytes:
        """The input of a digest: "outside" or "content" or "time"."""
        fields = {"outside": f"{self.size}\0{self.link}", "time": str(self.mtime)}
        text = f"{self.name}\0{fields.get(what, self.content)}\n"
        return text.encode("utf-8", "surrogateescape")


class _TooLateError(Exception):
    """The deadline has passed."""


class _Deadline:
    """The time limit for examining one source."""

    def __init__(self, within: timedelta, clock: Callable[[], float]) -> None:
        self._within = within
        self._clock = clock
        self._end = clock() + within.total_seconds()

    def check(self) -> None:
        if self._clock() > self._end:
            raise _TooLateError

    def __str__(self) -> str:
        return f"stopped after {format_duration(self._within)}"


def _list_files(
    files: Sequence[str | os.PathLike[str]], deadline: _Deadline
) -> tuple[list[_DataFile], list[str]]:
    data_files: list[_DataFile] = []
    unreadable: list[str] = []
    roots = [os.fspath(each) for each in files]
    for prefix, root in zip(_prefixes(roots), roots, strict=True):
        deadline.check()
        try:
            # What the user names is meant, even if it is a link itself.
            real = os.path.realpath(root)
            status = Path(real).stat()
        except OSError:
            unreadable.append(prefix.rstrip("/") or root)
            continue
        if stat.S_ISDIR(status.st_mode):
            data_files.extend(_walk(real, prefix, unreadable, deadline))
        else:
            name = prefix.rstrip("/") or Path(root).name
            data_files.append(_DataFile(name, real, status.st_size, status.st_mtime_ns))
    return data_files, unreadable


def _prefixes(roots: Sequence[str]) -> Iterator[str]:
    """The prefix of names below each root: empty for a single root, else its own name."""
    if len(roots) == 1:
        yield ""
        return
    counts: dict[str, int] = {}
    for root in roots:
        base = Path(root).absolute().name
        counts[base] = counts.get(base, 0) + 1
        yield f"{base}/" if counts[base] == 1 else f"{base}~{counts[base]}/"


def _walk(
    root: str, prefix: str, unreadable: list[str], deadline: _Deadline
) -> Iterator[_DataFile]:
    folders = [(root, prefix)]
    while folders:
        folder, before = folders.pop()
        entries: list[os.DirEntry[str]] = []
        try:
            with os.scandir(folder) as listed:
                for entry in listed:  # millions of names take their time, too
                    deadline.check()
                    entries.append(entry)
        except OSError:
            unreadable.append(before or "./")
            continue
        for entry in entries:
            deadline.check()
            name = before + entry.name
            try:
                if entry.is_symlink():
                    yield _DataFile(name, entry.path, 0, 0, _target(Path(entry.path), root))
                elif entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, f"{name}/"))
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield _DataFile(name, entry.path, status.st_size, status.st_mtime_ns)
            except OSError:
                unreadable.append(name)


def _target(link: Path, root: str) -> str:
    """A link's target: relative to the root of the data if it is inside, else unchanged."""
    target = str(link.readlink())
    absolute = os.path.normpath(link.parent / target)
    inside = absolute.startswith(f"{root}/")
    return os.path.relpath(absolute, root) if inside else target


def _read(files: Sequence[_DataFile], deadline: _Deadline) -> list[str]:
    """Digest the contents of all files, or of none; the names of unreadable ones."""
    with ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(lambda each: _content(each, deadline), files))
    for each, digest in zip(files, digests, strict=True):
        each.content = digest
    return [each.name for each in files if not each.content]


def _content(file: _DataFile, deadline: _Deadline) -> str:
    deadline.check()
    if file.link:
        return file.link
    try:
        # O_NONBLOCK: a FIFO in the file's place would otherwise block for ever.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            digest = xxhash.xxh3_128()
            while chunk := opened.read(_CHUNK):
                deadline.check()
                digest.update(chunk)
    except OSError:
        return ""
    return digest.hexdigest()


def _digest(files: Sequence[_DataFile], *what: str) -> str:
    if not files:
        return ""
    digest = xxhash.xxh3_128()
    for each in files:
        for kind in what:
            digest.update(each.line(kind))
    return digest.hexdigest()[:_DIGITS]


def _part(files: Sequence[_DataFile]) -> Part:
    size = sum(each.size for each in files)
    return Part(len(files), size, _digest(files, "outside", "content"))


def _parts(files: Sequence[_DataFile]) -> dict[str, Part]:
    """At most this many entries: the files, else the deepest folders that are few enough."""
    if len(files) <= _MOST_PARTS:
        return {each.name: _part([each]) for each in files}
    deepest = max(each.name.count("/") for each in files)
    for depth in range(deepest, 0, -1):
        folders: dict[str, list[_DataFile]] = {}
        for each in files:
            above = each.name.split("/")[:-1][:depth]
            folders.setdefault("/".join(above) + "/" if above else "./", []).append(each)
        if len(folders) <= _MOST_PARTS:
            return {name: _part(inside) for name, inside in sorted(folders.items())}
    return {}


def _text(name: str) -> str:
    # A file's name may be any bytes; a manifest is text.
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"
