"""``sites``: the known clusters, and everything known about one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.cluster import (
    sites_check,
    sites_detect,
)
from slurm_forge.cli.completion import site_names
from slurm_forge.cli.options import AsJson

if TYPE_CHECKING:
    from slurm_forge.site.loading import LoadedSite, SitePlaces

_PATIENCE_S = 5.0

app = typer.Typer(
    name="sites",
    help="Which clusters are known, and their site files.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLine:
    """One site file.  ``origin`` is packaged or yours; ``replaced``: one of that name comes first.

    ``problem`` says why the file can't be used, and is empty as a rule.
    """

    name: str
    title: str
    path: str
    origin: str
    replaced: bool
    problem: str


@dataclass(frozen=True, slots=True)
class SitesListed:
    """What ``sites list --json`` prints."""

    sites: tuple[SiteLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueShown:
    """A value and where it comes from: ``line`` of the site's file, None for a default.

    ``here`` is what the environment of this command has instead, for variables that the site sets
    or forbids.
    """

    key: str
    value: str
    line: int | None
    here: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteShown:
    """What ``sites show --json`` prints."""

    name: str
    path: str
    origin: str
    because: str
    values: tuple[ValueShown, ...]
    unknown: tuple[str, ...]


app.command()(sites_check.check)
app.command()(sites_check.schema)
app.command()(sites_detect.detect)


@app.command("list")
def list_(json: AsJson = False) -> None:
    """A line for every site file.

    \b
    Examples:
      slurm-forge sites list
      slurm-forge sites list --json
    """
    from slurm_forge.cli.run_choice import (
        from_here,
        site_places,
    )
    from slurm_forge.errors import ForgeError
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.text import clean

    places = site_places()
    lines: list[SiteLine] = []
    for path in places.files():
        title = problem = ""
        try:
            title = places.load(str(path)).site.title or ""
        except (ForgeError, OSError) as error:
            problem = str(error).splitlines()[0]
        replaced = any(each.name == path.stem for each in lines)
        lines.append(
            SiteLine(
                name=path.stem,
                title=title,
                path=str(path),
                origin=_origin(path, places),
                replaced=replaced,
                problem=problem,
            )
        )
    if json:
        typer.echo(to_json(SitesListed(tuple(lines))))
        return
    width = max((len(each.name) for each in lines), default=0)
    for each in lines:
        shown = each.problem or each.title
        note = "   (replaced by yours)" if each.replaced else ""
        file = "" if each.origin == "packaged" else f"   {from_here(Path(each.path))}"
        typer.echo(f"{each.name:<{width}}   {each.origin:<8}   {clean(shown, 200)}{file}{note}")


@app.command()
def show(
    site: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE]",
            help="The site; without it SLURM_FORGE_SITE, site: in your config.yaml, else the one "
            "of this cluster.",
            show_default=False,
            autocompletion=site_names,
        ),
    ] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show file and line of each value.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Everything that is known about a site.

    Values of your environment that override the site's variables are shown beside them.

    \b
    Examples:
      slurm-forge sites show
      slurm-forge sites show mycluster --origin
    """
    from slurm_forge.cli.run_choice import (
        from_here,
        site_places,
    )
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.text import clean
    from slurm_forge.site.origins import unknown_keys

    places = site_places()
    named = site is not None or places.preset() is not None
    loaded = places.load(site, cluster_name=None if named else cluster_name())
    shown = SiteShown(
        name=loaded.site.name,
        path=str(loaded.path.absolute()),
        origin=_origin(loaded.path, places),
        because=loaded.because,
        values=values_here(loaded),
        unknown=unknown_keys(loaded.site),
    )
    if json:
        typer.echo(to_json(shown))
        return
    file = from_here(Path(shown.path))
    typer.echo(f"{shown.name}   {file}   ({shown.because})")
    width = max((len(each.key) for each in shown.values), default=0)
    wide = max((min(len(each.value), 60) for each in shown.values), default=0)
    for value in shown.values:
        where = "default" if value.line is None else f"{file}:{value.line}"
        cells = [f"{value.key:<{width}}", f"{clean(value.value, 300):<{wide}}" if origin else ""]
        cells[1] = cells[1] or clean(value.value, 300)
        cells += [where] if origin else []
        cells += [clean(value.here, 200)] if value.here else []
        typer.echo(f"  {'   '.join(cells)}".rstrip())
    if shown.unknown:
        typer.echo(f"  not known: {', '.join(shown.unknown)}")


def values_here(loaded: LoadedSite) -> tuple[ValueShown, ...]:
    """Everything known about a site, beside the environment of this command."""
    from slurm_forge.knobs import process_environ
    from slurm_forge.site.origins import values_of
    from slurm_forge.site.variables import NCCL_INTERFACE, VariableDifferenceKind, differences

    here: dict[str, str] = {}
    environment = process_environ()
    interface = environment.get(NCCL_INTERFACE)
    if interface is not None and interface != loaded.site.socket_interface:
        here["socket_interface"] = f"(your environment has {NCCL_INTERFACE}={interface})"
    for each in differences(loaded.site.env, environment):
        if each.kind is VariableDifferenceKind.FORBIDDEN:
            here[f"env.never.{each.name}"] = f"(your environment has {each.found})"
        elif each.kind is VariableDifferenceKind.OTHER:
            here[f"env.always.{each.name}"] = f"(your environment has {each.found}, which wins)"
    return tuple(
        ValueShown(key=each.key, value=each.value, line=each.line, here=here.get(each.key, ""))
        for each in values_of(loaded.site, loaded.document, loaded.cluster)
    )


def _origin(path: Path, places: SitePlaces) -> str:
    return "packaged" if path.parent == places.packaged else "yours"


def cluster_name() -> str | None:
    """Slurm's ClusterName, if it answers at once."""
    from datetime import timedelta

    from slurm_forge.errors import ForgeError
    from slurm_forge.slurm.client import SubprocessSlurm

    slurm = SubprocessSlurm.of_this_process()
    try:
        if isinstance(slurm, SubprocessSlurm):
            slurm = slurm.with_timeout(timedelta(seconds=_PATIENCE_S))
        return slurm.show_config().cluster_name
    except ForgeError:
        return None
