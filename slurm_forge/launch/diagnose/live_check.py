"""``doctor --live`` on the login node: a small job, waited for, heard through one folder, removed.

Whatever happens to the command, the job is cancelled and the folder goes, unless it is to stay.
Signals of the user are only recorded (``interrupted``), and looked for between two things.

How ``doctor --live`` leaves: neither its job nor its folder stays, and nothing else goes.

The batch script of ``doctor --live``: the job's own place in the cluster, another program.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from slurm_forge.errors import ForgeError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.files import make_missing, read_json, read_trusted, write_atomic
from slurm_forge.launch.diagnose.live_job import (
    AGAIN,
    HERE,
    NODE_LOCK,
    NODE_ONCE,
    OVER,
    REPORT,
)
from slurm_forge.launch.diagnose.live_meeting import meet
from slurm_forge.launch.diagnose.live_node import (
    CARD,
    LOGIN_LOCK,
    ONCE,
)
from slurm_forge.launch.render.sbatch_options import options
from slurm_forge.lock import exclusive
from slurm_forge.person import person
from slurm_forge.process import process_words
from slurm_forge.recovery.live_observations import (
    JobSeen,
    LiveSeen,
    Meeting,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.rules import refused
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import PENDING_LIKE, TERMINAL, JobState
from slurm_forge.spec import JobSpec, job_from_mapping

_REPORT = TypeAdapter(JobSeen)
_LARGEST = 4 << 20
_PREFIX = ".doctor-live-"
_EVERY_S = 0.5
_ASK_EVERY_S = 1.0
#: How long what an ended job has written may take to be seen here.
_SETTLES_S = 30.0
_LATE_S = 60.0
#: What shells say of a command that does not exist.
_NO_COMMAND = 127
_TAIL = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWish:
    """What is wanted: ``job`` from ``live_job``, ``runs`` the folder that runs lie in."""

    job: JobSpec
    site: Site
    runs: Path
    python: str
    quick: bool = False
    torch: bool = True
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
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=runs))
    except BaseException:
        remove_folders(created)
        raise
    try:
        return _LiveCheck(wish, slurm, folder, say, wall, sleep, interrupted).run()
    finally:
        if not wish.keep and not remove_folders(created, whole=folder, wall=wall, sleep=sleep):
            with contextlib.suppress(OSError, ValueError):
                say(f"{folder} could not be removed: remove it by hand")


class _LiveCheck:
    def __init__(
        self,
        wish: LiveWish,
        slurm: Slurm,
        folder: Path,
        say: Callable[[str], None],
        wall: Callable[[], float],
        sleep: Callable[[float], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._wish = wish
        self._slurm = slurm
        self._folder = folder
        self._say = say
        self._wall = wall
        self._unhurried = sleep
        self._interrupted = interrupted
        self._nonce = secrets.token_hex(16)
        self._record: JobRecord | None = None
        #: Slurm forgets a job MinJobAge after its end.
        self._forgotten = False
        self._last_poll = 0.0
        self._job = ""

    def run(self) -> LiveSeen:
        wish = self._wish
        (self._folder / "submissions").mkdir(mode=0o700)
        write_atomic(self._folder / CARD, self._nonce.encode())
        write_atomic(self._folder / ONCE, b"")
        script = self._folder / "job.sbatch"
        text = live_script(
            wish.job,
            wish.site,
            self._folder,
            python=wish.python,
            quick=wish.quick,
            torch=wish.torch,
            requeue=wish.requeue_too,
        )
        write_atomic(script, text.encode())
        with exclusive(self._folder / LOGIN_LOCK, timedelta(0)):
            submitted = self._wall()
            leaving = JobEnder(self._slurm, self._folder, self._say, self._wall, self._unhurried)
            self._sleep(0.0)
            try:
                self._job = self._slurm.submit(script)
            except SlurmUnreachableError as error:
                if error.returncode != _NO_COMMAND:
                    leaving.cancel_unheard(script)
                raise
            except SlurmCommandError as error:
                # What sbatch has said may be no number although it has submitted a job.
                if error.returncode == 0:
                    leaving.cancel_unheard(script)
                raise
            except BaseException:
                leaving.cancel_unheard(script)
                raise
            try:
                return self._followed(submitted)
            finally:
                if self._interrupted():
                    self._say(f"interrupted: job {self._job} is cancelled, which may take a minute")
                leaving.cancel(self._job)

    def _sleep(self, seconds: float) -> None:
        if not self._interrupted():
            self._unhurried(seconds)
        if self._interrupted():
            raise KeyboardInterrupt

    def _followed(self, submitted: float) -> LiveSeen:
        wish, resources = self._wish, self._wish.job.resources
        self._say(f"job {self._job} submitted; it takes about a minute once it runs.")
        result = LiveSeen(
            job=self._job,
            partition=resources.partition,
            qos=resources.qos,
            nodes=resources.nodes,
            folder=str(self._folder) if wish.keep else "",
        )
        problem = self._wait_start(submitted)
        record = self._record
        if record is not None:
            result = replace(
                result, partition=record.partition, qos=record.qos, pending_s=_pending(record)
            )
        if problem:
            return replace(result, problem=problem)
        self._say(f"job {self._job} runs on {record.nodelist if record else 'its nodes'}.")
        result = replace(result, meeting=self._met())
        report, problem = self._wait_report()
        result = replace(result, report=report, problem=problem)
        if wish.requeue_too and report is not None and report.complete:
            result = replace(result, requeue_tried=True, requeued_s=self._wait_back())
        return result

    # --- waiting ----------------------------------------------------------------------------------

    def _wait_start(self, submitted: float) -> str:
        """Until the job says that it is here; why it does not, else."""
        until = submitted + self._wish.start_within.total_seconds()
        pending_reason, over_since = "", None
        while True:
            if (self._folder / HERE).exists():
                return ""
            record = self._ask()
            if (
                record is not None
                and record.state in PENDING_LIKE
                and record.reason != pending_reason
            ):
                pending_reason = record.reason or ""
                if pending_reason not in ("", "None"):
                    self._say(f"job {self._job} waits: {pending_reason}")
            if record is not None and (_over(record) or self._forgotten):
                over_since = over_since or self._wall()
                if self._wall() > over_since + _SETTLES_S:
                    return self._went_unseen(record)
            elif self._wall() > until:
                waits = record is None or record.state in PENDING_LIKE
                reason = f" ({record.reason})" if record is not None and record.reason else ""
                if waits:
                    return (
                        f"the job did not start within {_minutes(self._wish.start_within)}{reason}"
                    )
                return (
                    "the job runs, but has written nothing into the folder of runs: do compute "
                    "nodes share it?"
                )
            self._sleep(_EVERY_S)

    def _went_unseen(self, record: JobRecord) -> str:
        state = "forgotten by Slurm" if self._forgotten else record.state.value
        if (self._folder / AGAIN).exists():
            return (
                f"the job lost its nodes before it had begun, and was started once more ({state}): "
                "it was preempted, or its node failed; try again"
            )
        output = self._output()
        if output:
            return f"the job ended ({state}) before it had begun: {output}"
        return (
            f"the job ended ({state}) and left nothing in {self._folder.parent}: compute nodes "
            "do not share that folder with this one, or do not have this Python"
        )

    def _wait_report(self) -> tuple[JobSeen | None, str]:
        until = self._wall() + LIMIT.total_seconds() + _LATE_S
        over_since = None
        while self._wall() < until:
            report = self._report()
            if report is not None and report.complete:
                return report, ""
            record = self._ask()
            job_ended = self._forgotten or (record is not None and _over(record))
            if job_ended or (record is not None and record.state in PENDING_LIKE):
                over_since = over_since or self._wall()
                if self._wall() > over_since + _SETTLES_S:
                    break
            self._sleep(_EVERY_S)
        state = "unknown" if self._record is None else self._record.state.value
        why = self._output() or "it wrote nothing"
        return self._report(), f"the job was cut off ({state}): {why}"

    def _wait_back(self) -> float | None:
        """Seconds from the job's own requeue until it ran again."""
        since = self._wall()
        until = since + self._wish.back_within.total_seconds()
        self._say(f"job {self._job} requeues itself; waiting until it is back.")
        while self._wall() < until:
            if (self._folder / AGAIN).exists():
                return self._wall() - since
            self._sleep(_EVERY_S)
        return None

    # --- the folder -------------------------------------------------------------------------------

    def _met(self) -> Meeting:
        meeting = meet(
            self._folder,
            lambda: not (self._record is not None and _over(self._record)),
            wall=self._wall,
            sleep=self._sleep,
        )
        refused: bool | None
        try:
            with exclusive(self._folder / NODE_LOCK, timedelta(0)) as locked:
                refused = False if locked else None
        except ForgeError:
            refused = True
        return replace(
            meeting,
            lock_refused=refused,
            exclusive=self._exclusive(),
            content_right=self._content_right(),
        )

    def _exclusive(self) -> bool | None:
        """Whether a name that the node has taken can't be taken here."""
        try:
            os.close(os.open(self._folder / NODE_ONCE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return True
        except OSError:
            return None
        return False

    def _content_right(self) -> bool | None:
        """Whether what the node has synced and renamed is there, whole."""
        for _ in range(int(_SETTLES_S / _EVERY_S)):
            for path in self._folder.glob("from-*"):
                with contextlib.suppress(OSError, ForgeError):
                    return read_trusted(path, _LARGEST) == self._nonce.encode()
            self._sleep(_EVERY_S)
        return None

    def _report(self) -> JobSeen | None:
        with contextlib.suppress(OSError, ForgeError, ValidationError):
            document = read_json(self._folder / REPORT, _LARGEST)
            report = _REPORT.validate_python(document)
            return report if report.nonce == self._nonce else None
        return None

    def _output(self) -> str:
        """The end of what the job has printed, on one line."""
        with contextlib.suppress(OSError):
            for path in sorted((self._folder / "submissions").glob("*.out")):
                return " ".join(path.read_text(errors="replace").split())[-_TAIL:]
        return ""

    # --- Slurm ------------------------------------------------------------------------------------

    def _ask(self) -> JobRecord | None:
        if self._wall() < self._last_poll + _ASK_EVERY_S:
            return self._record
        self._last_poll = self._wall()
        with contextlib.suppress(SlurmCommandError):
            record = self._slurm.show_job(self._job)
            self._forgotten = record is None and self._record is not None
            self._record = record or self._record
        return self._record


def _over(record: JobRecord) -> bool:
    return record.state in TERMINAL


def _pending(record: JobRecord) -> float | None:
    if record.state is JobState.PENDING or None in (record.submit_time, record.start_time):
        return None
    assert record.submit_time is not None and record.start_time is not None  # noqa: S101
    return (record.start_time - record.submit_time).total_seconds()


def _minutes(span: timedelta) -> str:
    return f"{span.total_seconds() / 60:g} min"


#: KillWait is 30 s by default, and what follows it takes a moment.
_GONE_S = 60.0
#: How long a job that was submitted by a command without an answer may take to be listed.
_LISTED_S = 10.0
#: Of many jobs of the user the newest are looked at.
_NEWEST = 50
_REMOVED_S = 10.0


@dataclass(frozen=True, slots=True)
class JobEnder:
    """Ends a job; ``say`` tells the user what is left to do by hand."""

    slurm: Slurm
    folder: Path
    say: Callable[[str], None]
    wall: Callable[[], float]
    sleep: Callable[[float], None]

    def cancel(self, job: str) -> None:
        """End it and see it gone: its processes write into a folder that is removed next."""
        # Before anything else, and whatever Slurm says of it: a job may be about to requeue itself.
        with contextlib.suppress(OSError):
            write_atomic(self.folder / OVER, b"", durable=False)
        until, wanted = self.wall() + _GONE_S, True
        while True:
            record: JobRecord | None = None
            with contextlib.suppress(SlurmCommandError):
                if wanted:
                    self.slurm.cancel(job)
                    wanted = False
                record = self.slurm.show_job(job)
                if record is None or record.state in TERMINAL:
                    return
            # What has come back into the queue is taken out of it again.
            wanted = wanted or (record is not None and record.state in PENDING_LIKE)
            if self.wall() > until:
                break
            self.sleep(_EVERY_S)
        self._print(f"job {job} has not ended yet: look at squeue --me, then scancel {job}")

    def cancel_unheard(self, script: Path) -> None:
        """End what came of a submission that was not answered, if anything did."""
        until = self.wall() + _LISTED_S
        requested = False
        while True:
            with contextlib.suppress(SlurmCommandError):
                for job in self._newest():
                    record = self.slurm.show_job(job)
                    if record is not None and record.command == str(script):
                        self.cancel(job)
                        return
                requested = True
            if self.wall() > until:
                break
            self.sleep(_EVERY_S)
        if not requested:
            self._print("a job may have been submitted: look at squeue --me --name=forge-doctor")

    def _newest(self) -> list[str]:
        listed = sorted(self.slurm.queue(person()), key=lambda each: -each.job_id)
        return [each.job_ref for each in listed[:_NEWEST]]

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.say(text)


def remove_folders(
    empty: Iterable[Path],
    *,
    whole: Path | None = None,
    wall: Callable[[], float] = lambda: 0.0,
    sleep: Callable[[float], None] = lambda _: None,
) -> bool:
    """Remove ``whole`` with what is in it, and each of ``empty`` if it is; whether it is gone.

    What still runs may write into it while it goes, so it is tried for a while.
    """
    removed = True
    if whole is not None:
        until = wall() + _REMOVED_S
        while True:
            shutil.rmtree(whole, ignore_errors=True)
            removed = not os.path.lexists(whole)
            if removed or wall() >= until:
                break
            sleep(_EVERY_S)
    for each in empty:
        with contextlib.suppress(OSError):  # somebody has put something there meanwhile
            each.rmdir()
    return removed


#: The warning is due 40 s after the start.  Slurm looks every 30 s, and rather sends it early.
LIMIT = timedelta(minutes=4)
WARNED = timedelta(seconds=200)
_NAME = "forge-doctor"


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
        "time": LIMIT,
    }
    sbatch_keys = {"partition": partition, "qos": qos, "account": account}
    changes |= {name: value for name, value in sbatch_keys.items() if value is not None}
    setup = () if job is None else job.setup
    return base.model_copy(
        update={"resources": resources.model_copy(update=changes), "setup": setup}
    )


def live_script(
    job: JobSpec, site: Site, folder: Path, *, python: str, quick: bool, torch: bool, requeue: bool
) -> str:
    """The script; ``ConfigError`` for what the site refuses of such a job."""
    option_lines = list(options(job, site, RunDirectory.at(folder)))
    warned = int(WARNED.total_seconds())
    warning = f"--signal=USR2@{warned}"
    has_signal = any(line.startswith("--signal=") for line in option_lines)
    warns = not quick and not has_signal and refused((*option_lines, warning), site) is None
    if warns:
        option_lines.append(warning)
    facts = site.facts(job.resources.partition, job.resources.qos)
    modules = tuple(dict.fromkeys((*site.modules, *facts.modules)))
    command = [python, "-u", *process_words("live_job", str(folder))]
    command += [f"--warned={warned}"] if warns else ["--quick"]
    command += ["--torch"] if torch else []
    command += ["--requeue"] if requeue else []
    command += [f"--srun-option={option}" for option in site.srun_options]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in option_lines),
        *([f"module load {shlex.join(modules)}"] if modules else []),
        *site.setup,
        *job.setup,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"
