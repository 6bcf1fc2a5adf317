"""``fork``: a new run that begins at a checkpoint of another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slurm_forge.cli.completion import setting_keys
from slurm_forge.cli.options import (
    AsJson,
    GlobalBatch,
    RunOrJob,
    Runs,
    SubmittedSite,
    wants_new_code,
)

if TYPE_CHECKING:
    from slurm_forge.cli.checkpoints.run_checkpoints import Opened
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.model import Site
    from slurm_forge.spec.layers import Layered
    from slurm_forge.store.identity import CheckpointName


_SCHEDULE_STAYS = (
    "then: learning-rate schedules continue from where they are, while steps are counted from 0; "
    "to restart the schedules, too: --fresh optimizer,data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkResult:
    """What ``fork`` prints with ``--json``; ``job`` is empty where nothing was submitted."""

    run: str
    path: str
    parent: str
    checkpoint: str
    step: int
    fresh: tuple[str, ...]
    changes: tuple[Any, ...]
    job: str


def fork(
    run: RunOrJob,
    name: Annotated[str, typer.Option("--name", metavar="NEW", help="Name of the new run.")],
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="A step, a name (or its beginning), or latest, good, best, next.",
        ),
    ] = "latest",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A key of the job file to change in the new run. Repeatable.",
            autocompletion=setting_keys,
        ),
    ] = None,
    fresh: Annotated[
        str,
        typer.Option(
            metavar="PARTS",
            help="What begins anew, separated by commas: optimizer (with its schedules), data "
            "(the first sample, steps counted from 0), rng.",
        ),
    ] = "",
    code: Annotated[
        str | None,
        typer.Option(
            "--code",
            metavar="new",
            help="new: the code as it is now, not the snapshot.",
        ),
    ] = None,
    global_batch: GlobalBatch = None,
    site: SubmittedSite = None,
    runs: Runs = None,
    submit: Annotated[
        bool, typer.Option("--submit/--no-submit", help="Submit the new run, or only create it.")
    ] = True,
    json: AsJson = False,
) -> None:
    """Begin a new run at a checkpoint of another one.

    It takes over the weights, the optimizers, the position in the data and the random states:
    with nothing changed it computes what the other run would have.  --fresh leaves parts of
    that behind.  The other run stays as it is, and may be training; deleting its checkpoints
    or all of it takes nothing away from the new one.

    \b
    Examples:
      slurm-forge fork tiny-gpt --name warmer --set args.lr=2e-3
      slurm-forge fork tiny-gpt --from 1200 --name again
      slurm-forge fork tiny-gpt --from best --name tuned --fresh optimizer,data,rng
    """
    from slurm_forge.cli.checkpoints.run_checkpoints import open_run
    from slurm_forge.cli.run_choice import reference, site_places
    from slurm_forge.cli.run_of_job import meant
    from slurm_forge.cli.start.change import bring_back_changed
    from slurm_forge.launch.requeue.change import (
        changed_later,
        global_batch_of,
        refuse_foreign_script,
    )
    from slurm_forge.launch.submit.fork import ForkRequest, fork_run
    from slurm_forge.recovery.job_changes import job_changes, merged, refuse_other_kind
    from slurm_forge.report.status.run_status import again
    from slurm_forge.report.submission.change_text import change_lines
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.spec.entry import check_entry
    from slurm_forge.spec.layers import with_settings

    parent = meant(run, runs)
    parent.refuse_others()
    opened = open_run(str(parent.path), None)
    file, state = opened.file, opened.state
    refuse_foreign_script(parent, file.job)
    parts = _parts(fresh)
    layered = with_settings(file.job, settings or (), name)
    refuse_other_kind(file.job, layered.job)
    checkpoint = _chosen(opened, from_)
    batch = global_batch_of(opened.records)
    changes = tuple(
        each
        for each in job_changes(
            file.job, layered.job, global_batch=batch, new_global_batch=global_batch
        )
        if each.key != "name"
    )
    if layered.job.entry is not None:
        kept = code is None and layered.job.code == file.job.code
        place = (layered.job.entry, file.folder)
        check_entry(
            *(file.entry_place(parent, layered.job.entry) if kept else place),
            parent.spec_file,
            list(layered.job.args),
        )
    chosen = site_places().load(site or file.site_file or file.site).site
    _refuse(layered, parent, chosen)
    request = ForkRequest(
        checkpoint=checkpoint,
        job=layered.job,
        changes=merged(changed_later(opened.records, checkpoint), changes),
        fresh=parts,
        global_batch=batch,
        new_code=wants_new_code(code),
        local=state.is_local,
    )
    child, now = fork_run(parent, file, state, request, runs=parent.path.parent)
    if not json:
        left = f", fresh: {', '.join(parts)}" if parts else ""
        typer.echo(f"{child.name}: begins at step {checkpoint.step} of {parent.name}{left}")
        for line in change_lines(now.revisions[-1].changes):
            typer.echo(line)
        if "data" in parts and "optimizer" not in parts:
            typer.echo(_SCHEDULE_STAYS)
    job = text = ""
    if submit and not state.is_local:
        job, text = bring_back_changed(child, now, chosen, SubprocessSlurm.of_this_process())
    if json:
        from slurm_forge.report.encoding import to_json

        result = ForkResult(
            run=child.name,
            path=str(child.path),
            parent=str(parent.path),
            checkpoint=str(checkpoint),
            step=checkpoint.step,
            fresh=parts,
            changes=now.revisions[-1].changes,
            job=job,
        )
        typer.echo(to_json(result))
    elif text:
        typer.echo(f"{child.name}: {text}.   follow: slurm-forge status {reference(child)}")
    else:
        typer.echo(f"to start it: {again(reference(child), state)}")


def _parts(text: str) -> tuple[str, ...]:
    from slurm_forge.documents import did_you_mean
    from slurm_forge.errors import ConfigError
    from slurm_forge.store.adoption import PARTS

    wanted = [each.strip() for each in text.split(",") if each.strip()]
    for each in wanted:
        if each not in PARTS:
            raise ConfigError(
                f"--fresh: {each!r} is no part of a checkpoint {did_you_mean(each, PARTS, {})}",
                next_step=f"There are {', '.join(PARTS)}; separate several by commas.",
            )
    return tuple(each for each in PARTS if each in wanted)


def _chosen(opened: Opened, wanted: str) -> CheckpointName:
    from slurm_forge.errors import CheckpointMissingError
    from slurm_forge.vocabulary.trust import Trust

    name = opened.meant(wanted)
    known = next((each for each in opened.state.known if each.name == name), None)
    if known is not None and known.trust is Trust.SUSPECT:
        raise CheckpointMissingError(
            f"{name} is suspect: {known.why}",
            next_step="Choose another one (--from good, --from next), or trust it first: "
            f"slurm-forge checkpoints promote {opened.run.name} {name.step} --reason TEXT",
        )
    return name


def _refuse(layered: Layered, parent: RunDirectory, site: Site) -> None:
    from slurm_forge.cli.preparation import Checked, refuse
    from slurm_forge.run_directory import RunDirectory

    checked = Checked(job=layered.job, path=parent.spec_file, doubts=(), document=layered.document)
    refuse(checked, site, RunDirectory.at(parent.path.parent / layered.job.name))
