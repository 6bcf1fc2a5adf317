"""``doctor --live`` on the login node: a small job, waited for, heard through one folder, removed.

Whatever happens to the command, the job is cancelled and the folder goes, unless it is to stay.
Signals of the user are only recorded (``interrupted``), and looked for between two things.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from slurm_forge.errors import ForgeError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.files import (
    exists_on_server,
    make_missing,
    read_json,
    read_trusted,
    write_atomic,
)
from slurm_forge.launch.diagnose.live_meeting import (
    AGAIN,
    CARD,
    HERE,
    LOGIN_LOCK,
    NODE_LOCK,
    NODE_ONCE,
    ONCE,
    OVER,
    REPORT,
    is_locked,
    is_taken,
    meet,
)
from slurm_forge.launch.render.batch_script import module_lines
from slurm_forge.launch.render.sbatch_options import options
from slurm_forge.launch.submit.queued_job import job_of_script
from slurm_forge.lock import exclusive
from slurm_forge.process import process_words
from slurm_forge.recovery.live_observations import JobSeen, LiveSeen, Meeting
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.rules import refused
from slurm_forge.slurm.client import COMMAND_NOT_FOUND, Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import PENDING_LIKE, TERMINAL, JobState
from slurm_forge.spec import JobSpec, job_from_mapping

_REPORT = TypeAdapter(JobSeen)
_LARGEST = 4 << 20
_PREFIX = ".doctor-live-"
_NAME = "forge-doctor"
#: The warning is due 40 s after the start.  Slurm looks every 30 s, and rather sends it early.
_LIMIT = timedelta(minutes=4)
_WARNED = timedelta(seconds=200)
_EVERY_S = 0.5
_ASK_EVERY_S = 1.0
#: How long what an ended job has written may take to be seen here.
_SETTLES_S = 30.0
_LATE_S = 60.0
#: KillWait is 30 s by default, and what follows it takes a moment.
_GONE_S = 60.0
#: How long a job that was submitted by a command without an answer may take to be listed.
_LISTED_S = 10.0
_REMOVED_S = 10.0
_TAIL = 600

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWish:
    """What is wanted: ``job`` from ``live_job``, ``runs`` the folder that runs lie in."""

    job: JobSpec
    site: Site
    runs: Path
    python: str
    quick: bool = False
    requeue_too: bool = False
    keep: bool = False
    start_within: timedelta = timedelta(minutes=15)
    back_within: timedelta = timedelta(minutes=5)


def look_live(
    wish: LiveWish,
    slurm: Slurm,
    *,
    say: Callable[[str], None] = lambda _: None,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    interrupted: Callable[[], bool] = lambda: False,
) -> LiveSeen:
    """Submit, wait, hear, tidy up; ``problem`` of what is returned says why there is no report.

    ``ForgeError`` where nothing was submitted, ``KeyboardInterrupt`` once ``interrupted`` says so.
    """
    runs = wish.runs.expanduser().absolute()
    created = make_missing(runs, 0o700)
    check = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=runs))
        check = _LiveCheck(wish, slurm, folder, say, wall, sleep, interrupted)
        return check.run()
    finally:
        if not wish.keep or check is None:
            if check is not None:
                check.remove_folder()
            for each in created:
                with contextlib.suppress(OSError):  # somebody has put something there meanwhile
                    each.rmdir()


@dataclass(eq=False)
class _LiveCheck:
    wish: LiveWish
    slurm: Slurm
    folder: Path
    say: Callable[[str], None]
    wall: Callable[[], float]
    sleep: Callable[[float], None]
    interrupted: Callable[[], bool]
    _nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    _job: str = ""
    _record: JobRecord | None = None
    #: Slurm forgets a job MinJobAge after its end.
    _forgotten: bool = False
    _last_poll: float = 0.0
    #: Since when it is seen that the job is over.
    _over_since: float | None = None

    def run(self) -> LiveSeen:
        (self.folder / "submissions").mkdir(mode=0o700)
        write_atomic(self.folder / CARD, self._nonce.encode())
        write_atomic(self.folder / ONCE, b"")
        script = self.folder / "job.sbatch"
        write_atomic(script, live_script(self.wish, self.folder).encode())
        with exclusive(self.folder / LOGIN_LOCK, timedelta(0)):
            submitted_at = self.wall()
            self._pause(0.0)
            try:
                self._job = self.slurm.submit(script)
            except BaseException as error:
                if not _is_refusal(error):
                    self._cancel_unheard(script)
                raise
            try:
                return self._follow(submitted_at)
            finally:
                if self.interrupted():
                    self._print(
                        f"interrupted: job {self._job} is cancelled, which may take a minute"
                    )
                self._cancel(self._job)

    def _follow(self, submitted_at: float) -> LiveSeen:
        resources = self.wish.job.resources
        self.say(f"job {self._job} submitted; it takes about a minute once it runs.")
        result = LiveSeen(
            job=self._job,
            partition=resources.partition,
            qos=resources.qos,
            nodes=resources.nodes,
            folder=str(self.folder) if self.wish.keep else "",
        )
        problem = self._wait_start(submitted_at)
        record = self._record
        if record is not None:
            result = replace(
                result, partition=record.partition, qos=record.qos, pending_s=_pending(record)
            )
        if problem:
            return replace(result, problem=problem)
        self.say(f"job {self._job} runs on {record.nodelist if record else 'its nodes'}.")
        result = replace(result, meeting=self._meet())
        report, problem = self._wait_report()
        result = replace(result, report=report, problem=problem)
        if self.wish.requeue_too and report is not None and report.complete:
            result = replace(result, requeue_tried=True, requeued_s=self._wait_back())
        return result

    # --- waiting ----------------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        if not self.interrupted():
            self.sleep(seconds)
        if self.interrupted():
            raise KeyboardInterrupt

    def _poll(
        self, within_s: float, look: Callable[[], _T | None], pause: Callable[[float], None]
    ) -> _T | None:
        """What ``look`` comes to, as soon as that is something; None after ``within_s``."""
        until = self.wall() + within_s
        while (result := look()) is None and self.wall() < until:
            pause(_EVERY_S)
        return result

    def _is_gone(self, states: frozenset[JobState]) -> bool:
        """Whether the job is over, and what it has written had its time to be seen here."""
        record = self._ask()
        if record is None or not (self._forgotten or record.state in states):
            self._over_since = None
            return False
        self._over_since = self._over_since or self.wall()
        return self.wall() > self._over_since + _SETTLES_S

    def _wait_start(self, submitted_at: float) -> str:
        """Until the job says that it is here; why it does not, else."""
        until = submitted_at + self.wish.start_within.total_seconds()
        reason = ""
        while not exists_on_server(self.folder / HERE):
            if self._is_gone(TERMINAL):
                return self._went_unseen()
            record = self._record
            waits = record is None or record.state in PENDING_LIKE
            if record is not None and waits and record.reason != reason:
                reason = record.reason or ""
                if reason not in ("", "None"):
                    self.say(f"job {self._job} waits: {reason}")
            if self._over_since is None and self.wall() > until:
                if not waits:
                    return (
                        "the job runs, but has written nothing into the folder of runs: "
                        "do compute nodes share it?"
                    )
                minutes = f"{self.wish.start_within.total_seconds() / 60:g} min"
                because = f" ({record.reason})" if record is not None and record.reason else ""
                return f"the job did not start within {minutes}{because}"
            self._pause(_EVERY_S)
        return ""

    def _went_unseen(self) -> str:
        state = "forgotten by Slurm" if self._forgotten else self._state()
        if exists_on_server(self.folder / AGAIN):
            return (
                f"the job lost its nodes before it had begun, and was started once more ({state}): "
                "it was preempted, or its node failed; try again"
            )
        output = self._output()
        if output:
            return f"the job ended ({state}) before it had begun: {output}"
        return (
            f"the job ended ({state}) and left nothing in {self.folder.parent}: compute nodes "
            "do not share that folder with this one, or do not have this Python"
        )

    def _wait_report(self) -> tuple[JobSeen | None, str]:
        until = self.wall() + _LIMIT.total_seconds() + _LATE_S
        report = self._report()
        while report is None or not report.complete:
            if self.wall() >= until or self._is_gone(TERMINAL | PENDING_LIKE):
                why = self._output() or "it wrote nothing"
                return report, f"the job was cut off ({self._state()}): {why}"
            self._pause(_EVERY_S)
            report = self._report()
        return report, ""

    def _wait_back(self) -> float | None:
        """Seconds from the job's own requeue until it ran again."""
        since = self.wall()
        self.say(f"job {self._job} requeues itself; waiting until it is back.")

        def seconds_until_back() -> float | None:
            return self.wall() - since if exists_on_server(self.folder / AGAIN) else None

        return self._poll(self.wish.back_within.total_seconds(), seconds_until_back, self._pause)

    # --- the folder -------------------------------------------------------------------------------

    def _meet(self) -> Meeting:
        meeting = meet(
            self.folder,
            lambda: self._record is None or self._record.state not in TERMINAL,
            wall=self.wall,
            sleep=self._pause,
        )
        return replace(
            meeting,
            lock_refused=is_locked(self.folder / NODE_LOCK),
            exclusive=is_taken(self.folder / NODE_ONCE),
            content_right=self._poll(_SETTLES_S, self._content_right, self._pause),
        )

    def _content_right(self) -> bool | None:
        """Whether what the node has synced and renamed is there, whole."""
        for path in self.folder.glob("from-*"):
            with contextlib.suppress(OSError, ForgeError):
                return read_trusted(path, _LARGEST) == self._nonce.encode()
        return None

    def _report(self) -> JobSeen | None:
        with contextlib.suppress(OSError, ForgeError, ValidationError):
            if not exists_on_server(self.folder / REPORT):
                return None
            report = _REPORT.validate_python(read_json(self.folder / REPORT, _LARGEST))
            return report if report.nonce == self._nonce else None
        return None

    def _output(self) -> str:
        """The end of what the job has printed, on one line."""
        with contextlib.suppress(OSError):
            for path in sorted((self.folder / "submissions").glob("*.out")):
                return " ".join(path.read_text(errors="replace").split())[-_TAIL:]
        return ""

    def remove_folder(self) -> None:
        """What still runs may write into it while it goes, so it is tried for a while."""

        def is_gone() -> bool | None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return None if os.path.lexists(self.folder) else True

        if not self._poll(_REMOVED_S, is_gone, self.sleep):
            self._print(f"{self.folder} could not be removed: remove it by hand")

    # --- Slurm ------------------------------------------------------------------------------------

    def _ask(self) -> JobRecord | None:
        if self.wall() >= self._last_poll + _ASK_EVERY_S:
            self._last_poll = self.wall()
            with contextlib.suppress(SlurmCommandError):
                record = self.slurm.show_job(self._job)
                self._forgotten = record is None and self._record is not None
                self._record = record or self._record
        return self._record

    def _state(self) -> str:
        return "unknown" if self._record is None else self._record.state.value

    def _cancel(self, job: str) -> None:
        """End it and see it gone: its processes write into a folder that is removed next."""
        # Before anything else, and whatever Slurm says of it: a job may be about to requeue itself.
        with contextlib.suppress(OSError):
            write_atomic(self.folder / OVER, b"", durable=False)
        to_cancel = True

        def is_gone() -> bool | None:
            nonlocal to_cancel
            with contextlib.suppress(SlurmCommandError):
                if to_cancel:
                    self.slurm.cancel(job)
                    to_cancel = False
                record = self.slurm.show_job(job)
                if record is None or record.state in TERMINAL:
                    return True
                # What has come back into the queue is taken out of it again.
                to_cancel = to_cancel or record.state in PENDING_LIKE
            return None

        if not self._poll(_GONE_S, is_gone, self.sleep):
            self._print(f"job {job} has not ended yet: look at squeue --me, then scancel {job}")

    def _cancel_unheard(self, script: Path) -> None:
        """End what came of a submission that was not answered, if anything did."""
        queue_answers = False

        def find_job() -> JobRecord | None:
            nonlocal queue_answers
            with contextlib.suppress(SlurmCommandError):
                record = job_of_script(script, self.slurm)
                queue_answers = True
                return record
            return None

        record = self._poll(_LISTED_S, find_job, self.sleep)
        if record is not None:
            self._cancel(record.job_ref)
        elif not queue_answers:
            self._print("a job may have been submitted: look at squeue --me --name=forge-doctor")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.say(text)


