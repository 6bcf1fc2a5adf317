"""``nodes``: the strikes of runs and users against nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import site_names
from slurm_forge.cli.options import AsJson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_forge.node_ledger import NodeLedger

app = typer.Typer(
    name="nodes",
    help="Which nodes runs exclude; strike and release them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Nodes = Annotated[
    list[str], typer.Argument(metavar="NODE...", help="Names of nodes, or lists like n[01-04].")
]
SiteName = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME|FILE",
        help="Site (default: SLURM_FORGE_SITE, Slurm's ClusterName).",
        autocompletion=site_names,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME", help="Slurm's ClusterName (default: this cluster)."),
]


@app.command("list")
def list_(
    every: Annotated[
        bool, typer.Option("--all", help="All nodes with strikes, and every strike.")
    ] = False,
    json: AsJson = False,
    cluster: Cluster = None,
    site: SiteName = None,
) -> None:
    """A line for every node with strikes.

    The worst come first.  A strike loses half of its weight in three days.  A node is
    excluded while the rest of its strikes adds up to 1 or more, or while the strike of a user
    lasts, unless too many nodes would be excluded.

    \b
    Examples:
      slurm-forge nodes list
      slurm-forge nodes list --all
    """
    from slurm_forge.cli.cluster.nodes_listing import list_nodes
    from slurm_forge.cli.cluster.nodes_text import nodes_text
    from slurm_forge.report.encoding import to_json

    ledger, partitions = _open(cluster, site)
    listed = list_nodes(ledger, every=every, partitions=partitions)
    if json:
        typer.echo(to_json(listed))
        return
    typer.echo(nodes_text(listed, now=time.time(), every=every), nl=False)


@app.command()
def release(
    nodes: Nodes,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Why, for later readers.")] = "",
    json: AsJson = False,
    cluster: Cluster = None,
    site: SiteName = None,
) -> None:
    """Trust nodes again: their strikes so far no longer count.

    Jobs that already wait in the queue keep what they were submitted with.

    \b
    Examples:
      slurm-forge nodes release n06
      slurm-forge nodes release "n[08-09]"
    """
    from slurm_forge.person import person
    from slurm_forge.recovery.nodes.score import node_scores
    from slurm_forge.recovery.nodes.statements import NodeRelease

    ledger, _ = _open(cluster, site)
    names = _names(nodes)
    now = time.time()
    known = {each.node for each in node_scores(ledger.read().ledger, now, ledger.rules)}
    ledger.add([NodeRelease(node=name, time=now, by=person(), why=why) for name in names])
    _noted(ledger, "release", names, None, why, as_json=json)
    unknown = [name for name in names if name not in known]
    if unknown and not json:
        from slurm_forge.report import text as t

        typer.echo(f"no strikes against {t.nodes(unknown)}")


@app.command()
def strike(
    nodes: Nodes,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Why, for later readers.")],
    for_: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="2d, 12h; else until released.")
    ] = None,
    json: AsJson = False,
    cluster: Cluster = None,
    site: SiteName = None,
) -> None:
    """Exclude nodes from now on, whatever runs have seen of them.

    A job that could not start without one of them gets it all the same.

    \b
    Examples:
      slurm-forge nodes strike n06 --why "slow link, ticket 4711"
      slurm-forge nodes strike "n[08-09]" --why "slow link" --for 2d
    """
    from slurm_forge.errors import ConfigError
    from slurm_forge.person import person
    from slurm_forge.recovery.nodes.statements import BY_HAND, Strike
    from slurm_forge.units import parse_duration

    try:
        length = None if for_ is None else parse_duration(for_).total_seconds()
    except ValueError as error:
        raise ConfigError(f"--for: {error}", next_step="For example: --for 2d.") from None
    if length == 0:
        raise ConfigError("--for must be longer than 0", next_step="For example: --for 2d.")
    names = _names(nodes)
    ledger, partitions = _open(cluster, site)
    _refuse_unknown(names, partitions)
    now = time.time()
    until = None if length is None else now + length
    ledger.add(
        [
            Strike(
                node=name, time=now, weight=1.0, cause=BY_HAND, by=person(), until=until, why=why
            )
            for name in names
        ]
    )
    _noted(ledger, "strike", names, until, why, as_json=json)


def _open(cluster: str | None, site: str | None) -> tuple[NodeLedger, Mapping[str, frozenset[str]]]:
    """The ledger, and the nodes of the cluster's partitions where Slurm was asked and said them."""
    from slurm_forge.cli.run_choice import (
        node_ledger,
        site_places,
    )
    from slurm_forge.errors import ConfigError, SlurmCommandError
    from slurm_forge.launch.nodes.excluded_nodes import nodes_of
    from slurm_forge.slurm.client import SubprocessSlurm

    places = site_places()
    if cluster is not None:
        return node_ledger(places.load(site, cluster_name=cluster).site, cluster), {}
    slurm = SubprocessSlurm.of_this_process()
    try:
        name = slurm.show_config().cluster_name
        records = slurm.show_partitions()
    except SlurmCommandError as error:
        raise ConfigError(
            f"which cluster's nodes? Slurm does not say: {error.message}",
            next_step="Name it: --cluster NAME (ClusterName of `scontrol show config`).",
        ) from None
    named = {record.name: nodes_of(records, record.name) for record in records}
    partitions = {name: nodes for name, nodes in named.items() if nodes}
    return node_ledger(places.load(site, cluster_name=name).site, name), partitions


def _names(nodes: list[str]) -> tuple[str, ...]:
    from slurm_forge.slurm.text.nodelist import expand_nodes

    return tuple(dict.fromkeys(name for each in nodes for name in expand_nodes(each)))


def _refuse_unknown(names: tuple[str, ...], partitions: Mapping[str, frozenset[str]]) -> None:
    if not partitions:
        return
    there = frozenset[str]().union(*partitions.values())
    unknown = [name for name in names if name not in there]
    if unknown:
        from slurm_forge.documents import nearest
        from slurm_forge.errors import ConfigError

        close = nearest(unknown[0], sorted(there))
        meant = f' (did you mean "{close}"?)' if close else ""
        raise ConfigError(
            f"there is no node {unknown[0]!r} in any partition{meant}",
            next_step="Names of nodes: sinfo -N.",
        )


def _noted(
    ledger: NodeLedger,
    verb: str,
    names: tuple[str, ...],
    until: float | None,
    why: str,
    *,
    as_json: bool,
) -> None:
    """Print what was recorded, in words or as one JSON document."""
    if as_json:
        from slurm_forge.cli.cluster.nodes_listing import Noted
        from slurm_forge.report.encoding import to_json

        cluster = ledger.cluster
        typer.echo(to_json(Noted(cluster=cluster, verb=verb, nodes=names, until=until, why=why)))
        return
    from slurm_forge.report import text as t

    if ledger.folder is None:
        typer.echo("nothing was written: SLURM_FORGE_NODES=off disables the node ledger")
    elif verb == "release":
        typer.echo(f"{t.nodes(names)}: trusted again.")
    else:
        end = "released" if until is None else t.moment(until, time.time())
        again = f"slurm-forge nodes release {t.nodes(names)}"
        typer.echo(
            f"{t.nodes(names)}: excluded from your jobs until {end}, as long as enough other "
            f"nodes remain.   trust again: {again}"
        )
