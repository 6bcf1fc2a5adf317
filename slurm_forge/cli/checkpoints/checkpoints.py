"""``checkpoints``: list, verify, trust and delete the checkpoints of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.checkpoints import export as exporting
from slurm_forge.cli.checkpoints import prune as deleting
from slurm_forge.cli.checkpoints.run_checkpoints import (
    Opened,
    open_run,
    write_line,
)
from slurm_forge.cli.options import AsJson, RunName, Runs

if TYPE_CHECKING:
    from slurm_forge.cli.checkpoints.disk import VerifyResult
    from slurm_forge.store.identity import CheckpointName
    from slurm_forge.vocabulary.trust import Trust

_DAMAGED = 1

app = typer.Typer(
    name="checkpoints",
    help="List, verify, trust, delete checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Which = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Its name (or a prefix), its step, or latest, good, best, next.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One checkpoint as ``verify`` found it: ``whole``, ``damaged``, ``unreadable`` or ``gone``."""

    name: str
    step: int
    verdict: str
    problem: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What ``verify`` prints with ``--json``."""

    run: str
    path: str
    checkpoints: tuple[Read, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What ``promote`` and ``suspect`` print with ``--json``."""

    run: str
    path: str
    name: str
    trust: str
    reason: str


@app.command("list")
def list_(run: RunName, json: AsJson = False, runs: Runs = None) -> None:
    """A line for every checkpoint, newest first.

    Trust is written, verified (read back whole), good (healthy steps followed) or suspect
    (never resumed from).  "<- next" marks the one that a start would resume from now.

    \b
    Examples:
      slurm-forge checkpoints list tiny-gpt
      slurm-forge checkpoints list tiny-gpt --json
    """
    from slurm_forge.cli.checkpoints.disk import list_stored
    from slurm_forge.cli.run_choice import reference
    from slurm_forge.report.checkpoints import list_checkpoints
    from slurm_forge.report.checkpoints_text import checkpoints_text
    from slurm_forge.report.encoding import to_json

    opened = open_run(run, runs)
    stored, leftovers = list_stored(opened.store)
    listed = list_checkpoints(
        opened.run.name, str(opened.store.directory), opened.state, stored, leftovers
    )
    if json:
        typer.echo(to_json(listed))
        return
    text = checkpoints_text(listed, now=time.time(), reference=reference(opened.run))
    typer.echo(text, nl=False)


@app.command()
def verify(
    run: RunName,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT...",
            help="Names (or prefixes), steps, or latest, good, best, next (default: all).",
        ),
    ] = None,
    json: AsJson = False,
    runs: Runs = None,
) -> None:
    """Read every block of every file and compare its hash.

    An intact checkpoint becomes verified, a damaged one suspect: it is not resumed from.  (Of
    another user's run that is only printed.)  Exit status 1: something is damaged or can't be read.

    \b
    Examples:
      slurm-forge checkpoints verify tiny-gpt
      slurm-forge checkpoints verify tiny-gpt latest
    """
    from slurm_forge.cli.checkpoints.disk import list_stored
    from slurm_forge.cli.failure import INTERRUPTED
    from slurm_forge.report.encoding import to_json

    opened = open_run(run, runs)
    stored, _ = list_stored(opened.store)
    names = [opened.meant(each) for each in checkpoints or ()]
    if not checkpoints:
        names = [each.name for each in stored]
    if not names and not json:
        typer.echo(f"{opened.run.name} has no checkpoints yet")
    read = []
    try:
        for name in dict.fromkeys(names):
            each = _verified(opened, name)
            read.append(each)
            if not json:
                typer.echo(_line_of(each))
    except KeyboardInterrupt:
        typer.echo("\ninterrupted.   what is shown above is recorded", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if json:
        path = str(opened.store.directory)
        typer.echo(to_json(Verified(run=opened.run.name, path=path, checkpoints=tuple(read))))
    if any(each.verdict in ("damaged", "unreadable") for each in read):
        raise typer.Exit(_DAMAGED)


@app.command()
def promote(
    run: RunName,
    checkpoint: Which,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for later readers.")],
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Read all of it first and refuse if it is damaged."
        ),
    ] = True,
    json: AsJson = False,
    runs: Runs = None,
) -> None:
    """Trust a checkpoint, whatever was found.

    It is read first and is good from then on: it may be resumed from again, and rolled back to.

    \b
    Examples:
      slurm-forge checkpoints promote tiny-gpt latest --reason "measured"
      slurm-forge checkpoints promote tiny-gpt 1200 --reason "loss is fine"
    """
    from slurm_forge.errors import CheckpointError
    from slurm_forge.vocabulary.trust import Trust

    opened = open_run(run, runs)
    name = opened.meant(checkpoint)
    if verify:
        verdict = _read_with_bar(opened, name)
        if verdict.problem:
            raise CheckpointError(
                f"{name} is damaged, so it is not promoted: {verdict.problem}",
                next_step="Check the storage, or promote another one; --no-verify overrides.",
            )
    _judge(opened, name, Trust.GOOD, reason, as_json=json)


