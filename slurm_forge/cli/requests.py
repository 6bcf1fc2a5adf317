"""``requeue``, ``reconcile``, ``stop``, ``save``: a person asks something of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.options import AsJson, Runs, RunsOrJob, SubmittedSite, wants_new_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slurm_forge.launch.requeue.job_update import ResourceChanges
    from slurm_forge.launch.requeue.reconcile import ReconcileResult
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.model import Site
    from slurm_forge.slurm.client import Slurm
    from slurm_forge.spec.run_file import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What ``requeue`` and ``reconcile`` print with ``--json``.

    ``job`` is the job in which the run continues; ``changed`` says whether Slurm was asked for
    anything.
    """

    run: str
    path: str
    job: str
    text: str
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRefusal:
    """Why a run of a sweep was left as it is."""

    run: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAnswer:
    """What they print of a sweep with ``--json``: of all runs that are not finished."""

    sweep: str
    path: str
    runs: tuple[Answer, ...]
    refused: tuple[RunRefusal, ...]


def requeue(
    run: RunsOrJob,
    site: SubmittedSite = None,
    runs: Runs = None,
    mem: Annotated[
        str | None, typer.Option("--mem", metavar="SIZE", help="Memory per node from now on: 64G.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="TIME", help="Time limit from now on: 2-00:00:00, 12h."),
    ] = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", metavar="NODES", help="More nodes to exclude: n[1-3]."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="NAME", help="Partition from now on."),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option("--code", metavar="new", help="new: the code as it is now, from now on."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Continue a held, stopped or cancelled run, or all such runs of a sweep.

    A live run is left alone.  --mem, --time, --exclude and --partition are what it requests
    from Slurm from now on: they are stored in its run.yaml and applied to a waiting job.
    With these or --code, a run that is training has to be stopped first.

    \b
    Examples:
      slurm-forge requeue tiny-gpt
      slurm-forge requeue tiny-gpt --mem 64G --exclude n3
      slurm-forge requeue tiny-gpt --code new
      slurm-forge requeue 8812301 --time 2-00:00:00 --partition long
    """
    from slurm_forge.launch.requeue.job_update import ResourceChanges

    changes = ResourceChanges(mem=mem, time=time, exclude=exclude, partition=partition)
    _ask_each(run, runs, lambda each: _requeue(each, changes, site, code), as_json=json)


def _requeue(
    directory: RunDirectory,
    changes: ResourceChanges,
    site: str | None,
    code: str | None,
) -> tuple[Answer, str]:
    from slurm_forge.cli.cluster.excluded_nodes_text import left_out_now
    from slurm_forge.cli.run_choice import (
        reference,
        site_places,
    )
    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.launch.requeue.job_update import changed
    from slurm_forge.launch.requeue.reconcile import ReconcileResult, bring_back
    from slurm_forge.launch.submit.submission import run_state
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.spec.run_file import read_run_file

    file = read_run_file(directory.spec_file)
    state = run_state(directory)
    if state.is_local and not directory.is_done() and (changes or code is None):
        raise RunDirectoryError(
            f"{directory.name} is a local run, not one of Slurm",
            next_step=f"Continue it here: slurm-forge run {reference(directory)}",
        )
    chosen = site_places().load(site or file.site_file or file.site).site
    if state.is_local and code is not None:
        now = _with_new_code(directory, file, code, chosen, None)
        done = ReconcileResult(state.job, "its next start uses this code", changed=now != file)
        again = f".   to continue: slurm-forge run {reference(directory)}"
        return _answer(directory, done, again)
    slurm = SubprocessSlurm.of_this_process()
    out = left_out_now(slurm, changed(file.job, changes), chosen)
    if code is not None:
        file = _with_new_code(directory, file, code, chosen, slurm)
    brought = bring_back(
        directory, slurm, site=chosen, file=file, exclude=out.exclude, changes=changes
    )
    if brought.submitted:
        for line in out.notes:
            typer.echo(line, err=True)
    follow = f".   follow: slurm-forge status {reference(directory)}"
    return _answer(directory, brought, follow)


def _ask_each(
    wanted: str,
    runs: Path | None,
    ask: Callable[[RunDirectory], tuple[Answer | None, str]],
    *,
    as_json: bool = False,
) -> None:
    """Ask it of the run, or of every run of a sweep that is not finished; one refusal stops none.

    ``ask`` gives the answer as a value, if there is one, and as a line.  Exit status 2 where one of
    the sweep has refused.
    """
    from slurm_forge.cli.failure import FAILED
    from slurm_forge.cli.run_choice import find_sweep
    from slurm_forge.cli.run_of_job import meant
    from slurm_forge.errors import ForgeError
    from slurm_forge.report.encoding import to_json

    sweep = find_sweep(wanted, runs)
    if sweep is None:
        directory = meant(wanted, runs)
        directory.refuse_others()
        answer, line = ask(directory)
        typer.echo(to_json(answer) if as_json else line)
        return
    answers: list[Answer] = []
    refused: list[RunRefusal] = []
    for directory in sweep[1]:
        if directory.is_done():
            continue
        try:
            directory.refuse_others()
            answer, line = ask(directory)
            answers += [] if answer is None else [answer]
            if not as_json:
                typer.echo(line)
        except (ForgeError, OSError) as error:
            refused.append(RunRefusal(run=directory.name, text=str(error)))
            typer.echo(f"{directory.name}: {error}", err=True)
    if as_json:
        folder = sweep[1][0].path.parent / sweep[0].name
        body = SweepAnswer(
            sweep=sweep[0].name, path=str(folder), runs=tuple(answers), refused=tuple(refused)
        )
        typer.echo(to_json(body))
    if all(directory.is_done() for directory in sweep[1]):
        typer.echo(f"{sweep[0].name}: all of its runs are finished.", err=True)
    if refused:
        raise typer.Exit(FAILED)


def _with_new_code(
    run: RunDirectory, file: RunFile, code: str, site: Site, slurm: Slurm | None
) -> RunFile:
    """Have the run use the code as it is now, and print what differs; ``slurm`` as `change_run`."""
    from contextlib import nullcontext

    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.launch.attempt.run_lock import hold_run_lock
    from slurm_forge.launch.requeue.change import change_run
    from slurm_forge.launch.submit.code_version import code_change, with_new_code
    from slurm_forge.spec.entry import check_entry

    wants_new_code(code)
    if run.is_done():
        raise RunDirectoryError(
            f"{run.name} is finished, so it needs no other code",
            next_step=f"Start a new run from its checkpoint with the current code: slurm-forge "
            f"fork {run.name} --name NEW --code new",
        )
    renewed, choice = with_new_code(run, file, local=slurm is None)
    notes: tuple[str, ...] = (choice.note,) if choice.note else ()
    if file.job.entry is not None:
        notes += check_entry(file.job.entry, file.folder, run.spec_file, list(file.job.args))
    if renewed.code == file.code:
        typer.echo(f"{run.name}: the code is the same as before ({renewed.code})", err=True)
        return file
    verb, changes = "requeue --code new", (code_change(file, choice),)
    with hold_run_lock(run) if slurm is None else nullcontext():
        changed = change_run(run, file, renewed, changes, verb=verb, site=site, slurm=slurm)
    typer.echo(f"{run.name}: {changes[0]}", err=True)
    for each in (*notes, *changed.notes):
        typer.echo(f"note: {each}", err=True)
    return changed.file


def reconcile(run: RunsOrJob, runs: Runs = None, json: AsJson = False) -> None:
    """Retry a requeue that Slurm did not confirm, of a run or of all runs of a sweep.

    \b
    Examples:
      slurm-forge reconcile tiny-gpt
      slurm-forge reconcile 8812301 --json
    """
    from slurm_forge.launch.requeue.reconcile import reconcile as carry_out
    from slurm_forge.slurm.client import SubprocessSlurm

    def ask(directory: RunDirectory) -> tuple[Answer, str]:
        return _answer(directory, carry_out(directory, SubprocessSlurm.of_this_process()), ".")

    _ask_each(run, runs, ask, as_json=json)


def _answer(run: RunDirectory, brought: ReconcileResult, more: str) -> tuple[Answer, str]:
    answer = Answer(
        run=run.name,
        path=str(run.path),
        job=brought.job,
        text=brought.text,
        changed=brought.changed,
    )
    return answer, f"{run.name}: {brought.text}{more}"


def stop(run: RunsOrJob, runs: Runs = None) -> None:
    """Ask a run, or all runs of a sweep, to save and stop until requeued.

    The job of a waiting run stays in the queue: when its turn comes it ends at once without
    training.

    \b
    Examples:
      slurm-forge stop tiny-gpt
      slurm-forge stop 8812301
    """
    _ask_each(run, runs, _stop)


def _stop(directory: RunDirectory) -> tuple[None, str]:
    from slurm_forge.cli.run_choice import reference
    from slurm_forge.launch.submit.submission import run_state
    from slurm_forge.report.status.run_status import again

    if directory.is_done():
        return None, f"{directory.name} is finished already; nothing to stop."
    directory.stop_file.touch(mode=0o600)
    _note(directory, "stop")
    waits = _job_in_queue(directory)
    answer = "asked to save and stop"
    if waits:
        answer = (
            f"asked to stop; job {waits} is in the queue: when its turn comes (once it is "
            "released, if it is held) it ends at once without training; "
            f"to free the queue now: scancel {waits}"
        )
    return None, (
        f"{directory.name}: {answer}.   to continue later: "
        f"{again(reference(directory), run_state(directory))}"
    )


def _job_in_queue(run: RunDirectory) -> str:
    """The run's job while it waits to be started, by Slurm or else by the journal; else empty."""
    from slurm_forge.cli.observe.surroundings import ask_slurm
    from slurm_forge.journal import RunStatus, fold, read_to_fold
    from slurm_forge.report.story.queue_reason import job_to_ask_about
    from slurm_forge.slurm.states import PENDING_LIKE

    records = read_to_fold(run)
    job = job_to_ask_about(records)
    if job is None:
        return ""
    answer = ask_slurm(job)
    if answer is None or not answer.answered:
        waits = fold(records).status in (RunStatus.SUBMITTED, RunStatus.REQUEUED)
    else:
        waits = answer.record is not None and answer.record.state in PENDING_LIKE
    return job if waits else ""


def save(run: RunsOrJob, runs: Runs = None) -> None:
    """Ask a run, or all runs of a sweep, for a checkpoint now; it continues.

    \b
    Examples:
      slurm-forge save tiny-gpt
      slurm-forge save tiny-gpt --runs /scratch/me/runs
    """
    _ask_each(run, runs, _save)


def _save(directory: RunDirectory) -> tuple[None, str]:
    from slurm_forge.cli.run_choice import reference

    if directory.is_done():
        return None, f"{directory.name} is finished already; nothing to save."
    directory.save_file.touch(mode=0o600)
    _note(directory, "save")
    return None, (
        f"{directory.name}: asked to save at its next step or right after its next start.   "
        f"see: slurm-forge status {reference(directory)}"
    )


def _note(run: RunDirectory, verb: str) -> None:
    """Say who asked; the request itself is the file, which a colleague can touch too."""
    import contextlib

    from slurm_forge.errors import ForgeError
    from slurm_forge.journal.events import UserAsked
    from slurm_forge.launch.submit.submission import note
    from slurm_forge.person import person

    with contextlib.suppress(OSError, ForgeError):
        note(run, UserAsked(verb=verb, user=person()))
