"""``sites detect``: a site file for this cluster, from what Slurm says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurm_forge.site.drafting import Draft

_LATEST_MODE, _LATEST_FOLDER_MODE = 0o644, 0o755


def detect(
    write: Annotated[
        bool,
        typer.Option("--write", help="Write it to your site files instead of printing it."),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FILE",
            help="Write it to FILE, named like the site, with .yaml.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Describe this cluster in a site file: partitions, QOS, preemption, limits, GPUs.

    Everything in it comes from Slurm; what Slurm does not know is null, with a comment.

    \b
    Examples:
      slurm-forge sites detect
      slurm-forge sites detect --write
      slurm-forge sites detect --to hill.yaml
    """
    from datetime import datetime, timezone

    from slurm_forge.cli.cluster.cluster_survey import look_at_slurm
    from slurm_forge.cli.run_choice import (
        from_here,
        site_places,
    )
    from slurm_forge.errors import ConfigError
    from slurm_forge.report.text import clean
    from slurm_forge.site.drafting import draft_site
    from slurm_forge.slurm.survey import Reply

    survey = look_at_slurm()
    name = None if to is None else to.stem
    draft = draft_site(survey, datetime.now(timezone.utc).date(), name=name)
    if draft is None:
        question = survey.questions[0]
        raise ConfigError(
            f"Slurm could not be queried: {question.command}: {question.reply.value}"
            + (f" ({question.words})" if question.words else ""),
            next_step="Go to a login node of the cluster, or load its Slurm module.",
        )
    for each in survey.questions:
        if each.reply is not Reply.ANSWERED:
            words = clean(f"skipped, {each.reply.value}: {each.command} {each.words}", 300)
            typer.echo(words, err=True)
    if to is None and not write:
        typer.echo(draft.text, nl=False)
        return
    folder = site_places().user_folder
    if to is not None:
        path = to.absolute()
        if path.suffix != ".yaml" or draft.name != path.stem:
            raise ConfigError(
                f"{path.name} can't be the name of a site file",
                next_step="Letters, digits, _ and -, then .yaml: for example hill.yaml.",
            )
    else:
        path = (folder or Path("~/.config/slurm_forge/sites").expanduser()) / f"{draft.name}.yaml"
    _write(path, draft, force=force)
    typer.echo(f"wrote {from_here(path)}")
    site_argument = str(path) if to is not None else draft.name
    typer.echo(
        f"look at it: slurm-forge sites show {site_argument} --origin   complete it, then: "
        f"slurm-forge sites check {path}"
    )


def _write(path: Path, draft: Draft, *, force: bool) -> None:
    from slurm_forge.errors import ConfigError
    from slurm_forge.files import create_exclusive, make_missing, write_atomic

    data = draft.text.encode()
    # Whoever can write there could have site files read.
    make_missing(path.parent, _LATEST_FOLDER_MODE)
    if force:
        write_atomic(path, data, mode=_LATEST_MODE)
    elif not create_exclusive(path, data, mode=_LATEST_MODE):
        raise ConfigError(
            f"{path} already exists and was not changed",
            next_step="Compare first: slurm-forge doctor. Then --force replaces it, or --to FILE "
            "writes another.",
        )
