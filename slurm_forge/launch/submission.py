"""Making runs and handing them to Slurm or to this machine; bringing back what was left open."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_forge.documents import differences
from slurm_forge.errors import AlreadyFinishedError, ConfigError, RunDirectoryError
from slurm_forge.files import write_atomic
from slurm_forge.journal import JournalWriter, RunState, RunStatus, fold, read_journal
from slurm_forge.journal.events import Submitted, UserAsked
from slurm_forge.launch.ladder import Comeback, Ladder, Taken
from slurm_forge.launch.script import render
from slurm_forge.person import person
from slurm_forge.run_directory import Fence, RunDirectory, list_claims
from slurm_forge.site.model import Site
from slurm_forge.site.storage import storage_at
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.environment import process_environ
from slurm_forge.slurm.states import ACTIVE, PENDING_LIKE
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import RunFile

__all__ = [
    "Brought",
    "bring_back",
    "create_run",
    "entry_of",
    "reconcile",
    "refuse_other_job",
    "renew_run",
    "run_state",
    "submit_script",
    "untouched",
]


def entry_of(function: Callable[..., Any]) -> str:
    """``module:name`` or ``file.py:name`` of a training function.

    A run must find it again after any interruption, so it must be a plain function at the top of a
    module or script: no lambda, no closure.
    """
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "." in name or name == "<lambda>":
        raise ConfigError(
            f"{name or function!r} can't be found by name in a later attempt",
            next_step="Give a plain function defined at the top of a module: def train(run): …",
        )
    if function.__module__ == "__main__":
        return f"{Path(inspect.getfile(function)).resolve()}:{name}"
    return f"{function.__module__}:{name}"


def create_run(
    job: JobSpec, *, runs: Path, site: Site, submitted_from: Path, python: str | None = None
) -> tuple[RunDirectory, RunFile]:
    """Make the run directory ``runs/<name>`` with its ``run.yaml``; refuses one that has begun."""
    run = RunDirectory.at(runs / job.name)
    storage = storage_at(site, run.path, process_environ())
    file = RunFile(
        submitted_from=str(submitted_from.absolute()),
        python=python or site.python or sys.executable,
        site=site.name,
        socket_interface=site.socket_interface,
        env=dict(site.env.always),
        srun_options=tuple(site.srun_options),
        purge_after=None if storage is None else storage.purge_after,
        purge_basis=None if storage is None else storage.purge_basis,
        job=job,
    )
    if untouched(run):
        run.spec_file.unlink(missing_ok=True)  # made once and never started: a refused submission
    run.create(file.to_yaml().encode())
    return run, file


def untouched(run: RunDirectory) -> bool:
    """Whether nobody has started the run or handed it to Slurm: it is only a file so far."""
    return not list_claims(run) and not run.is_done() and not run_state(run).job


def refuse_other_job(run: RunDirectory, begun: JobSpec, now: JobSpec, path: Path) -> None:
    """``ConfigError`` where the job file at ``path`` says another job than the run began with."""
    if begun == now:
        return
    found = differences(begun.model_dump(mode="json"), now.model_dump(mode="json"))
    shown = [f"  {one}" for one in found[:_SHOWN_DIFFERENCES]]
    if len(found) > _SHOWN_DIFFERENCES:
        shown.append(f"  and {len(found) - _SHOWN_DIFFERENCES} more")
    raise ConfigError(
        "\n".join([f"the run {run.path} was begun with another job than this file says:", *shown]),
        path=path,
        next_step="A run keeps what it was begun with. To go on with it, write the old values; "
        "to train with the new ones, choose another name.",
    )


_SHOWN_DIFFERENCES = 10
#: What of a job may be another at a later start: nothing that is computed follows from it.
_MAY_CHANGE = ("checkpoint", "environment", "recovery", "probe", "lead", "inject")


def renew_run(run: RunDirectory, file: RunFile, now: JobSpec, path: Path) -> RunFile:
    """Take over what a job file at ``path`` says otherwise than the run was begun with.

    ``ConfigError`` where that is more than how the run is kept alive.
    """
    kept = file.job.model_copy(update={key: getattr(now, key) for key in _MAY_CHANGE})
    refuse_other_job(run, kept, now, path)
    if file.job == now:
        return file
    renewed = file.model_copy(update={"job": now})
    write_atomic(run.spec_file, renewed.to_yaml().encode())
    changed = differences(file.job.model_dump(mode="json"), now.model_dump(mode="json"))
    note(run, UserAsked(verb=f"change {'; '.join(map(str, changed[:5]))}"[:400], user=person()))
    return renewed


def submit_script(
    run: RunDirectory, file: RunFile, site: Site, slurm: Slurm, *, verb: str = "submit"
) -> str:
    """Render the script into the run directory and hand it to sbatch; the job id."""
    script = run.submissions / "job.sbatch"
    write_atomic(script, render(file, site, run).encode(), mode=0o700)
    # Asked for before Slurm is: a job that starts at once must not find the run at rest.
    note(run, UserAsked(verb=verb, user=person()))
    job = slurm.submit(script)
    note(run, Submitted(job=job, via="sbatch"))
    return job


def note(run: RunDirectory, event: Submitted | UserAsked) -> None:
    """Write one event of a person's, beside whatever attempt may be alive."""
    journal = JournalWriter(run, attempt=max(list_claims(run), default=0), writer="cli")
    journal.launch = 1 << 30  # after everything of the newest attempt
    journal.write(event)
    journal.close()


