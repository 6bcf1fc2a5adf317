"""A place where scripts run and do nothing: every command that is not coreutils' takes notes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from slurm_forge.launch.submit.submission import keep_start_file
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import RunFile

#: What the scripts' own lines use.
_TOOLS = (
    "timeout", "tail", "cat", "date", "tee", "grep", "sed", "sort", "sleep", "ln", "cp", "rm",
    "env", "true", "false", "stat",
)  # fmt: skip
_STUBS = ("scontrol", "srun", "sbatch", "module", "touch", "owned", "apptainer")
#: Whoever is called notes its name and its words, each with a NUL behind it, and a newline.
_NOTES = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; echo; } >> "$NOTES"
"""
#: Is asked first whether it can import us; then it notes its words and what it was handed.
_PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
printf '%s\\0' "$@" > "$NOTES.python"
[ -z "$WANTS_ENV" ] || env -0 > "$NOTES.env"
"""


class Bench:
    """A folder with stubs for commands, in which one script after the other is run by bash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._here = folder / "here"
        self._notes = folder / "notes"
        self._script = folder / "job.sbatch"
        self._bin.mkdir()
        self._here.mkdir()
        bash = shutil.which("bash")
        assert bash is not None
        self._bash = bash
        for name in _TOOLS:
            found = shutil.which(name)
            assert found is not None, name
            (self._bin / name).symlink_to(found)
        for name in _STUBS:
            self._stub(name, _NOTES)
        self._stub("python", _PYTHON)

    @property
    def base(self) -> Path:
        """What the folder of runs is to lie in."""
        return self._folder / "base"

    def run(self, text: str, words: Sequence[str], file: RunFile, run: RunDirectory) -> str:
        """``started``: the words arrived, the site's variables too, and nothing else happened.

        ``not started``: the interpreter is none that there is, or the run's folder can't be made
        in our ``base``, and that was told.  Anything else
        says what happened.
        """
        self._tidy()
        whole = self._make(run, text)
        self._script.write_text(text, encoding="utf-8", errors="surrogateescape")
        done = subprocess.run(
            [self._bash, str(self._script)],
            env={
                "PATH": str(self._bin),
                "NOTES": str(self._notes),
                "WANTS_ENV": "1" if file.env else "",
                "SLURM_JOB_ID": "12",
                "SLURM_CPUS_PER_TASK": "2",
            },
            cwd=self._here,
            capture_output=True,
            check=False,
            timeout=60,
        )
        left = [path.name for path in self._here.iterdir()]
        if left:
            return f"files were made: {left}"
        called = self._called()
        if file.python in _STUBS:  # then it is the interpreter that takes notes
            asked, began = [w[1:2] for w in called], [w[1:] for w in called if w[1:2] == ["-m"]]
            return "started" if began == [list(words)] and len(asked) == 2 else f"ran {called}"
        if any(name not in ("scontrol", "module") for name, *_ in called):
            return f"commands were run: {called}"
        started = Path(f"{self._notes}.python")
        if not started.exists():
            if (file.python == "python" and whole) or done.returncode != 1:
                return f"did not start: {done.stderr!r}"
            asked = [words[1:2] for words in called if words[0] == "scontrol"]
            return "not started" if ["requeuehold"] in asked else f"held by nobody: {called}"
        got = started.read_bytes().split(b"\0")[:-1]
        wanted = [os.fsencode(word) for word in words]
        if got != wanted:
            return f"other words arrived: {got}"
        loads = [words for words in called if words[0] == "module"]
        asked_for = [shlex.split(line) for line in text.splitlines() if line[:7] == "module "]
        if loads != asked_for or len(called) != len(loads):
            return f"other modules were loaded: {called}"
        if file.env and (problem := self._differs(file)):
            return problem
        return "started"

    def _differs(self, file: RunFile) -> str | None:
        handed = Path(f"{self._notes}.env").read_bytes().split(b"\0")
        own = {"PATH", "NOTES", "WANTS_ENV", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "PWD", "_"}
        for name, value in file.env.items():
            if name not in own and os.fsencode(f"{name}={value}") not in handed:
                return f"{name} did not arrive: {handed}"
        return None

    def _make(self, run: RunDirectory, text: str) -> bool:
        """What the script sources; False where the run can't lie in our own folder."""
        if not Path(os.path.normpath(run.path)).is_relative_to(self.base):
            return False
        try:
            run.submissions.mkdir(parents=True, exist_ok=True)
            keep_start_file(run.submissions, text)
        except OSError:
            return False
        return True

    def _called(self) -> list[list[str]]:
        if not self._notes.exists():
            return []
        lines = self._notes.read_bytes().split(b"\0\n")[:-1]
        return [[os.fsdecode(word) for word in line.split(b"\0")] for line in lines]

    def _tidy(self) -> None:
        for path in (self._notes, Path(f"{self._notes}.python"), Path(f"{self._notes}.env")):
            path.unlink(missing_ok=True)
        if any(self._here.iterdir()):
            shutil.rmtree(self._here)
            self._here.mkdir()

    def _stub(self, name: str, text: str) -> None:
        path = self._bin / name
        path.write_text(text)
        path.chmod(0o755)
