"""Where a person's own settings and those of a project are found, and read.

The user's are ``config.yaml`` in their configuration folder.  A project's are ``slurm_forge.yaml``
beside the job file, or in a folder above it as far as the git working tree reaches.  Nothing is
taken from the current folder, and nothing that others can write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_forge.documents import read
from slurm_forge.knobs import Knobs
from slurm_forge.spec.layers import Layer, Layered, Said, combined, places_said

__all__ = [
    "PROJECT_FILE",
    "layered_job",
    "project_file",
    "shown",
    "user_said",
]

PROJECT_FILE = "slurm_forge.yaml"


def project_file(folder: Path) -> Path | None:
    """The nearest ``slurm_forge.yaml`` for job files in ``folder``, or None.

    Looked for up to the top of the git working tree; outside of one, in the folder alone.
    """
    # Not resolve(), which trips over links that lead in a circle: reading the job says so.
    here = Path(os.path.realpath(folder))
    above = (here, *here.parents)
    top = next((each for each in above if os.path.lexists(each / ".git")), here)
    for each in above:
        found = each / PROJECT_FILE
        if os.path.lexists(found):
            return found
        if each == top:
            return None
    return None


def layered_job(job: Path | None, knobs: Knobs, settings: Sequence[str] = ()) -> Layered:
    """The job of a file, over the project's and the user's settings, under those of ``--set``.

    Without a file it is a job that says nothing but what every one has to.  ``ConfigError`` names
    each mistake by the file (or option) that it stands in, ``UnsafeFileError`` a file of settings
    that others can write.
    """
    return combined(
        tuple(_shared(job, knobs)), None if job is None else read(job), settings=settings
    )


def user_said(knobs: Knobs, key: str) -> Said | None:
    """What the user's own file says of ``site`` or ``runs``."""
    path = knobs.settings_file
    if not os.path.lexists(path):
        return None
    return places_said(_layer(path, own=True)).get(key)


def shown(path: Path) -> str:
    """A path as short as it can be typed here: from the current folder, from ``~``, or whole."""
    with contextlib.suppress(OSError, RuntimeError):
        if path.is_relative_to(Path.cwd()):
            return str(path.relative_to(Path.cwd()))
        if path.is_relative_to(Path.home()):
            return f"~/{path.relative_to(Path.home())}"
    return str(path)


def _shared(job: Path | None, knobs: Knobs) -> Iterator[Layer]:
    """The files below the job file, lowest first."""
    own = knobs.settings_file
    if os.path.lexists(own):
        yield _layer(own, own=True)
    beside = Path() if job is None else job.parent
    itself = None if job is None else Path(os.path.realpath(beside)) / job.name
    project = project_file(beside)
    if project is not None and project != itself:
        yield _layer(project, own=False)


def _layer(path: Path, *, own: bool) -> Layer:
    return Layer(
        read(path, trusted=True, shown=shown(path), may_be_empty=True), path.parent, own=own
    )
