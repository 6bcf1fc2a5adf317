"""Making runs and handing them to Slurm or to this machine."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from slurm_forge.documents import differences
from slurm_forge.errors import (
    ConfigError,
    ForgeError,
    RunDirectoryError,
    UnrecordedJobError,
    UnsafeFileError,
)
from slurm_forge.files import is_file, read_trusted, write_atomic
from slurm_forge.journal import (
    JournalWriter,
    RunState,
    fold,
    newest_attempt_in,
    read_to_fold,
)
from slurm_forge.journal.events import VIA_THIS_MACHINE, Event, Note, Submitted, UserAsked
from slurm_forge.journal.file import NO_LAUNCH
from slurm_forge.knobs import process_environ
from slurm_forge.launch.notify.targets import refuse_unsendable
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.render.batch_script import START_FILE, render, start_name, start_text
from slurm_forge.launch.render.save_times import usual_saves
from slurm_forge.launch.render.sbatch_options import leave_out
from slurm_forge.launch.submit.code_version import CodeChoice, choose_code
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory, list_claims
from slurm_forge.site.model import Site, storage_at
from slurm_forge.site.variables import NCCL_INTERFACE
from slurm_forge.slurm.client import Slurm
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import RunFile, name_fallback, replace_run_file
from slurm_forge.spec.safeguards import CodeMode
from slurm_forge.spec.sweep_runs import SWEEP_FILE


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
    job: JobSpec,
    *,
    runs: Path,
    site: Site,
    submitted_from: Path,
    python: str | None = None,
    partition: str | None = None,
    qos: str | None = None,
    site_file: str | None = None,
    queued: bool = True,
    code: CodeChoice | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[RunDirectory, RunFile]:
    """Make the run directory ``runs/<name>`` with its ``run.yaml``; refuses one that has begun.

    ``partition`` and ``qos`` are those of its job where ``job`` does not say; ``site_file`` is
    that of a site which was given by its path.  ``queued``: Slurm starts it, perhaps much later.
    ``code`` is what a run that is made beside this one has chosen.  ``say`` is called with a line
    for the person who submits.
    """
    if job.sweep is not None:
        raise ConfigError(
            f"sweep: {job.name} is a sweep, and this makes one run",
            next_step="Submit its job file with slurm-forge submit, or leave sweep: out (on the "
            "command line: --set sweep=null).",
        )
    refuse_unsendable(job.notify)
    run = RunDirectory.at(runs / job.name)
    if is_file(run.path / SWEEP_FILE):
        raise RunDirectoryError(
            f"there is a sweep in {run.path}", next_step="Choose another name for the run."
        )
    file = run_file(
        job,
        run=run,
        site=site,
        submitted_from=submitted_from,
        python=python,
        partition=partition,
        qos=qos,
        site_file=site_file,
    )
    if run.exists():
        run.refuse_others()
    if run.exists() and untouched(run):
        run.spec_file.unlink(missing_ok=True)  # made once and never started: a refused submission
    doubt = ""
    if not run.exists() and (_has_git(submitted_from) or job.code.mode is not CodeMode.AUTO):
        code = code or choose_code(job, run, submitted_from.absolute(), queued=queued)
        file, doubt = file.model_copy(update={"code": code.version}), code.note
    run.create(file.to_yaml().encode())
    if doubt:
        say(doubt)
        note(run, Note(text=doubt))
    return run, file


def _has_git(folder: Path) -> bool:
    """Whether there may be a work tree around it."""
    return any((each / ".git").exists() for each in (folder.absolute(), *folder.absolute().parents))


def run_file(
    job: JobSpec,
    *,
    run: RunDirectory,
    site: Site,
    submitted_from: Path,
    python: str | None = None,
    partition: str | None = None,
    qos: str | None = None,
    site_file: str | None = None,
) -> RunFile:
    """What ``create_run`` writes down; nothing is made."""
    storage = storage_at(site, run.path, process_environ())
    interface = site.socket_interface
    through = {} if interface is None else {NCCL_INTERFACE: interface}
    usual = usual_saves(run, job)
    facts = site.facts(job.resources.partition or partition, job.resources.qos or qos)
    return RunFile(
        submitted_from=str(submitted_from.absolute()),
        python=python or site.python or sys.executable,
        site=site.name,
        site_file=site_file,
        socket_interface=interface,
        host_suffix=site.host_suffix,
        master_address=site.master_address,
        env={**through, **site.env.always},
        on_hang=dict(site.env.on_hang),
        never=dict(site.env.never),
        expected_bandwidth=facts.expected_bandwidth,
        srun_options=tuple(site.srun_options),
        purge_after=None if storage is None else storage.purge_after,
        purge_basis=None if storage is None else storage.purge_basis,
        shorten_requeue=site.shorten_requeue,
        self_requeue_allowed=facts.self_requeue_allowed is not False,
        node_ledger=site.node_ledger,
        usual_save=None if usual is None else timedelta(seconds=usual.seconds),
        fallback_name=name_fallback(job),
        job=job,
    )


def untouched(run: RunDirectory) -> bool:
    """Whether nobody has started the run or handed it to Slurm: it is only a file so far.

    A fork is more than that: it has the checkpoint that it begins at.
    """
    if list_claims(run) or run.is_done():
        return False
    state = run_state(run)
    return not state.job and not state.known


def refuse_other_job(run: RunDirectory, recorded: JobSpec, now: JobSpec, path: Path) -> None:
    """``ConfigError`` where the job file at ``path`` says another job than the run began with."""
    if recorded == now:
        return
    changes = differences(recorded.model_dump(mode="json"), now.model_dump(mode="json"))
    lines = [f"  {one}" for one in changes[:_SHOWN_DIFFERENCES]]
    if len(changes) > _SHOWN_DIFFERENCES:
        lines.append(f"  and {len(changes) - _SHOWN_DIFFERENCES} more")
    raise ConfigError(
        "\n".join(
            [
                f"the run {run.path} was started with a different job than this file describes:",
                *lines,
            ]
        ),
        path=path,
        next_step=f"To continue it as it is: slurm-forge run {run.path}. To train on with the new "
        f"values: slurm-forge change {run.path} --set KEY=VALUE (extend for more steps). To keep "
        "both: slurm-forge fork, or another name.",
    )


_SHOWN_DIFFERENCES = 10
_MOST_OF_A_START_FILE = 1 << 20
#: How often a busy controller is asked whether a person has just handed in a job.
_TRIES = 3
_BETWEEN_TRIES_S = 2.0
#: What of a job may be another at a later start: nothing that is computed follows from it.
_MAY_CHANGE = (
    "checkpoint", "environment", "recovery", "probe", "preflight", "watchdog", "lead", "inject",
    "template", "container", "chain", "notify",
)  # fmt: skip
#: And of its resources: not how many ranks there are, nor what each of them has.
_RESOURCES = (
    "mem", "time", "partition", "account", "qos", "constraint", "exclude", "nodelist",
    "reservation", "extra",
)  # fmt: skip


def renew_run(run: RunDirectory, file: RunFile, now: JobSpec, path: Path) -> RunFile:
    """Take over what a job file at ``path`` says otherwise than the run was begun with.

    ``ConfigError`` where that is more than how the run is kept alive and what it asks of Slurm.
    """
    run.refuse_others()
    wanted = {key: getattr(now.resources, key) for key in _RESOURCES}
    resources = file.job.resources.model_copy(update=wanted)
    allowed = file.job.model_copy(
        update={**{key: getattr(now, key) for key in _MAY_CHANGE}, "resources": resources}
    )
    refuse_other_job(run, allowed, now, path)
    return file if file.job == now else replace_job(run, file, now)


def replace_job(run: RunDirectory, file: RunFile, now: JobSpec) -> RunFile:
    """Give the run another job of the same meaning, and tell it in the journal."""
    refuse_unsendable(now.notify)
    renewed = file.with_job(now)
    replace_run_file(run, file, renewed)
    changed = differences(file.job.model_dump(mode="json"), now.model_dump(mode="json"))
    note(run, UserAsked(verb=f"change {'; '.join(map(str, changed[:5]))}"[:400], user=person()))
    return renewed


def submit_script(
    run: RunDirectory,
    file: RunFile,
    site: Site,
    slurm: Slurm,
    *,
    verb: str = "submit",
    exclude: Sequence[str] = (),
    args: Sequence[str] = (),
) -> str:
    """Render the script into the run directory and hand it to sbatch; the job id.

    ``exclude`` are nodes to leave out, beside those of the job; ``args`` further options of sbatch,
    which win over the script's.
    """
    text = render(file, site, run)
    for other in (payload(run), own_script(run)):
        other.unlink(missing_ok=True)  # from now on this script is the run's
    keep_successor(run, text)
    via = "sbatch" if file.job.chain is None else VIA_ARRAY
    return _hand_over(run, slurm, verb, via, (*leave_out(text, exclude), *args))


def submit_again(
    run: RunDirectory, slurm: Slurm, *, exclude: Sequence[str] = (), args: Sequence[str] = ()
) -> str:
    """Hand over the script that is kept for successors, as it is; the job id.

    ``exclude`` and ``args`` as for ``submit_script``.
    """
    script = job_script(run).read_text()
    keep_start_file(run.submissions, script)
    arguments = (*leave_out(script, exclude), *args)
    via = "exec" if is_file(own_script(run)) else "submitit forge"
    return _hand_over(run, slurm, "requeue", via, arguments)


def keep_successor(run: RunDirectory, script: str) -> None:
    """Keep the ``script`` that a job with another id is to go on with, for this run alone."""
    keep_start_file(run.submissions, script)
    write_atomic(job_script(run), script.encode(), mode=0o700)


def keep_start_file(folder: Path, script: str) -> None:
    """Write the file in ``folder`` that ``script`` sources, unless it is there and intact.

    An older script asks for a file of an older version: it gets the current one under that name,
    which must therefore understand all that scripts have called since 0.1.0.
    """
    for name in START_FILE.findall(script):
        if not _is_intact(folder / name):
            write_atomic(folder / name, start_text().encode())


def _is_intact(start: Path) -> bool:
    """Whether scripts of ours would source it: our own, and what its name or this version says."""
    try:
        text = read_trusted(start, _MOST_OF_A_START_FILE)
        status = start.stat()
        # As the script itself asks, before it can know of groups.
        own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    except (OSError, UnsafeFileError):
        return False
    return own and (start.name == start_name(text) or text == start_text().encode())


def renew_start_file(run: RunDirectory) -> None:
    """Write what the run's kept script sources, where it has been lost."""
    with contextlib.suppress(FileNotFoundError):
        keep_start_file(run.submissions, job_script(run).read_text(errors="replace"))


