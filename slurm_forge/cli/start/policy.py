"""``policy``: what recovery would do, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import cause_names
from slurm_forge.cli.start.settings import Settings

if TYPE_CHECKING:
    from slurm_forge.vocabulary.cause import Cause

_MOST = 1_000_000_000
_DEFAULT_EVERY = 100

app = typer.Typer(
    name="policy",
    help="What recovery would do.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Steps = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=_MOST, help="Steps between two checkpoints."),
]


@app.callback()
def _policy() -> None:
    """What would be done about trouble."""


@app.command()
def test(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    cause: Annotated[
        str,
        typer.Option(
            metavar="CAUSE",
            help="A key of recovery:, such as non_finite or hang.",
            autocompletion=cause_names,
        ),
    ],
    at: Annotated[
        int, typer.Option(metavar="STEP", min=1, max=_MOST, help="Step at which it strikes.")
    ] = 1000,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, max=100, help="How many times in a row.")
    ] = 1,
    every_steps: Steps = None,
    global_batch: Annotated[
        int, typer.Option(metavar="N", min=1, max=_MOST, help="Samples of one step.")
    ] = 512,
    micro_batch: Annotated[
        int, typer.Option(metavar="N", min=1, max=_MOST, help="Samples of one forward pass.")
    ] = 8,
    site: Annotated[
        str | None,
        typer.Option(
            "--site", metavar="NAME|FILE", help="Site, for its variables (SLURM_FORGE_SITE)."
        ),
    ] = None,
    settings: Settings = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")] = False,
) -> None:
    """Print what would be done if a cause struck, step by step; nothing is started.

    The decisions are real, the events are made up.  The program's hooks are not called.

    \b
    Examples:
      slurm-forge policy test train.yaml --cause preempted
      slurm-forge policy test train.yaml --cause non_finite --at 1200 --repeat 3
      slurm-forge policy test train.yaml --cause cuda_oom --set recovery.cuda_oom.times=2
    """
    from slurm_forge.cli.failure import fail
    from slurm_forge.cli.run_choice import site_places
    from slurm_forge.errors import ForgeError
    from slurm_forge.knobs import Knobs, process_environ
    from slurm_forge.recovery.policy.rehearsal import (
        Assumed,
        rehearse,
    )
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.submission.policy_text import (
        policy_test,
        policy_text,
    )
    from slurm_forge.site.variables import effective
    from slurm_forge.spec.layers import layered_job

    try:
        meant = _cause(cause)
        found_job = layered_job(job, Knobs.from_environ(process_environ()), settings or [])
        spec = found_job.job
        places = site_places(found_job.site)
        known = None if site is None and places.preset() is None else places.load(site).site
    except (ForgeError, OSError) as error:
        fail(error)
    assumed = Assumed(
        every_steps=every_steps or spec.checkpoint.every_steps or _DEFAULT_EVERY,
        global_batch=global_batch,
        micro_batch=micro_batch,
        on_hang=()
        if known is None
        else effective(known.env.on_hang, known.env.always, process_environ(), spec.env),
    )
    rehearsal = rehearse(spec, meant, at=at, repeat=repeat, assumed=assumed)
    typer.echo(
        to_json(policy_test(spec, rehearsal)) if json else policy_text(spec, rehearsal), nl=json
    )


def _cause(text: str) -> Cause:
    from slurm_forge.documents import did_you_mean
    from slurm_forge.errors import ConfigError
    from slurm_forge.spec import Recovery
    from slurm_forge.vocabulary.cause import Cause

    known = [each.value for each in Cause]
    if text not in known:
        near = did_you_mean(text, known, Recovery.known_as)
        raise ConfigError(
            f'--cause: unknown cause "{text[:40]}" {near}',
            next_step="Causes are the keys of recovery: in docs/reference/job-file.md.",
        )
    return Cause(text)
