"""``config``: the resolved job, and where each of its values comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slurm_forge.cli.completion import site_names
from slurm_forge.cli.options import AsJson
from slurm_forge.cli.start.settings import Settings

if TYPE_CHECKING:
    from slurm_forge.site.loading import LoadedSite
    from slurm_forge.spec import JobSpec
    from slurm_forge.spec.layers import Layered

#: What of a site file reaches a job beside what the job says itself.
_OF_THE_SITE = (
    "modules", "setup", "sbatch_options", "srun_options", "python", "env", "socket_interface",
    "host_suffix", "master_address", "node_ledger",
)  # fmt: skip
#: Only to be shown where a job file says it.
_OF_A_JOB = ("name", "entry", "command")

app = typer.Typer(
    name="config",
    help="The resolved job, from all files and options.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOf:
    """A value and where it comes from.

    ``origin`` is a file, an option with what was typed, or ``default``; ``line`` is that of a file.
    ``note`` says what wins over it at last.
    """

    key: str
    value: Any
    origin: str
    line: int | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The site or the folder of runs, its path, and what chose it."""

    name: str
    path: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigShown:
    """What ``config show --json`` prints; ``files`` were read, those that win last."""

    files: tuple[str, ...]
    site: Chosen
    runs: Chosen
    values: tuple[ValueOf, ...]
    from_site: tuple[ValueOf, ...]


@app.callback()
def _config() -> None:
    """What a job comes to, from all files and options."""


@app.command()
def show(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB.yaml]",
            help="The job file (default: what one in this folder would start from).",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            "--site",
            metavar="NAME|FILE",
            help="Site (default: SLURM_FORGE_SITE, site: in your settings, Slurm's ClusterName).",
            autocompletion=site_names,
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="DIR", help="Folder of runs, as for submit."),
    ] = None,
    settings: Settings = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show file and line of each value.")
    ] = False,
    json: AsJson = False,
) -> None:
    """The whole job with defaults, and how site and folder of runs are chosen.

    Each of these overrides those before it: your own config.yaml, the project's
    slurm_forge.yaml, the job file, --set.  Nothing is created or submitted.

    \b
    Examples:
      slurm-forge config show train.yaml
      slurm-forge config show train.yaml --origin --set recovery.cuda_oom.times=2
      slurm-forge config show --site generic --json
    """
    from slurm_forge.cli.cluster.sites import cluster_name
    from slurm_forge.cli.run_choice import (
        from_here,
        runs_chosen,
        site_places,
    )
    from slurm_forge.knobs import Knobs, process_environ
    from slurm_forge.report.encoding import to_json
    from slurm_forge.spec.layers import layered_job

    layered = layered_job(job, Knobs.from_environ(process_environ()), settings or [])
    places = site_places(layered.site)
    named = site is not None or places.preset() is not None
    loaded = places.load(site, cluster_name=None if named else cluster_name())
    folder, by = runs_chosen(runs, layered.runs)
    shown = ConfigShown(
        files=layered.files,
        site=Chosen(
            name=loaded.site.name,
            path=from_here(loaded.path.absolute()),
            because=loaded.because,
        ),
        runs=Chosen(name=folder.name, path=from_here(folder.absolute()), because=by),
        values=_values(layered, nameless=job is None),
        from_site=_from_site(loaded, layered.job),
    )
    typer.echo(to_json(shown) if json else _text(shown, origin=origin))


@app.command()
def schema(
    of_settings: Annotated[
        bool,
        typer.Option("--settings", help="Of config.yaml and slurm_forge.yaml, not of job files."),
    ] = False,
) -> None:
    """Print the JSON Schema of job files, for an editor that completes and checks YAML.

    \b
    Examples:
      slurm-forge config schema > job.schema.json
      slurm-forge config schema --settings > slurm_forge.schema.json
    """
    import json

    from slurm_forge.spec.layers import settings_schema
    from slurm_forge.spec.loading import job_schema

    document = settings_schema() if of_settings else job_schema()
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))


def _values(layered: Layered, *, nameless: bool) -> tuple[ValueOf, ...]:
    from slurm_forge.spec.origins import job_values

    return tuple(
        ValueOf(
            key=each.key,
            value=each.value,
            origin=each.place.source or "",
            line=each.place.line,
        )
        for each in job_values(layered)
        if not (nameless and each.path[0] in _OF_A_JOB and each.place.source == "default")
    )


def _from_site(loaded: LoadedSite, job: JobSpec) -> tuple[ValueOf, ...]:
    from slurm_forge.cli.cluster.sites import values_here
    from slurm_forge.cli.run_choice import from_here

    file = from_here(loaded.path.absolute())
    return tuple(
        ValueOf(
            key=f"site.{each.key}",
            value=each.value,
            origin="default" if each.line is None else file,
            line=each.line,
            note=_replaced_by_job(each.key, job) or each.here,
        )
        for each in values_here(loaded)
        if each.key.partition(".")[0] in _OF_THE_SITE
    )


def _replaced_by_job(key: str, job: JobSpec) -> str:
    group, _, variable = key.partition(".")
    if group == "env" and variable.partition(".")[2] in job.env:
        return "(env of the job wins)" if not variable.startswith("never.") else "(the job sets it)"
    return ""


def _text(shown: ConfigShown, *, origin: bool) -> str:
    from slurm_forge.documents import flow
    from slurm_forge.report.text import clean

    over = ", over ".join(reversed(shown.files)) or "no file"
    lines = [
        f"job    {clean(over, 1000)}",
        f"site   {shown.site.name}   {clean(shown.site.path, 1000)}   "
        f"({clean(shown.site.because, 1000)})",
        f"runs   {clean(shown.runs.path, 1000)}   ({clean(shown.runs.because, 1000)})",
    ]
    width = max(len(each.key) for each in (*shown.values, *shown.from_site))
    texts = [(each, clean(flow(each.value), 1000)) for each in shown.values]
    texts += [(each, clean(each.value, 1000)) for each in shown.from_site]
    wide = max(min(len(text), _WIDE) for _, text in texts)
    for each, text in texts:
        cells = [f"{each.key:<{width}}", f"{text:<{wide}}"]
        if origin:
            where = clean(each.origin, 1000)
            cells.append(where if each.line is None else f"{where}:{each.line}")
        cells += [each.note] if each.note else []
        lines.append(f"  {'   '.join(cells)}".rstrip())
    return "\n".join(lines)


#: Longer values push the columns after them to the right.
_WIDE = 32