def run_state(run: RunDirectory) -> RunState:
    """The state of a run from its journal."""
    records, _ = read_journal(run, thin=True)
    return fold(records)


@dataclass(frozen=True, slots=True)
class Brought:
    """What was done to bring a run back: ``job`` is where it goes on."""

    job: str
    text: str
    changed: bool


def bring_back(run: RunDirectory, slurm: Slurm, *, site: Site, file: RunFile) -> Brought:
    """A person asks for the run to go on: requeue its job, or submit it again."""
    if run.is_done():
        raise AlreadyFinishedError(
            f"{run.name} is finished",
            next_step="Start a new run under another name to train further.",
        )
    state = run_state(run)
    alive = _alive(state, slurm)
    if alive is not None:
        return Brought(state.job, f"job {state.job} is {alive} already", changed=False)
    run.stop_file.unlink(missing_ok=True)
    job = submit_script(run, file, site, slurm, verb="requeue")
    return Brought(job, f"submitted as job {job}", changed=True)


def reconcile(run: RunDirectory, slurm: Slurm) -> Brought:
    """Carry out an intent that an attempt left open because Slurm did not answer it."""
    state = run_state(run)
    if run.is_done() or state.status is RunStatus.FINISHED:
        return Brought(state.job, "the run is finished", changed=False)
    intent = state.open_intent
    if intent is None:
        return Brought(state.job, "nothing is open", changed=False)
    alive = _alive(state, slurm, pending_only=True)
    attempt = max(list_claims(run), default=0)
    journal = JournalWriter(run, attempt=attempt, writer="cli", launch=1 << 30)
    if alive is not None:
        # It may have been taken although the answer was lost; a second one would end the new start.
        from slurm_forge.journal.events import RequeueDone

        journal.write(RequeueDone(job=intent.job, method="found in the queue"))
        return Brought(intent.job, f"job {intent.job} is {alive} already", changed=False)
    script = run.submissions / "job.sbatch"
    ladder = Ladder(
        slurm,
        job=intent.job,
        script=script if script.is_file() else None,
        journal=journal,
        fence=Fence(run, attempt),
    )
    comeback: Comeback = ladder.climb(f"reconcile: {intent.reason}")
    if comeback.taken is Taken.OPEN:
        raise RunDirectoryError(
            f"the intent is still open: {comeback.text}",
            next_step="Try slurm-forge reconcile again when Slurm answers.",
        )
    return Brought(run_state(run).job, comeback.text, changed=True)


def _alive(state: RunState, slurm: Slurm, *, pending_only: bool = False) -> str | None:
    if not state.job or not state.job[0].isdigit():
        return None
    record = slurm.show_job(state.job)
    if record is None:
        return None
    living = PENDING_LIKE if pending_only else PENDING_LIKE | ACTIVE
    return record.state.value if record.state in living else None