def keep_payload(run: RunDirectory, dump: Callable[[Path], object]) -> None:
    """Keep what submitit runs in the run's job, for its successors; ``dump`` is submitit's own."""
    with tempfile.TemporaryDirectory(dir=run.submissions, prefix=".dumped-") as folder:
        written = Path(folder) / "submitted.pkl"
        dump(written)
        write_atomic(payload(run), written.read_bytes())


def job_script(run: RunDirectory) -> Path:
    """The script that a successor of the run's job is submitted with."""
    return run.submissions / "job.sbatch"


def kept_script(run: RunDirectory) -> Path | None:
    """That script where one is kept; ``OSError`` where the storage can't say."""
    script = job_script(run)
    return script if is_file(script) else None


def payload(run: RunDirectory) -> Path:
    """Where submitit's own submission is kept: there only if it is what the run's script runs."""
    return run.submissions / "submitted.pkl"


def own_script(run: RunDirectory) -> Path:
    """There where the script that is kept is somebody's own, which calls ``slurm-forge exec``."""
    return run.submissions / "own-script"


def keep_own_script(run: RunDirectory, text: str) -> None:
    """Keep the script of a job that called ``slurm-forge exec``, to submit it again."""
    keep_successor(run, text)
    own_script(run).touch(mode=0o600)


