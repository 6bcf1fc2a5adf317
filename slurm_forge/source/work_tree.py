"""A git work tree: its revision, what was changed on top, and which files are in it.

Only a work tree of our own is looked at, and no command that its configuration names is run: a
copied repository can do nothing here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from slurm_forge.slurm.process import Completed, Runner, run_command

_WITHIN = timedelta(seconds=3)
#: Listing a large work tree on a slow file system takes longer than one answer.
_LISTED_WITHIN = timedelta(seconds=30)
#: What a repository's configuration could have run, or changed, by a question of ours.
_OFF = (
    "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
    "-c", "diff.autoRefreshIndex=false",  # the index is somebody else's business
)  # fmt: skip
#: What of a driver counts in a diff (smudge: where files are written).
_FILTERS = r"^filter\..*\.(clean|process|required)$"
#: With whole hashes in it, a changed binary file counts as well.  Work trees of submodules have
#: configurations of their own, so git is kept out of them.
_DIFF = (
    "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short",
    "--ignore-submodules=dirty",
)  # fmt: skip
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class GitRevision:
    """``changes`` is a digest of what was changed on top, ``none``, or None where unknown."""

    commit: str
    changes: str | None


@dataclass(frozen=True, slots=True)
class WorkTree:
    """Asks git about the work tree at ``root``; ``variables`` is the environment of the process.

    Every answer is None where git gives none within its time.
    """

    root: Path
    variables: Mapping[str, str]
    run: Runner = run_command

    @classmethod
    def around(
        cls, folder: Path, variables: Mapping[str, str], run: Runner = run_command
    ) -> WorkTree | None:
        """The nearest one upwards, if it is our own."""
        here = folder.absolute()
        for candidate in [here, *here.parents][:_DEEPEST]:
            with contextlib.suppress(OSError):
                status = (candidate / ".git").lstat()
                # A file in a work tree that was added to another repository, and in a submodule.
                if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                    return None
                owners = {status.st_uid, candidate.stat().st_uid}
                return cls(candidate, variables, run) if owners == {os.geteuid()} else None
        return None

    def revision(self) -> GitRevision | None:
        """The commit that is checked out.

        Files that git does not track count for nothing, nor do run directories that it tracks.
        """
        answer = self._ask("rev-parse", "--verify", "HEAD")
        commit = answer.stdout.strip() if answer is not None and answer.returncode == 0 else ""
        if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            return None
        filters = _without_filters(
            self._ask("config", "--name-only", "--null", "--get-regexp", _FILTERS)
        )
        runs = self._run_directories()
        diff = None
        if filters is not None and runs is not None:
            beside = [f":(exclude,literal){each}" for each in runs]
            diff = self._ask(*filters, "diff", "HEAD", *_DIFF, "--", ".", *beside)
        if diff is None or diff.returncode != 0:
            return GitRevision(commit, None)
        digest = hashlib.sha256(diff.stdout.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return GitRevision(commit, digest if diff.stdout else "none")

    def _run_directories(self) -> list[str] | None:
        """Those that somebody has added to git: they change with every step."""
        answer = self._ask("ls-files", "-z", "--", ":(glob)**/run.yaml")
        if answer is None or answer.returncode != 0:
            return None
        folders = [path.rpartition("/")[0] for path in answer.stdout.split("\0")]
        return [each for each in folders if each and (self.root / each / "journal").is_dir()]

    def files(self) -> list[str] | None:
        """Tracked files, and those that git neither tracks nor ignores; a submodule is a folder."""
        return self._list("--cached", "--others", "--exclude-standard")

    def ignored(self) -> list[str] | None:
        """What git ignores; a folder of nothing else is one entry and ends with a slash."""
        return self._list("--others", "--ignored", "--exclude-standard", "--directory")

    def _list(self, *words: str) -> list[str] | None:
        answer = self._ask("ls-files", "-z", *words, within=_LISTED_WITHIN)
        if answer is None or answer.returncode != 0:
            return None
        return list(dict.fromkeys(path for path in answer.stdout.split("\0") if path))

    def _ask(self, *words: str, within: timedelta = _WITHIN) -> Completed | None:
        environment = {
            "PATH": self.variables.get("PATH", os.defpath),
            "LC_ALL": "C",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            # Nothing is fetched for a diff; git before 2.44 only knows the second one.
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "",
        }
        with contextlib.suppress(OSError, ValueError):  # no git here
            git = ["git", "--no-pager", "-C", str(self.root), *_OFF]
            return self.run([*git, *words], within, environment)
        return None


def _without_filters(answer: Completed | None) -> list[str] | None:
    """Options of git that turn off the filters it answered with; None where that can't be had."""
    if answer is None or answer.returncode not in (0, 1):  # 1: there are none
        return None
    names = {name.rpartition(".")[0] for name in answer.stdout.split("\0") if name}
    # An option can't name what has a "=" in it; "\\" may stand for a byte that is no text.
    if any("=" in name or "\\" in name for name in names):
        return None
    off = ("clean=", "process=", "required=false")
    return [word for name in sorted(names) for each in off for word in ("-c", f"{name}.{each}")]
