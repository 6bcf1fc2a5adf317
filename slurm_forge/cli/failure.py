"""What a person sees when something can't be done: one message on stderr and exit status 2."""

from __future__ import annotations

import errno
from typing import NoReturn

import typer

from slurm_forge.errors import ForgeError

FAILED = 2
INTERRUPTED = 130
_ELSEWHERE = "or choose another folder: --runs DIR or SLURM_FORGE_RUNS."
#: What to do about what the system refuses.
_ADVICE = {
    errno.ENOSPC: f"Make room (df -h and df -i of the folder of runs), {_ELSEWHERE}",
    errno.EDQUOT: f"Make room or ask for a larger quota, {_ELSEWHERE}",
    errno.EROFS: f"Go to a machine where it can be written, {_ELSEWHERE}",
    errno.EACCES: f"Ask its owner for access, {_ELSEWHERE}",
    errno.EPERM: f"Ask its owner for access, {_ELSEWHERE}",
    errno.ENAMETOOLONG: f"Choose a shorter name, {_ELSEWHERE}",
    errno.ENOMEM: "Raise the limit of this shell (ulimit -v), or leave other programs.",
    errno.EMFILE: "Raise the limit of open files: ulimit -n.",
}


def fail(error: ForgeError | OSError, closing: str = "") -> NoReturn:
    """Print the error (and ``closing``) on stderr and leave with status 2."""
    from slurm_forge.report.text import paragraph

    text = str(error) if isinstance(error, ForgeError) else _words(error)
    typer.echo(paragraph(text), err=True)
    if closing:
        typer.echo(closing, err=True)
    raise typer.Exit(FAILED)


def _words(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    advice = _ADVICE.get(error.errno or 0)
    return f"{place}{error.strerror or error}" + (f"\n  {advice}" if advice else "")
