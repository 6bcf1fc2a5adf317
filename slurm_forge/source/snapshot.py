"""A copy of a work tree's code, made once per content and never changed after.

Source files are copied; whatever else lies in the work tree (ignored folders, large files, what the
job excludes) is linked to where it is, so that data beside the code is found.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import SnapshotError
from slurm_forge.files import fsync_directory, private_directory
from slurm_forge.source.work_tree import WorkTree
from slurm_forge.units import format_memory

#: Larger files are data: weights, archives, notebooks full of pictures.
_LARGEST_FILE = 8 << 20
_STAGE = ".stage-"
#: How bytes begin that are no text, in what a command prints.
_NO_TEXT = "\\x"
#: How a directory of runs is recognized, wherever it lies (``run_directory/layout.py``).
_SPEC, _JOURNAL, _BESIDE = "run.yaml", "journal", (".code", ".learned")
_SHOWN = 3
_NEVER_LINKED = ("__pycache__", "*.pyc", ".git")
_TRIES = 3
_YOUNG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Content:
    """What a snapshot holds: paths relative to the root, in the order of the alphabet.

    ``files`` are copied, ``links`` point to the work tree; of these, ``outside`` are links that
    git does not ignore and that lead out of it.
    """

    files: tuple[str, ...]
    links: tuple[str, ...]
    size: int
    outside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a work tree is copied.

    ``exclude`` are patterns as ``fnmatch`` has them, for paths relative to the root and for
    folders, ``max_size`` the bytes of all copied files.  ``keep_out`` is the folder of runs: unless
    the work tree lies in it, it is neither copied nor linked.  So are directories of other runs.
    """

    exclude: Sequence[str]
    max_size: int
    keep_out: Path


def content_of(tree: WorkTree, selection: Selection) -> Content:
    """Decide what is copied and what is linked.

    Raises:
        SnapshotError: git does not list the files, or they are larger than ``max_size``.
    """
    exclude, max_size, keep_out = selection.exclude, selection.max_size, selection.keep_out
    listed, ignored = tree.files(), tree.ignored()
    if listed is None or ignored is None:
        raise SnapshotError(
            f"git does not list the files of {tree.root}",
            next_step="Try git ls-files there, or write code: live to run the files as they are.",
        )
    files: dict[str, int] = {}
    links: dict[str, None] = {}
    outside: list[str] = []
    listed = _with_submodules(tree, listed)
    runs = _of_runs(tree.root, (*listed, *ignored))
    if tree.root == keep_out.resolve():
        runs |= {*_BESIDE}
    if _is_within(tree.root, keep_out.resolve()):
        keep_out /= _BESIDE[0]
    for path in listed:
        place = tree.root / path
        if _is_within(place, keep_out) or _is_below(path, runs):
            continue
        if _NO_TEXT in path and not os.path.lexists(place):
            raise SnapshotError(
                f"the name of {path} in {tree.root} is not UTF-8",
                next_step="Rename the file, git-ignore it, or write code: live to run the files "
                "as they are.",
            )
        # Deleted, and git was not told.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = place.lstat()
            linked = _excluded(path, exclude)
            if linked is None and not _is_code(place, tree.root):
                linked = path
                outside += [f"{path} -> {place.readlink()}"] if place.is_symlink() else []
            if linked is None:
                files[path] = status.st_size
            else:
                links[linked.rstrip("/")] = None
    for path in ignored:
        clean = path.rstrip("/")
        if _is_below(clean, runs) or _holds(tree.root / clean, keep_out):
            continue
        if _excluded(clean, _NEVER_LINKED) is None:
            links[clean] = None
    size = sum(files.values())
    if size > max_size:
        raise SnapshotError(
            f"the code in {tree.root} is larger than {format_memory(max_size)}: "
            f"{format_memory(size)}, most of it in {', '.join(_largest(files))}",
            next_step="Leave folders to be linked with code: {exclude: [FOLDER]}, raise "
            "code: {max_size: 500M}, or write code: live to run the files as they are.",
        )
    return Content(tuple(sorted(files)), tuple(sorted(links)), size, tuple(outside))


def take_snapshot(tree: WorkTree, selection: Selection, pool: Path) -> tuple[str, Content]:
    """Copy what is selected into ``pool`` unless it is there: its digest, which names the folder.

    Raises:
        SnapshotError: As for ``content_of``; or files change while they are copied.
        OSError: A file can't be read, or the pool can't be written.
    """
    private_directory(pool)
    unsteady: tuple[str, ...] = ()
    for _ in range(_TRIES):
        content = content_of(tree, selection)
        digest = _digest(tree.root, content)
        target = pool / digest
        if target.is_dir():
            os.utime(target)  # young again: nobody deletes it before its run is written
            return digest, content
        stage = pool / f"{_STAGE}{secrets.token_hex(4)}"
        try:
            _copy(tree.root, content, stage)
            if _digest(stage, content) != digest:
                unsteady = changed_files(stage, tree.root, content)
                continue
            try:
                os.rename(stage, target)  # noqa: PTH104
            except OSError:
                if not target.is_dir():  # else another was as fast
                    raise
            fsync_directory(pool)
            return digest, content
        except FileNotFoundError as error:  # it was deleted since it was listed
            unsteady = (os.path.relpath(error.filename or tree.root, tree.root),)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    names = ", ".join(unsteady[:_SHOWN])
    raise SnapshotError(
        f"files in {tree.root} change while they are copied" + (f": {names}" if names else ""),
        next_step="Git-ignore what is no code, or leave it to be linked with code: {exclude: "
        "[PATTERN]}, and submit again; or write code: live to run the files as they are.",
    )


