"""Slurm's commands, run for us: the only module that talks to a Slurm controller.

``Slurm`` is what the rest of the package asks for; ``SubprocessSlurm`` runs the real commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from slurm_forge.errors import ConfigError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.knobs import process_environ
from slurm_forge.slurm.process import Completed, Runner, run_command
from slurm_forge.slurm.records import (
    AccountingRecord,
    ConfigRecord,
    JobRecord,
    NodeRecord,
    PartitionRecord,
    QueueRecord,
)
from slurm_forge.slurm.sbatch_variables import without_overrides
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
    is_unknown_job,
    is_unreachable,
    requeue_outcome,
)
from slurm_forge.slurm.text.nodelist import fold_nodes
from slurm_forge.slurm.text.parsing import (
    ACCOUNTING_FIELDS,
    QUEUE_FORMAT,
    parse_accounting,
    parse_config,
    parse_job_id,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
)
from slurm_forge.units import format_slurm_duration

# A leading dash would be an option, a comma or a bracket would name further jobs.
_JOB = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?")
# Several tasks of one array, for what may be asked of all of them at once.
_TASKS = re.compile(r"[0-9]{1,10}_\[[0-9]{1,10}(?:[,-][0-9]{1,10}){0,2000}\]")
_WORD = re.compile(r"[\w.@:][\w.@:+=%/-]{0,254}")
_SIGNAL = re.compile(r"[A-Z0-9]{1,10}")

#: Seconds since 1970: any strftime format is taken (scontrol man page), and this one has no hour
#: that occurs twice in autumn.  sacct cuts what is longer than 19 characters.
_TIME_FORMAT = "%s"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUpdate:
    """What ``scontrol update`` is to change; ``None`` leaves a value as it is.

    On a waiting job everything can be changed, on a running one a user may only shorten the time
    limit.  ``exclude_nodes=()`` clears the list.  ``memory_per_node`` is in bytes, rounded up to
    MiB.  ``start_after`` counts from now; zero starts a waiting job as soon as there is room.  In
    the second of a requeue that is fatal: slurmd still refuses the job's credential and Slurm ends
    it for good ("Job credential revoked", tried on 22.05.8), so leave some seconds.  ``num_nodes``
    without ``num_tasks`` has no effect on a job that was submitted with tasks per node, and takes
    nodes from one that runs (tried on 22.05.8).
    """

    exclude_nodes: Sequence[str] | None = None
    time_limit: timedelta | None = None
    num_nodes: int | None = None
    num_tasks: int | None = None
    memory_per_node: int | None = None
    start_after: timedelta | None = None
    requeue: bool | None = None
    comment: str | None = None

    def assignments(self) -> tuple[str, ...]:
        """The ``Key=Value`` arguments of ``scontrol update``, none if nothing is to change."""
        wanted: list[str] = []
        if self.exclude_nodes is not None:
            wanted.append(f"ExcNodeList={fold_nodes(self.exclude_nodes)}")
        if self.time_limit is not None:
            wanted.append(f"TimeLimit={format_slurm_duration(self.time_limit)}")
        if self.num_nodes is not None:
            exactly = f"{self.num_nodes:d}-{self.num_nodes:d}"
            wanted.append(f"NumNodes={exactly}")
        if self.num_tasks is not None:
            wanted.append(f"NumTasks={self.num_tasks:d}")
        if self.memory_per_node is not None:
            wanted.append(f"MinMemoryNode={-(-self.memory_per_node // (1 << 20)):d}")
        if self.start_after is not None:
            seconds = -(-self.start_after // timedelta(seconds=1))
            wanted.append("StartTime=now" + (f"+{seconds}" if seconds > 0 else ""))
        if self.requeue is not None:
            wanted.append(f"Requeue={self.requeue:d}")
        if self.comment is not None:
            if not self.comment.isprintable():
                raise ConfigError(
                    f"a job's comment can't hold {self.comment[:40]!r}",
                    next_step="Write the comment in one line of printable text.",
                )
            wanted.append(f"Comment={self.comment}")
        return tuple(wanted)


class Slurm(Protocol):
    """What we ask of Slurm.  A ``job`` is an id or ``<array>_<task>``; ``hold``, ``release`` and
    ``update_job`` take tasks that wait together, ``<array>_[3-5]``, as well.

    Every call returns within its own timeout.  ``SlurmCommandError`` is "Slurm said no" or an
    answer that can't be read; its subclass ``SlurmUnreachableError`` is "no answer", after which
    a change may or may not have been made.
    """

    def submit(self, script: Path, args: Sequence[str] = ()) -> str:
        """Job id of the new job.  ``args`` are sbatch options; they win over the script's."""
        ...

    def show_job(self, job: str) -> JobRecord | None:
        """The job now; ``None`` if Slurm does not know it (any more)."""
        ...

    def show_tasks(self, job: str) -> tuple[JobRecord, ...]:
        """Every record that goes by this id: all tasks of an array, all parts of a het job."""
        ...

    def show_partition(self, name: str) -> PartitionRecord | None:
        """The partition; ``None`` if there is none of that name."""
        ...

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        """Every partition that this user may see."""
        ...

    def show_nodes(self, names: Sequence[str]) -> tuple[NodeRecord, ...]:
        """Those of the named nodes that Slurm knows, in one call."""
        ...

    def show_config(self) -> ConfigRecord:
        """The controller's configuration."""
        ...

    def requeue(self, job: str) -> RequeueReply:
        """End the job if it runs and put it back into the queue.  Never raises a Slurm error."""
        ...

    def requeue_hold(self, job: str) -> RequeueReply:
        """As ``requeue``, and it stays in the queue until it is released."""
        ...

    def hold(self, job: str) -> None:
        """Keep a waiting job from starting."""
        ...

    def release(self, job: str) -> None:
        """Let a held job start."""
        ...

    def cancel(self, job: str, *, signal: str | None = None, batch: bool = False) -> None:
        """End the job, or with ``signal`` (``"USR1"``) send that to its steps.

        ``batch`` sends it to the batch shell instead.  A job that is over or unknown is no error.
        """
        ...

    def cancel_waiting(self, job: str) -> None:
        """Take what has not started out of the queue: of an array, the tasks that wait."""
        ...

    def update_job(self, job: str, update: JobUpdate) -> None:
        """Change the job's parameters."""
        ...

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        """Every run of the job and of its steps, the earliest first; empty if not recorded."""
        ...

    def queue(self, user: str) -> tuple[QueueRecord, ...]:
        """The user's jobs that wait or run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SubprocessSlurm:
    """Runs sbatch, scontrol, scancel, sacct and squeue.

    ``environment`` is what those commands get: variables that would change the format of an
    answer are replaced, SBATCH_* that would win over a script left out, and the rest (SLURM_CONF,
    PATH) goes through.  ``timeout`` is per call; submitting has its own, because a killed sbatch
    may have submitted all the same.
    """

    environment: Mapping[str, str]
    runner: Runner = run_command
    timeout: timedelta = timedelta(seconds=20)
    submit_timeout: timedelta = timedelta(seconds=120)

    @classmethod
    def of_this_process(cls) -> SubprocessSlurm:
        """A client with the environment of this process."""
        return cls(environment=process_environ())

    def with_timeout(self, timeout: timedelta) -> SubprocessSlurm:
        """The same client with another timeout per call, for callers with a deadline."""
        return replace(self, timeout=timeout)

    def submit(self, script: Path, args: Sequence[str] = ()) -> str:
        """See ``Slurm``.  A relative ``script`` can't be taken for an option."""
        argv = ("sbatch", "--parsable", *args, str(script.absolute()))
        # The job inherits sbatch's environment: nothing of ours may leak into the training.
        variables = without_overrides(_for_a_new_job(self.environment), _text_of(script))
        done = self._run(argv, self.submit_timeout, variables)
        return parse_job_id(_accepted(done, next_step=_correct(done.stderr)).stdout)

    def show_job(self, job: str) -> JobRecord | None:
        """See ``Slurm``.  A task that waits shares one record with the others that do."""
        records = self.show_tasks(job)
        exact = (record for record in records if job in {record.job_ref, str(record.job_id)})
        # "18+1" is a part of a heterogeneous job, whose record knows only its own job id.
        shared = (record for record in records if record.waiting_tasks or "+" in job)
        return next(exact, next(shared, None))

    def show_tasks(self, job: str) -> tuple[JobRecord, ...]:
        """See ``Slurm``.  In the form with several lines, which is exact for any job name."""
        done = self._ask("scontrol", "show", "job", _job(job))
        return () if is_unknown_job(done) else parse_jobs(_accepted(done).stdout)

    def show_partition(self, name: str) -> PartitionRecord | None:
        """See ``Slurm``."""
        done = self._ask("scontrol", "show", "partition", _word(name, "a partition"))
        if done.returncode != 0 and f"{name} not found" in done.stdout + done.stderr:
            return None
        records = parse_partitions(_accepted(done).stdout)
        return next((record for record in records if record.name == name), None)

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        """See ``Slurm``."""
        return parse_partitions(_accepted(self._ask("scontrol", "show", "partition")).stdout)

    def show_nodes(self, names: Sequence[str]) -> tuple[NodeRecord, ...]:
        """See ``Slurm``.  Nothing is run for no names."""
        if not names:
            return ()
        done = self._ask("scontrol", "show", "node", fold_nodes(names))
        # With one name of many that it does not know it fails, after it has answered.
        known = done.returncode == 1 and re.search(r"^Node \S+ not found$", done.stdout, re.M)
        return parse_nodes((done if known else _accepted(done)).stdout)

    def show_config(self) -> ConfigRecord:
        """See ``Slurm``."""
        return parse_config(_accepted(self._ask("scontrol", "show", "config")).stdout)

    def requeue(self, job: str) -> RequeueReply:
        """See ``Slurm``."""
        return self._requeue("requeue", job)

    def requeue_hold(self, job: str) -> RequeueReply:
        """See ``Slurm``."""
        return self._requeue("requeuehold", job)

    def hold(self, job: str) -> None:
        """See ``Slurm``."""
        _accepted(self._ask("scontrol", "hold", _jobs(job)))

    def release(self, job: str) -> None:
        """See ``Slurm``."""
        _accepted(self._ask("scontrol", "release", _jobs(job)))

    def cancel(self, job: str, *, signal: str | None = None, batch: bool = False) -> None:
        """See ``Slurm``."""
        options = [] if signal is None else [f"--signal={_matched(_SIGNAL, signal, 'a signal')}"]
        done = self._ask("scancel", *options, *(["--batch"] if batch else []), _job(job))
        # Plain scancel is silent about a job that is over; with a signal it is not.
        if not is_unknown_job(done) and "already completing or completed" not in done.stderr:
            _accepted(done)

    def cancel_waiting(self, job: str) -> None:
        """See ``Slurm``.  A task that was requeued and waits is one of them (tried on 22.05.8)."""
        done = self._ask("scancel", "--state=PENDING", _job(job))
        if not is_unknown_job(done):
            _accepted(done)

    def update_job(self, job: str, update: JobUpdate) -> None:
        """See ``Slurm``.  Nothing is run if nothing is to change."""
        assignments = update.assignments()
        if assignments:
            _accepted(self._ask("scontrol", "update", f"JobId={_jobs(job)}", *assignments))

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        """See ``Slurm``."""
        options = ("--duplicates", "--noheader", "--parsable2", f"--format={ACCOUNTING_FIELDS}")
        done = self._ask("sacct", *options, "--jobs", _job(job))
        if "accounting storage is disabled" in done.stderr:
            return ()
        return parse_accounting(_accepted(done).stdout)

    def batch_script(self, job: str) -> str:
        """The script that Slurm keeps of a job; ``SlurmCommandError`` where it has none."""
        return _accepted(self._ask("scontrol", "write", "batch_script", _job(job), "-")).stdout

    def queue(self, user: str) -> tuple[QueueRecord, ...]:
        """See ``Slurm``."""
        options = ("--noheader", f"--format={QUEUE_FORMAT}")
        done = self._ask("squeue", *options, f"--user={_word(user, 'a user')}")
        return parse_queue(_accepted(done).stdout)

    def answer(self, *argv: str) -> str:
        """What a command prints that only asks; raises as every call does."""
        return _accepted(self._ask(*argv)).stdout

    def _requeue(self, verb: str, job: str) -> RequeueReply:
        try:
            done = self._ask("scontrol", verb, _job(job))
        except SlurmUnreachableError as error:
            missing = error.returncode == COMMAND_NOT_FOUND
            outcome = RequeueAnswer.NO_COMMAND if missing else RequeueAnswer.UNREACHABLE
            return RequeueReply(outcome, error.stderr)
        return RequeueReply(requeue_outcome(done), done.stderr.strip())

    def _ask(self, *argv: str) -> Completed:
        return self._run(argv, self.timeout, _for_a_question(self.environment))

    def _run(
        self, argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]
    ) -> Completed:
        try:
            done = self.runner(argv, timeout, environment)
        except OSError as error:
            missing = isinstance(error, _NOT_HERE)
            raise SlurmUnreachableError(
                argv,
                COMMAND_NOT_FOUND if missing else _NOT_STARTED,
                f"{argv[0]} can't be started: {error.strerror or error}",
                next_step=_NO_SLURM if missing else _TRY_LATER,
            ) from None
        if done.returncode is None:
            waited = f"no answer within {timeout.total_seconds():g} s. {done.stderr}"
            raise SlurmUnreachableError(argv, 124, waited.strip(), next_step=_TRY_LATER)
        if is_unreachable(done):
            raise _unreachable(done)
        return done


