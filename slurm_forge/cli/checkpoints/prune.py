"""``checkpoints prune``: a person deletes old checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.checkpoints.run_checkpoints import (
    Opened,
    open_run,
    write_line,
)
from slurm_forge.cli.options import AsJson, RunName, Runs

if TYPE_CHECKING:
    from slurm_forge.cli.checkpoints.prune_selection import PrunePlan
    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.report.checkpoints import StoredCheckpoint
    from slurm_forge.store.identity import CheckpointName


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """What ``prune`` prints with ``--json``: ``removed`` is what would go where ``dry_run``.

    ``size`` is that of the removed ones in bytes.
    """

    run: str
    path: str
    dry_run: bool
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    size: int
    problems: tuple[str, ...]


def prune(
    run: RunName,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many to keep (default: as the job says)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    while_running: Annotated[
        bool,
        typer.Option("--while-running", help="Even if the journal says that the run is active."),
    ] = False,
    json: AsJson = False,
    runs: Runs = None,
) -> None:
    """Delete old checkpoints of a run at rest.

    Remains of interrupted saves are deleted, too.  Always kept: the newest, the two newest that
    can be resumed from, the newest good one, the newest suspect one, and what the job keeps
    permanently (the best, one every so many steps or minutes).  Nothing is deleted while fewer
    than two are usable.

    \b
    Examples:
      slurm-forge checkpoints prune tiny-gpt --dry-run
      slurm-forge checkpoints prune tiny-gpt --keep-last 2
    """
    from slurm_forge.cli.checkpoints.disk import list_stored
    from slurm_forge.cli.checkpoints.prune_selection import plan_prune
    from slurm_forge.run_directory import list_claims

    opened = open_run(run, runs)
    if not dry_run:
        opened.run.refuse_others()
    newest = max(list_claims(opened.run), default=0)
    running = _is_running(opened)
    if running and not (dry_run or while_running):
        raise _refused(opened)
    stored, _ = list_stored(opened.store)
    plan = plan_prune(stored, opened.state, opened.file.job.checkpoint, last=keep_last)
    removed = tuple(each.name for each in plan.goes)
    problems: tuple[str, ...] = ()
    if not json:
        _show(plan)
    if not dry_run:
        if plan.goes and not yes:
            _ask(json=json)
        # Stages of a run that is going on are being written.
        current = None if running else (newest + 1, 0)
        removed, problems = _delete(opened, plan, newest, current)
    size = sum(each.size for each in plan.goes if each.name in removed)
    if json:
        _print(opened, plan, removed, problems, size=size, dry_run=dry_run)
    elif not dry_run:
        _print_result(removed, problems, size)


def _is_running(opened: Opened) -> bool:
    """Whether its ranks may be alive, as seen from here."""
    from slurm_forge.journal import RunStatus
    from slurm_forge.launch.attempt.run_lock import has_left

    return opened.state.status is RunStatus.RUNNING and not has_left(opened.run, opened.state.job)


def _refused(opened: Opened) -> RunDirectoryError:
    """Refuse an active run: it prunes by itself, and only it knows what it is reading."""
    from slurm_forge.cli.run_choice import reference
    from slurm_forge.errors import RunDirectoryError

    return RunDirectoryError(
        f"{opened.run.name} is active: it deletes old checkpoints itself, and may be reading one "
        "of them",
        next_step=f"Stop it first: slurm-forge stop {reference(opened.run)}.  If "
        "it is no longer alive: --while-running.",
    )


def _show(plan: PrunePlan) -> None:
    from slurm_forge.report import text as t
    from slurm_forge.report.checkpoints_text import amount

    for each in plan.goes:
        mark = "   suspect" if each.name in plan.suspect else ""
        typer.echo(f"delete  step {t.number(each.name.step)}   {each.name}   {_size(each)}{mark}")
    for each in plan.stays:
        typer.echo(f"keep    step {t.number(each.name.step)}   {each.name}   {_size(each)}")
    for each in plan.unreadable:
        why = t.clean(each.problem, 200)
        typer.echo(f"kept, because it can't be read: {each.name}: {why}")
    if plan.goes:
        total = sum(each.size for each in plan.goes)
        typer.echo(f"{t.plural(len(plan.goes), 'checkpoint')} to delete, {amount(total)}")
    else:
        typer.echo("no checkpoint to delete")


def _size(checkpoint: StoredCheckpoint) -> str:
    from slurm_forge.report.checkpoints_text import amount

    return amount(checkpoint.size)


def _ask(*, json: bool) -> None:
    """Ask for confirmation, in a terminal."""
    from slurm_forge.errors import RunDirectoryError

    if json or not sys.stdin.isatty():
        raise RunDirectoryError(
            "nothing was deleted: there is no terminal to ask for confirmation",
            next_step="Check with --dry-run, then pass --yes.",
        )
    typer.confirm("Delete them?", abort=True)


def _delete(
    opened: Opened, plan: PrunePlan, newest: int, current: tuple[int, int] | None
) -> tuple[tuple[CheckpointName, ...], tuple[str, ...]]:
    """Delete the chosen ones, and record what was deleted even if interrupted."""
    from slurm_forge.cli.progress import bar, counted
    from slurm_forge.files import exists
    from slurm_forge.journal.events import CheckpointsPruned
    from slurm_forge.person import person

    doomed = [each.name for each in plan.goes]
    removed: tuple[CheckpointName, ...] = ()
    try:
        with bar("deleting") as shown:
            pruned = opened.store.prune(
                # What has been published meanwhile stays, too.
                lambda names: [name for name in names if name not in doomed],
                # Each is renamed, and deleted when all are.
                counted(shown, _fence(opened, newest), 2 * len(doomed)),
                current=current,
                suspect=plan.suspect,
            )
    finally:
        removed = tuple(name for name in doomed if not exists(opened.store.path(name)))
        if removed:
            names = tuple(str(name) for name in removed)
            reason = f"asked for by {person()}"
            write_line(opened, CheckpointsPruned(names=names, reason=reason))
    return removed, pruned.problems


def _fence(opened: Opened, newest: int) -> Callable[[], None]:
    """Stop deleting once the run has been started again."""

    def check() -> None:
        from slurm_forge.errors import FencedError
        from slurm_forge.run_directory import list_claims

        if max(list_claims(opened.run), default=0) != newest:
            raise FencedError(
                f"{opened.run.name} has been started meanwhile: nothing more is deleted",
                next_step="It deletes old checkpoints by itself.",
            )

    return check


def _print_result(removed: Sequence[CheckpointName], problems: Sequence[str], size: int) -> None:
    from slurm_forge.report import text as t
    from slurm_forge.report.checkpoints_text import amount

    if removed:
        typer.echo(f"deleted {t.plural(len(removed), 'checkpoint')}, {amount(size)}")
    for problem in problems:
        typer.echo(t.clean(problem, 400), err=True)


def _print(
    opened: Opened,
    plan: PrunePlan,
    removed: Sequence[CheckpointName],
    problems: Sequence[str],
    *,
    size: int,
    dry_run: bool,
) -> None:
    from slurm_forge.report.encoding import to_json

    all_ = [each.name for each in (*plan.goes, *plan.stays, *plan.unreadable)]
    typer.echo(
        to_json(
            Deleted(
                run=opened.run.name,
                path=str(opened.store.directory),
                dry_run=dry_run,
                removed=tuple(str(name) for name in removed),
                kept=tuple(str(name) for name in all_ if name not in removed),
                size=size,
                problems=tuple(problems),
            )
        )
    )