def _is_refusal(error: BaseException) -> bool:
    """Whether it is certain that sbatch has made no job."""
    if isinstance(error, SlurmUnreachableError):
        return error.returncode == COMMAND_NOT_FOUND
    # What sbatch has said may be no number although it has submitted a job.
    return isinstance(error, SlurmCommandError) and error.returncode != 0


def _pending(record: JobRecord) -> float | None:
    start, submit = record.start_time, record.submit_time
    if record.state is JobState.PENDING or start is None or submit is None:
        return None
    return (start - submit).total_seconds()


def live_job(
    job: JobSpec | None, *, nodes: int, partition: str | None, qos: str | None, account: str | None
) -> JobSpec:
    """A job of a few minutes in the place of ``job``, or where the options say."""
    base = job_from_mapping({"name": _NAME, "command": ["true"]})
    resources = base.resources if job is None else job.resources
    changes: dict[str, object] = {
        "nodes": nodes,
        "spare_nodes": None,
        "tasks_per_node": 1,
        "time": _LIMIT,
    }
    sbatch_keys = {"partition": partition, "qos": qos, "account": account}
    changes |= {name: value for name, value in sbatch_keys.items() if value is not None}
    setup = () if job is None else job.setup
    return base.model_copy(
        update={"resources": resources.model_copy(update=changes), "setup": setup}
    )


def live_script(wish: LiveWish, folder: Path) -> str:
    """The script; ``ConfigError`` for what the site refuses of such a job."""
    job, site = wish.job, wish.site
    option_lines = list(options(job, site, RunDirectory.at(folder)))
    warned = int(_WARNED.total_seconds())
    warning = f"--signal=USR2@{warned}"
    has_signal = any(line.startswith("--signal=") for line in option_lines)
    warns = not wish.quick and not has_signal and refused((*option_lines, warning), site) is None
    if warns:
        option_lines.append(warning)
    command = [wish.python, "-u", *process_words("live_job", str(folder))]
    command += [f"--warned={warned}"] if warns else ["--quick"]
    command += ["--requeue"] if wish.requeue_too else []
    command += [f"--srun-option={option}" for option in site.srun_options]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in option_lines),
        *module_lines(job, site),
        *site.setup,
        *job.setup,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"
