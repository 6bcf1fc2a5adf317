"""``probe``: check nodes now, in a job or on this machine, without a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurm_forge.launch.diagnose.node_probe import (
        ProbeResult,
        ProbeTarget,
    )

_BAD = 1
_START_S = 300.0


def probe(
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="ID", help="The nodes of your running job ID."),
    ] = None,
    local: Annotated[
        int | None,
        typer.Option("--local", metavar="N", min=1, help="This machine, N processes."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", metavar="N", min=1, help="N nodes of a small job submitted for this."
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="Partition, for --nodes.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Storage to test: a folder that all nodes see (default: here)."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs that a node must have (default: what it has).")
    ] = None,
    within: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit for checking a node.")
    ] = "60s",
    strike: Annotated[
        bool, typer.Option("--strike", help="Record the findings in the node ledger.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")] = False,
    broken: Annotated[str, typer.Option("--broken", hidden=True)] = "",
) -> None:
    """Whether nodes are fit to train on: GPUs, memory, storage, and all of them together.

    Inside an allocation (salloc, a batch script) it checks the nodes of that allocation; elsewhere
    choose them: --job, --local or --nodes.  It does not disturb a running job: it computes nothing
    on its GPUs.  Exit status: 0 all fine, 1 something is bad, 2 the check could not be made.

    \b
    Examples:
      slurm-forge probe --local 2
      slurm-forge probe --job 8812301
      slurm-forge probe --nodes 4 --partition long --strike
    """
    from slurm_forge.cli.cluster.probe_text import (
        probe_json,
        probe_text,
    )
    from slurm_forge.errors import ConfigError
    from slurm_forge.launch.diagnose.node_probe import (
        look_at,
        node_words,
    )
    from slurm_forge.units import parse_duration

    try:
        limit = parse_duration(within)
        if not limit:
            raise ValueError("must be longer than 0")
    except ValueError as error:
        raise ConfigError(f"--within: {error}", next_step="For example: --within 60s.") from None
    if limit <= timedelta(0):
        raise ConfigError("--within must be longer than 0", next_step="For example: --within 60s.")
    if strike and local is not None:
        raise ConfigError("--strike is for nodes of a cluster", next_step="Remove --strike.")
    payload = node_words((folder or Path.cwd()).absolute(), limit)
    payload += () if gpus is None else (f"--gpus={gpus}",)
    payload += (f"--broken={broken}",) if broken else ()
    place = _place(job, local, nodes, partition, payload, gpus)
    result = look_at(
        place,
        within=limit,
        start_within=timedelta(seconds=_START_S) + limit,
        environ=_environment(os.environ, of_its_own=nodes is not None),
    )
    struck = _strike(result) if strike else ()
    typer.echo(probe_json(result, struck) if json else probe_text(result, struck), nl=json)
    if result.measured is None:
        raise typer.Exit(2)
    bad = result.refused is not None or bool(result.measured.told and _any_bad(result))
    if bad:
        raise typer.Exit(_BAD)


def _environment(environ: Mapping[str, str], *, of_its_own: bool) -> dict[str, str]:
    """For srun, which makes a step of an allocation that it knows of, and no job ``of_its_own``."""
    needed = ("SLURM_CONF",)
    return {
        name: value
        for name, value in environ.items()
        if not of_its_own or not name.startswith("SLURM_") or name in needed
    }


def _any_bad(result: ProbeResult) -> bool:
    from slurm_forge.control.messages.preflight import CheckVerdict
    from slurm_forge.recovery.monitor.isolation import Why

    failed = result.isolated is not None and result.isolated.why not in (Why.FINE, Why.NOT_AGAIN)
    return failed or any(c.verdict is CheckVerdict.BAD for r in result.reports for c in r.checks)


def _place(
    job: str | None,
    local: int | None,
    nodes: int | None,
    partition: str | None,
    payload: tuple[str, ...],
    gpus: int | None,
) -> ProbeTarget:
    """Where to check, and by which command."""
    from slurm_forge.errors import ConfigError
    from slurm_forge.launch.diagnose.node_probe import (
        ProbeTarget,
        srun_words,
    )
    from slurm_forge.slurm.environment import SlurmEnvironment

    if sum(each is not None for each in (job, local, nodes)) > 1:
        raise ConfigError(
            "--job, --local and --nodes are mutually exclusive", next_step="Give one of the three."
        )
    if partition is not None and nodes is None:
        raise ConfigError(
            "--partition goes with --nodes",
            next_step="For example: slurm-forge probe --nodes 2 --partition gpu.",
        )
    if local is not None:
        commands = tuple((*payload, f"--place={rank}/{local}") for rank in range(local))
        return ProbeTarget(commands=commands, world=local)
    if nodes is not None:
        options = ["--time=10", *([f"--partition={partition}"] if partition else [])]
        options += [f"--gpus-per-node={gpus}"] if gpus else []
        words = srun_words(payload, nodes, options)
        return ProbeTarget(commands=(words,), world=nodes)
    if job is not None:
        named = _nodes_of(job)
        options = [f"--jobid={job}", "--overlap"]
        words = srun_words((*payload, "--busy"), len(named), options)
        return ProbeTarget(commands=(words,), world=len(named), nodes=named)
    environment = SlurmEnvironment.from_environ(os.environ)
    if environment is None or not environment.nodes:
        raise ConfigError(
            "which nodes?  This shell is not inside a Slurm allocation",
            next_step="Give --job ID, --nodes N or --local N, or run it inside salloc or sbatch.",
        )
    words = srun_words(payload, len(environment.nodes), ("--overlap",))
    return ProbeTarget(commands=(words,), world=len(environment.nodes), nodes=environment.nodes)


def _nodes_of(job: str) -> tuple[str, ...]:
    from slurm_forge.errors import ConfigError
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.slurm.states import JobState
    from slurm_forge.slurm.text.nodelist import expand_nodes

    record = SubprocessSlurm.of_this_process().show_job(job)
    if record is None or record.state is not JobState.RUNNING or not record.nodelist:
        state = "not known to Slurm" if record is None else record.state.value
        raise ConfigError(
            f"job {job} is not running ({state})", next_step="Running jobs: squeue --me -t R."
        )
    return expand_nodes(record.nodelist)


def _strike(result: ProbeResult) -> tuple[str, ...]:
    """Record the findings in the ledger; the nodes that were struck."""
    import time

    from slurm_forge.cli.run_choice import (
        node_ledger,
        site_places,
    )
    from slurm_forge.person import person
    from slurm_forge.recovery.nodes.strikes import strikes_of
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.vocabulary.decision import Incident

    refused = result.refused
    if refused is None:
        return ()
    incident = Incident(
        id=f"probe.{int(time.time())}",
        cause=refused.cause,
        confidence=refused.confidence,
        evidence=refused.evidence,
        hosts=refused.hosts,
    )
    hosts = {report.host for report in result.reports}
    strikes = strikes_of(incident, run="probe", nodes=hosts, time=time.time(), by=person())
    if not strikes:
        return ()
    cluster = SubprocessSlurm.of_this_process().show_config().cluster_name
    node_ledger(site_places().load(None, cluster_name=cluster).site, cluster).add(strikes)
    return tuple(strike.node for strike in strikes)