#: What shells say of a command that does not exist.
COMMAND_NOT_FOUND = 127
#: What they say of one that exists.  Every other error, of a node without room for one more process
#: or a file system that is away, may be over in a moment.
_NOT_STARTED = 126
_NOT_HERE = (FileNotFoundError, PermissionError, NotADirectoryError)
_TRY_LATER = "See whether `scontrol ping` answers, and try again when it does."
_CORRECTED = (
    ("invalid partition", "Write one that `sinfo -s` lists: resources.partition."),
    (
        "invalid account",
        "Write resources.account and resources.qos as `sacctmgr show assoc user=$USER "
        "format=account,partition,qos` lists them.",
    ),
    ("invalid qos", "Write one that `sacctmgr show qos format=name` lists: resources.qos."),
)
_NO_SLURM = (
    "On a cluster, load its Slurm module or go to a login node.\n"
    "  Elsewhere, slurm-forge run trains on this machine, and "
    "python -m slurm_forge.testing.cluster up starts a Slurm to try things on."
)
#: The commands are installed and belong to no cluster.
_UNCONFIGURED = ("configuration source", "Unable to process configuration file")
_TOLD_BY = re.compile(r"^(?:\w+: )?(?:error|fatal): ")


def _unreachable(done: Completed) -> SlurmUnreachableError:
    """One line for people, the one that says why; all of Slurm's words stay in ``stderr``."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    telling = [line for line in lines if is_unreachable(replace(done, stderr=line))]
    why = _TOLD_BY.sub("", (telling or lines or [""])[-1].strip())
    nobody = any(words in done.stderr for words in _UNCONFIGURED)
    error = SlurmUnreachableError(
        done.argv, done.returncode or 0, why, next_step=_NO_SLURM if nobody else _TRY_LATER
    )
    error.stderr = done.stderr
    return error


def _accepted(done: Completed, *, next_step: str = "") -> Completed:
    if done.returncode:
        words = done.stderr.strip() or done.stdout
        raise SlurmCommandError(done.argv, done.returncode, words, next_step=next_step)
    return done


def _correct(refusal: str) -> str:
    """What to do about the commonest refusals of sbatch (slurm_errno.c); empty for others."""
    refusal_text = refusal.casefold()
    return next((step for words, step in _CORRECTED if words in refusal_text), "")


def _for_a_question(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment in which the answer's form depends on nothing that the user has set."""
    variables = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_"))
        and name != "SLURM_BITSTR_LEN"
    }
    return {**variables, "LC_ALL": "C", "SLURM_TIME_FORMAT": _TIME_FORMAT}


