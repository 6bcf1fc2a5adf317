"""``sites check``: is a site file one that others can rely on?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from datetime import date

    from slurm_forge.documents import Document
    from slurm_forge.site.checking import SiteRemark
    from slurm_forge.site.model import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class RemarkShown:
    """One thing about a file; ``kind`` is mistake or advice."""

    file: str
    line: int | None
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class SitesChecked:
    """What ``sites check --json`` prints."""

    remarks: tuple[RemarkShown, ...]


def check(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="Site files; several are compared with each other."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")] = False,
) -> None:
    """Read site files strictly, and report facts without sources, guesses and contradictions.

    Exit status: 0 no mistakes, 1 mistakes.

    Example:  slurm-forge sites check ~/.config/slurm_forge/sites/hill.yaml
    """
    from datetime import datetime, timezone

    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.text import clean, plural

    remarks, read = _read(files)
    remarks += _remarks(read, datetime.now(timezone.utc).date())
    remarks.sort(key=lambda each: (each.file, each.line or 0))
    mistakes = [each for each in remarks if each.kind == "mistake"]
    if json:
        typer.echo(to_json(SitesChecked(tuple(remarks))))
    else:
        for each in remarks:
            where = each.file if each.line is None else f"{each.file}:{each.line}"
            advice = "advice: " if each.kind == "advice" else ""
            typer.echo(f"{where}: {advice}{clean(each.message, 400)}")
        for file in read:
            if not any(each.file == file for each in mistakes):
                typer.echo(f"{file}: no mistakes")
        if mistakes:
            count = plural(len(mistakes), "mistake")
            typer.echo(f"{count}; how a site file is written: docs/sites/contributing.md")
    if mistakes:
        raise typer.Exit(1)


def schema() -> None:
    """Print the JSON Schema of site files, for editors.

    Example:  slurm-forge sites schema > site.schema.json
    """
    from slurm_forge.site.schema import schema_text

    typer.echo(schema_text(), nl=False)


def _read(files: list[Path]) -> tuple[list[RemarkShown], dict[str, tuple[Site, Document]]]:
    """The files that can be read, and what is wrong with the others."""
    from slurm_forge.errors import ConfigError, ForgeError
    from slurm_forge.site.loading import SitePlaces, packaged_folder

    remarks: list[RemarkShown] = []
    read: dict[str, tuple[Site, Document]] = {}
    for path in files:
        try:
            # A path, also where it has no slash in it.
            loaded = SitePlaces(packaged=packaged_folder()).load(str(path.absolute()))
        except (ForgeError, OSError) as error:
            line = error.line if isinstance(error, ConfigError) else None
            text = error.message if isinstance(error, ForgeError) else str(error)
            step = error.next_step if isinstance(error, ConfigError) else ""
            # One error may name several lines, each with its file in front.
            remarks.append(
                RemarkShown(
                    file=str(path),
                    line=line,
                    kind="mistake",
                    message=" ".join(part for part in (text, step) if part),
                )
            )
        else:
            read[str(path)] = (loaded.whole, loaded.document)
    return remarks, read


def _remarks(read: dict[str, tuple[Site, Document]], today: date) -> list[RemarkShown]:

    from slurm_forge.site.checking import check_site, check_together

    pairs: list[tuple[str, SiteRemark]] = [
        (file, remark) for file, (site, _) in read.items() for remark in check_site(site, today)
    ]
    pairs += check_together({file: site for file, (site, _) in read.items()})
    remarks = []
    for file, remark in pairs:
        line, message = remark.at(read[file][1])
        kind = "mistake" if remark.mistake else "advice"
        remarks.append(RemarkShown(file=file, line=line, kind=kind, message=message))
    return remarks
