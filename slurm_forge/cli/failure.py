"""What a person sees when something can't be done: one message on stderr and exit status 2."""

from __future__ import annotations

from typing import NoReturn

import typer

from slurm_forge.errors import ForgeError

FAILED = 2
INTERRUPTED = 130


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
    return f"{place}{error.strerror or error}"