def _for_a_new_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment without what describes the job that we are in.

    sbatch hands its environment to the new job and overwrites only the variables that apply
    there: SLURM_RESTART_COUNT or SLURM_ARRAY_TASK_ID of the old job would be believed in the new.
    """
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SLURMD_")) or name in _NOT_OF_THE_JOB
    }


def _text_of(script: Path) -> str:
    try:
        return script.read_text(errors="replace")
    except OSError:  # sbatch will say so
        return ""


_NOT_OF_THE_JOB = frozenset(
    {
        "SLURM_CONF",
        "SLURM_CLUSTERS",
        "SLURM_TIME_FORMAT",
        "SLURM_EXIT_ERROR",
        "SLURM_UMASK",
        # A person's own: where runs lie, which site it is.  Without them a successor would begin
        # a run of its own somewhere else.
        "SLURM_FORGE_RUNS",
        "SLURM_FORGE_SITE",
        "SLURM_FORGE_NODES",
    }
)


def _job(text: str) -> str:
    return _matched(_JOB, text, "a job id")


def _jobs(text: str) -> str:
    return text if _TASKS.fullmatch(text) else _job(text)


def _word(text: str, what: str) -> str:
    return _matched(_WORD, text, f"the name of {what}")


def _matched(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise ConfigError(
            f"{text[:60]!r} is not {what}",
            next_step='Job ids look like "8812301" or "8812301_4"; other names hold no spaces.',
        )
    return text