def _hand_over(run: RunDirectory, slurm: Slurm, verb: str, via: str, args: tuple[str, ...]) -> str:
    # Asked for before Slurm is: a job that starts at once must not find the run at rest.
    note(run, UserAsked(verb=verb, user=person()))
    job = slurm.submit(job_script(run), args)
    try:
        note(run, Submitted(job=job, via=via))
    except (ForgeError, OSError) as error:
        raise UnrecordedJobError(
            f"{run.name} was submitted, and this could not be written to its journal: {error}",
            job=job,
            next_step="Don't submit it again: the job starts all the same.  When the cause is "
            f"removed, slurm-forge status {run.name} has it from its first step on.",
        ) from error
    return job


def note(run: RunDirectory, event: Event) -> None:
    """Write one event of a person's, beside whatever attempt may be alive."""
    run.refuse_others()
    records = read_to_fold(run, refresh=True)
    # After everything of the newest attempt that is known of, and before the next one's.
    attempt = newest_attempt_in(records)
    journal = JournalWriter(run, attempt=attempt, writer="cli", launch=NO_LAUNCH)
    journal.advance_clock(records)
    journal.write(event)
    journal.close()


def note_asked(run: RunDirectory, job: str, restart_count: int, slurm: Slurm | None) -> None:
    """Where a person has just handed in a job for a run that rests: that they want it to go on.

    Not where the job was in the queue before the run came to rest: it is one of a chain, perhaps,
    and the run stays where it is.  Without Slurm somebody has typed the command.
    """
    if slurm is None:
        note(run, UserAsked(verb="run", user=person()))
        note(run, Submitted(job=job, via=VIA_THIS_MACHINE))
        return
    state = run_state(run)
    known_jobs = {state.job, *(attempt.job for attempt in state.attempts)}
    if restart_count or job in known_jobs:
        return
    is_needed = not state.status.is_at_rest or not state.attempts
    if state.attempts:
        submitted = _submit_time(slurm, job, tries=1 if is_needed else _TRIES)
        if submitted is not None and submitted.timestamp() > _rests_since(state, slurm):
            note(run, UserAsked(verb="submit", user=person()))
            is_needed = True
    if is_needed:
        note(run, Submitted(job=job, via="exec"))


def _submit_time(slurm: Slurm, job: str, tries: int) -> datetime | None:
    for remaining in reversed(range(tries)):
        with contextlib.suppress(ForgeError):
            record = slurm.show_job(job)
            return None if record is None else record.submit_time
        if remaining:
            time.sleep(_BETWEEN_TRIES_S)
    return None


def _rests_since(state: RunState, slurm: Slurm) -> float:
    """When the last attempt, or a decision after it, ended: by Slurm's clock where it says so."""
    newest = state.attempts[-1]
    last_end = max(each.ended or each.started for each in state.attempts)
    decided = [time for time, _ in newest.decisions if time > last_end]
    with contextlib.suppress(ForgeError):
        rows = slurm.accounting(newest.job)
        last_end = max((r.end_time.timestamp() for r in rows if r.end_time), default=last_end)
    return max([last_end, *decided])


def run_state(run: RunDirectory) -> RunState:
    """The state of a run from its journal."""
    records = read_to_fold(run)
    return fold(records)
