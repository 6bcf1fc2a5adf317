"""``extend`` and ``change``: the job of a run that exists, changed on purpose."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slurm_forge.cli.completion import setting_keys
from slurm_forge.cli.options import AsJson, GlobalBatch, RunOrJob, Runs, SubmittedSite

if TYPE_CHECKING:
    from slurm_forge.journal import RunState
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.model import Site
    from slurm_forge.slurm.client import Slurm
    from slurm_forge.spec.run_file import RunFile

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would change and what follows."),
]
Submit = Annotated[
    bool,
    typer.Option("--submit/--no-submit", help="Submit the run afterwards, or leave it at rest."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeResult:
    """What ``extend`` and ``change`` print with ``--json``.

    ``job`` is the job in which the run continues, empty if nothing was submitted.
    """

    run: str
    path: str
    changes: tuple[Any, ...]
    consequences: tuple[str, ...]
    notes: tuple[str, ...]
    dry_run: bool
    job: str


def extend(
    run: RunOrJob,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="The argument and its new value: args.max_steps=800. Repeatable.",
            autocompletion=setting_keys,
        ),
    ],
    site: SubmittedSite = None,
    runs: Runs = None,
    dry_run: DryRun = False,
    submit: Submit = True,
    json: AsJson = False,
) -> None:
    """Train a run further than its job file says, also a finished one.

    Takes whole numbers of args that grow (steps, epochs) and resources.time; slurm-forge
    change takes any key.  A run that is training has to be stopped first.

    \b
    Examples:
      slurm-forge extend tiny-gpt --set args.max_steps=800
      slurm-forge extend tiny-gpt --set args.epochs=6 --dry-run
    """
    _change("extend", run, settings, None, site, runs, dry_run=dry_run, submit=submit, as_json=json)


def change(
    run: RunOrJob,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A key of the job file and its value from now on: args.lr=1e-4. Repeatable.",
            autocompletion=setting_keys,
        ),
    ] = None,
    global_batch: GlobalBatch = None,
    site: SubmittedSite = None,
    runs: Runs = None,
    dry_run: DryRun = False,
    submit: Submit = True,
    json: AsJson = False,
) -> None:
    """Change the job of a run that exists: learning rate, batch size, number of nodes, any key.

    The journal and explain name every change with both values.  A resume accepts exactly
    these; what differs otherwise is refused as before.  A run that is training has to be
    stopped first; a job that waits is held meanwhile, and cancelled where its batch script
    would be another one.

    \b
    Examples:
      slurm-forge change tiny-gpt --set args.lr=1e-4 --dry-run
      slurm-forge change tiny-gpt --set args.batch_size=64 --set resources.nodes=4
      slurm-forge change tiny-gpt --set args.accumulate=4 --global-batch 128
    """
    _change(
        "change",
        run,
        settings or [],
        global_batch,
        site,
        runs,
        dry_run=dry_run,
        submit=submit,
        as_json=json,
    )


def _change(
    verb: str,
    wanted: str,
    settings: list[str],
    global_batch: int | None,
    site_name: str | None,
    runs: Path | None,
    *,
    dry_run: bool,
    submit: bool,
    as_json: bool,
) -> None:
    from slurm_forge.cli.preparation import Checked, fallback_doubts, refuse
    from slurm_forge.cli.run_choice import reference, site_places
    from slurm_forge.cli.run_of_job import meant
    from slurm_forge.journal import fold, read_to_fold
    from slurm_forge.launch.attempt.run_lock import hold_run_lock
    from slurm_forge.launch.requeue.change import (
        change_run,
        global_batch_of,
        refuse_foreign_script,
        refuse_kept_script,
    )
    from slurm_forge.recovery.job_changes import (
        job_changes,
        refuse_change,
        refuse_not_prolonging,
    )
    from slurm_forge.report.status.run_status import again
    from slurm_forge.report.submission.change_text import change_lines, consequences
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.spec.entry import check_entry, default_arguments
    from slurm_forge.spec.layers import with_settings
    from slurm_forge.spec.run_file import read_run_file

    run = meant(wanted, runs)
    run.refuse_others()
    name = reference(run)
    file = read_run_file(run.spec_file)
    records = read_to_fold(run)
    state = fold(records)
    layered = with_settings(file.job, settings)
    new = layered.job
    _refuse_nothing(settings, global_batch, name)
    refuse_foreign_script(run, file.job)
    refuse_change(file.job, new, name)
    known_batch = global_batch_of(records)
    _refuse_unknown_batch(global_batch, known_batch, name)
    changes = job_changes(file.job, new, global_batch=known_batch, new_global_batch=global_batch)
    doubts: tuple[str, ...] = ()
    defaults: dict[str, object] = {}
    if new.entry is not None:
        place = file.entry_place(run, new.entry)
        doubts = check_entry(*place, run.spec_file, list(new.args))
        defaults = default_arguments(*place)
    doubts = (*doubts, *fallback_doubts(new))
    if state.committed_step is not None and not file.open_store(run).candidates():
        doubts = (*doubts, f"all checkpoints of {run.name} are gone: restore them first")
    if verb == "extend":
        refuse_not_prolonging(changes, name, defaults)
    site = site_places().load(site_name or file.site_file or file.site).site
    refuse(
        Checked(job=new, path=run.spec_file, doubts=doubts, document=layered.document), site, run
    )
    refuse_kept_script(run, file, new, site)
    renewed = file.with_job(new)
    follows = consequences(
        changes,
        ranks=(_ranks(file, state), _ranks(renewed, state)),
        step=state.committed_step,
        finished=run.is_done(),
    )
    slurm = None if state.is_local else SubprocessSlurm.of_this_process()
    now, notes = file, doubts
    if not dry_run:
        with hold_run_lock(run) if state.is_local else nullcontext():
            changed = change_run(run, file, renewed, changes, verb=verb, site=site, slurm=slurm)
        now, notes = changed.file, (*doubts, *changed.notes)
    if not as_json:
        for line in (*change_lines(changes), *(f"then: {each}" for each in follows), *notes):
            typer.echo(line)
    job = text = ""
    if submit and not dry_run and slurm is not None:
        job, text = bring_back_changed(run, now, site, slurm)
    if as_json:
        from slurm_forge.report.encoding import to_json

        result = ChangeResult(
            run=run.name,
            path=str(run.path),
            changes=changes,
            consequences=follows,
            notes=notes,
            dry_run=dry_run,
            job=job,
        )
        typer.echo(to_json(result))
        return
    if dry_run:
        typer.echo("dry run: nothing was changed.")
    elif text:
        typer.echo(f"{run.name}: changed; {text}.   follow: slurm-forge status {name}")
    else:
        typer.echo(f"{run.name}: changed.   to continue: {again(name, state)}")


def bring_back_changed(
    run: RunDirectory, file: RunFile, site: Site, slurm: Slurm
) -> tuple[str, str]:
    """Submit the run, or release its job: the job, and what was done."""
    from slurm_forge.cli.cluster.excluded_nodes_text import left_out_now
    from slurm_forge.cli.failure import fail
    from slurm_forge.errors import ForgeError
    from slurm_forge.launch.requeue.reconcile import bring_back

    out = left_out_now(slurm, file.job, site)
    try:
        brought = bring_back(run, slurm, site=site, file=file, exclude=out.exclude)
    except (ForgeError, OSError) as error:
        fail(error, f"run.yaml of {run.name} is as asked for; only the submission did not work.")
    if brought.submitted:
        for line in out.notes:
            typer.echo(line, err=True)
    return brought.job, brought.text


def _ranks(file: RunFile, state: RunState) -> int:
    """Of a run of this machine, on which there is no more than one node."""
    resources = file.job.resources
    return file.ranks or resources.tasks_per_node if state.is_local else resources.tasks


def _refuse_nothing(wanted: list[str], global_batch: int | None, name: str) -> None:
    from slurm_forge.errors import ConfigError

    if not wanted and global_batch is None:
        raise ConfigError(
            "--set: nothing is given to change",
            next_step=f"slurm-forge change {name} --set KEY=VALUE, for example args.lr=1e-4; "
            "the keys: slurm-forge config schema.",
        )


def _refuse_unknown_batch(wanted: int | None, known: int | None, name: str) -> None:
    from slurm_forge.errors import ConfigError

    if wanted is not None and known is None:
        raise ConfigError(
            "--global-batch: the run has not trained with run.batches yet, so it has no batch size "
            "to be changed",
            next_step=f"Leave the option out: slurm-forge change {name} --set KEY=VALUE",
        )