@app.command()
def suspect(
    run: RunName,
    checkpoint: Which,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for later readers.")],
    json: AsJson = False,
    runs: Runs = None,
) -> None:
    """Distrust a checkpoint.

    The run does not resume from it until somebody promotes it.  A run that is training obeys at
    its next start.

    \b
    Examples:
      slurm-forge checkpoints suspect tiny-gpt latest --reason "a bad node"
      slurm-forge checkpoints suspect tiny-gpt 1200 --reason "loss rose after it"
    """
    from slurm_forge.vocabulary.trust import Trust

    opened = open_run(run, runs)
    _judge(opened, opened.meant(checkpoint), Trust.SUSPECT, reason, as_json=json)


def _verified(opened: Opened, name: CheckpointName) -> Read:
    """Read it and record the result, unless the run is another user's."""
    from slurm_forge.journal.events import CheckpointJudged
    from slurm_forge.vocabulary.trust import Trust

    begun = time.monotonic()
    verdict = _read_with_bar(opened, name)
    found = None
    if verdict.damaged:
        reason = f"damaged: {verdict.problem}"
        found = CheckpointJudged(name=str(name), trust=Trust.SUSPECT, reason=reason)
    elif not verdict.problem:
        reason = "every block was read back by checkpoints verify"
        found = CheckpointJudged(name=str(name), trust=Trust.VERIFIED, reason=reason)
    if found is not None and opened.run.is_own():
        write_line(opened, found)
    return Read(
        name=str(name),
        step=name.step,
        verdict=_word(verdict),
        problem=verdict.problem,
        size=verdict.size,
        seconds=time.monotonic() - begun,
    )


def _word(verdict: VerifyResult) -> str:
    if verdict.gone:
        return "gone"
    if verdict.damaged:
        return "damaged"
    return "unreadable" if verdict.problem else "whole"


def _line_of(read: Read) -> str:
    from slurm_forge.report import text as t
    from slurm_forge.report.checkpoints_text import amount

    if read.problem:
        what = f"{read.verdict}: {t.clean(read.problem, 600)}"
    else:
        what = f"{read.verdict}   {amount(read.size)} read in {t.span(read.seconds)}"
    return f"step {t.number(read.step)}   {read.name}   {what}"


def _read_with_bar(opened: Opened, name: CheckpointName) -> VerifyResult:
    from slurm_forge.cli.checkpoints.disk import read_all
    from slurm_forge.cli.progress import bar

    with bar(f"step {name.step}", of_bytes=True) as shown:
        return read_all(opened.store, name, shown.reach)


def _judge(
    opened: Opened, name: CheckpointName, trust: Trust, reason: str, *, as_json: bool
) -> None:
    from slurm_forge.journal.events import CheckpointJudged
    from slurm_forge.person import person
    from slurm_forge.report.encoding import to_json

    if not reason.strip():
        raise typer.BadParameter("say why, in a few words", param_hint="--reason")
    write_line(
        opened,
        CheckpointJudged(name=str(name), trust=trust, reason=f"{reason} ({person()})"),
    )
    if as_json:
        path = str(opened.store.directory)
        typer.echo(
            to_json(
                Judged(
                    run=opened.run.name,
                    path=path,
                    name=str(name),
                    trust=trust.value,
                    reason=reason,
                )
            )
        )
        return
    typer.echo(f"{opened.run.name}: {name} is now {trust.value}")


app.command()(deleting.prune)
app.command()(exporting.export)