def prune_snapshots(pool: Path, used: Iterable[str]) -> None:
    """Delete snapshots that no run uses, and what an interrupted copy has left.

    Not those of the last hour: a run that is being submitted has not named its own yet.
    """
    keep = set(used)
    with contextlib.suppress(OSError):
        for entry in pool.iterdir():
            if entry.name not in keep and time.time() - entry.stat().st_mtime > _YOUNG_S:
                shutil.rmtree(entry, ignore_errors=True)


def changed_files(old: Path, new: Path, content: Content) -> tuple[str, ...]:
    """Files of ``new`` that ``old`` has otherwise or not at all, and those that only it has."""
    before = {
        str(path.relative_to(old))
        for path in old.rglob("*")
        if path.is_file() and _copied(path, old)
    }
    differ = {path for path in content.files if _bytes(old / path) != _bytes(new / path)}
    return tuple(sorted(differ | (before - set(content.files))))


def place_in_snapshot(entry: str, snapshot: Path, *, root: Path, folder: Path) -> tuple[str, Path]:
    """The entry and the folder that it is looked for from, in a copy of the work tree at ``root``.

    Raises:
        SnapshotError: The snapshot is gone.
    """
    if not snapshot.is_dir():
        raise SnapshotError(
            f"the code of this run is not in {snapshot}",
            next_step="If the run was moved, move the folder .code beside it along, or continue "
            "with the code as it is now: slurm-forge requeue RUN --code new.",
        )
    where, colon, name = entry.rpartition(":")
    file = Path(where)
    if where.endswith(".py") and file.is_absolute() and file.is_relative_to(root):
        entry = f"{snapshot / file.relative_to(root)}{colon}{name}"
    return entry, snapshot / folder.relative_to(root)


def _copied(path: Path, root: Path) -> bool:
    """Whether it was copied: neither a link nor below one."""
    while path != root:
        if path.is_symlink():
            return False
        path = path.parent
    return True


def _bytes(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
    return None


def _digest(root: Path, content: Content) -> str:
    total = hashlib.sha256()
    for path in content.files:
        place = root / path
        data = _bytes(place)
        mode = "x" if data is not None and os.access(place, os.X_OK) else "-"
        total.update(f"{path}\0{mode}{len(data or b'')}\0".encode("utf-8", "surrogatepass"))
        total.update(data or b"")
    for path in content.links:
        total.update(f"{path}\0link\0".encode("utf-8", "surrogatepass"))
    return total.hexdigest()[:16]


def _copy(root: Path, content: Content, stage: Path) -> None:
    stage.mkdir(mode=0o700)
    for path in content.files:
        source, target = root / path, stage / path
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copy2(source, target, follow_symlinks=False)
    for path in content.links:
        target = stage / path
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A file of the same folder was copied where git tracks only a part of it.
        if not target.exists() and not target.is_symlink():
            target.symlink_to(root / path)


def _with_submodules(tree: WorkTree, listed: Sequence[str]) -> list[str]:
    """A submodule's own files for its folder; a folder of another repository stays one entry."""
    paths: list[str] = []
    for path in listed:
        place = tree.root / path
        inner = None
        if place.is_dir() and not place.is_symlink() and (place / ".git").exists():
            inner = WorkTree.around(place, tree.variables, tree.run)
        files = None if inner is None or inner.root != place else inner.files()
        if inner is None or files is None:
            paths.append(path)
        else:
            paths += [f"{path.rstrip('/')}/{one}" for one in _with_submodules(inner, files)]
    return paths


def _is_code(place: Path, root: Path) -> bool:
    """Whether it is copied: a file of a sensible size, or a link that stays in the work tree."""
    if place.is_symlink():
        target = Path(os.path.normpath(place.parent / place.readlink()))
        return not place.readlink().is_absolute() and target.is_relative_to(root)
    return place.is_file() and place.stat().st_size <= _LARGEST_FILE


def _excluded(path: str, patterns: Sequence[str]) -> str | None:
    """The path, or the outermost of its folders, that a pattern matches; by its name or whole."""
    parts = path.rstrip("/").split("/")
    for end, name in enumerate(parts):
        whole = "/".join(parts[: end + 1])
        for pattern in patterns:
            plain = pattern.rstrip("/")
            if fnmatch.fnmatch(name, plain) or fnmatch.fnmatch(whole, plain):
                return whole
    return None


def _of_runs(root: Path, listed: Iterable[str]) -> frozenset[str]:
    """Run directories in the work tree, and what runs share beside them.

    What lies there is written all the time, by whoever trains, and grows large.
    """
    found: set[str] = set()
    for path in listed:
        folder, _, name = path.rpartition("/")
        if name == _SPEC and folder and (root / folder / _JOURNAL).is_dir():
            beside = folder.rpartition("/")[0]
            found |= {folder, *(f"{beside}/{name}".lstrip("/") for name in _BESIDE)}
    return frozenset(found)


def _is_below(path: str, folders: frozenset[str]) -> bool:
    """Whether it is, or lies in, one of the folders."""
    while folders and path:
        if path in folders:
            return True
        path = path.rpartition("/")[0]
    return False


def _is_within(place: Path, folder: Path) -> bool:
    return place == folder or folder in place.parents


def _holds(place: Path, folder: Path) -> bool:
    """Whether either lies in the other: a link to it would lead back here."""
    return _is_within(place, folder) or _is_within(folder, place)


def _largest(files: dict[str, int]) -> list[str]:
    """The three top folders with most bytes."""
    sizes: dict[str, int] = {}
    for path, size in files.items():
        top = path.split("/", 1)[0]
        sizes[top] = sizes.get(top, 0) + size
    return sorted(sizes, key=lambda top: -sizes[top])[:_SHOWN]
