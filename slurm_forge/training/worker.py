"""One rank: meet the others, run the user's function, say the last words.

Reached by name only (``python -m slurm_forge.training.worker RUN``), and through
``slurm_forge.launch.submitit_job`` inside a submitit task.  Imports no torch before the signal
handlers are in place: a notice that comes during the imports is a notice, not the end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from signal import Signals
from typing import Any, NoReturn

from slurm_forge.control import Member
from slurm_forge.control import protocol as p
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.errors import ForgeError
from slurm_forge.integrations.trackers import tracker_variables
from slurm_forge.journal import JournalWriter
from slurm_forge.knobs import Knobs, LocalRanks
from slurm_forge.run_directory import RunDirectory
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.environment import SlurmEnvironment, process_environ
from slurm_forge.spec.recovery import trusts_process
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.training.farewell import last_words_of, leave_behind
from slurm_forge.training.leaving import Leaving, show_crashes
from slurm_forge.training.parking import ParkingPlace
from slurm_forge.training.unwinding import LaunchOver, Unwinding, can_unwind
from slurm_forge.training.witnessed import Witnessed, begin_to_be_witnessed
from slurm_forge.vocabulary.cause import Cause

__all__ = [
    "Outcome",
    "RankPlace",
    "Result",
    "main",
    "open_rank",
    "place_from_environ",
    "place_of_script",
    "run_rank",
]

_MEET_WITHIN = timedelta(minutes=10)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class Outcome(str, Enum):
    """How a rank came out of the user's function."""

    FINISHED = "finished"
    STOPPED = "stopped"
    GIVEN_UP = "given_up"
    FAILED = "failed"
    #: Out of a launch that is over, and good for another one in this process.
    UNWOUND = "unwound"


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome and the number of optimizer steps done."""

    outcome: Outcome
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank of how many this process is, and the job it belongs to.

    ``node`` is what Slurm calls the machine: a host may know itself by another name.
    """

    rank: int
    local_rank: int
    world_size: int
    job: str
    restart_count: int
    node: str = ""
    #: Whether it is the first one on the second node of the step.
    leads_second_node: bool = False

    @property
    def host(self) -> str:
        """The name of the machine for evidence, and for leaving it out."""
        return self.node or socket.gethostname()


def place_from_environ(environ: Mapping[str, str]) -> RankPlace:
    """From a Slurm step, else from submitit's local executor, torchrun, or a single process."""
    slurm = SlurmEnvironment.from_environ(environ)
    local = LocalRanks.from_environ(environ)
    if slurm is not None and slurm.procid is not None and "SUBMITIT_LOCAL_JOB_ID" not in environ:
        return RankPlace(
            rank=slurm.procid,
            local_rank=slurm.localid or 0,
            world_size=slurm.ntasks or 1,
            job=slurm.job_ref,
            restart_count=slurm.restart_count,
            node=slurm.node_name or "",
            leads_second_node=slurm.nodeid == 1 and slurm.localid == 0,
        )
    return RankPlace(
        rank=local.rank,
        local_rank=local.local_rank,
        world_size=local.world_size,
        job=local.job,
        restart_count=0,
    )


def place_of_script(environ: Mapping[str, str]) -> RankPlace:
    """Of a script that was started by torchrun, by srun, or by neither: then it is alone.

    A batch step has SLURM_PROCID and SLURM_NTASKS too, and torchrun's workers inherit those of the
    task that torchrun runs in.
    """
    slurm, local = SlurmEnvironment.from_environ(environ), LocalRanks.from_environ(environ)
    found = place_from_environ(environ)
    if slurm is None:
        return found if local.torchrun else replace(found, job=f"{local.job}-{os.getpid()}")
    if local.torchrun or slurm.step_id is None:
        alone = not local.torchrun
        found = replace(
            found,
            rank=0 if alone else local.rank,
            local_rank=0 if alone else local.local_rank,
            world_size=1 if alone else local.world_size,
        )
    return replace(
        found,
        job=slurm.job_ref,
        restart_count=slurm.restart_count,
        node=slurm.node_name or "",
    )


def run_rank(
    directory: RunDirectory,
    place: RankPlace,
    *,
    channel: str,
    nonce: str,
    launch_started: float | None = None,
    survives_abort: bool = False,
    kept: Kept | None = None,
    attempt: int | None = None,
) -> Result:
    """Train as one rank.  Returns for every outcome, last words included; the caller exits.

    ``survives_abort`` is for the rank that hosts the conductor itself, of that ``attempt``;
    ``kept`` for a process that may be the rank of several launches.
    """
    opened = _open(
        directory,
        place,
        channel=channel,
        nonce=nonce,
        launch_started=launch_started,
        survives_abort=survives_abort,
        kept=kept,
        attempt=attempt,
    )
    rank, unwinding, leaving = opened.rank, opened.unwinding, opened.leaving
    notices, witnessed = opened.notices, opened.witnessed
    del opened
    try:
        result = rank.train()
    finally:
        if witnessed is not None:
            witnessed.end()
    if unwinding is None or not rank.may_go_on(result):
        return result
    notices.say_through(None)
    # With them goes what is left of the launch: models, process groups, loader workers.
    del rank
    problem = unwinding.clear()
    if problem:
        leaving(f"it can't go on in its process: {problem}")
    unwinding.over()
    return Result(Outcome.UNWOUND, result.step)


def open_rank(
    directory: RunDirectory,
    place: RankPlace,
    *,
    channel: str,
    nonce: str,
    launch_started: float | None = None,
    survives_abort: bool = False,
    attempt: int | None = None,
    keys: Mapping[str, Any] | None = None,
) -> _Rank:
    """A rank that has joined the channel, for a script that is its own entry: see ``begin``.

    ``keys`` are keys of the job that the script says otherwise than the run was made with.
    """
    opened = _open(
        directory,
        place,
        channel=channel,
        nonce=nonce,
        launch_started=launch_started,
        survives_abort=survives_abort,
        attempt=attempt,
        keys=keys,
    )
    opened.rank.witnessed = opened.witnessed
    return opened.rank


@dataclass(frozen=True, slots=True)
class _Opened:
    """A rank on the channel, and what belongs to its process."""

    rank: _Rank
    notices: _Notices
    leaving: Leaving
    unwinding: Unwinding | None
    witnessed: Witnessed | None


def _open(
    directory: RunDirectory,
    place: RankPlace,
    *,
    channel: str,
    nonce: str,
    launch_started: float | None,
    survives_abort: bool,
    kept: Kept | None = None,
    attempt: int | None = None,
    keys: Mapping[str, Any] | None = None,
) -> _Opened:
    begun = time.time()
    knobs = Knobs.from_environ(process_environ())
    show_crashes(knobs.attempt, knobs.launch)
    mine = Kept() if kept is None else kept
    notices = mine.notices
    witnessed: Witnessed | None = None
    try:
        file = read_run_file(directory.spec_file)
        if keys:
            file = file.model_copy(update={"job": file.job.model_copy(update=dict(keys))})
        watchdog = file.job.watchdog
        if watchdog.enabled:
            witnessed = begin_to_be_witnessed()
        if witnessed is not None:
            witnessed.start(
                directory,
                rank=place.rank,
                world_size=place.world_size,
                host=place.host,
                channel=channel,
                nonce=nonce,
                attempt=knobs.attempt if attempt is None else attempt,
                launch=knobs.launch or 1,
                alone_after=watchdog.at_most if survives_abort else None,
            )
        hosts, port = parse_addresses(channel)
        leaving = Leaving(
            directory,
            rank=place.rank,
            in_slurm=bool(place.node),
            second=place.leads_second_node and file.job.outlives_nodes,
        )
        trusted = kept is not None and trusts_process(file.job.recovery) and can_unwind()
        unwinding = Unwinding(leaving) if trusted else None
        member = _Channel(
            rank=place.rank,
            world_size=place.world_size,
            nonce=nonce,
            hosts=hosts,
            port=port,
            host=place.host,
            pid=os.getpid(),
            on_abort=_stay if survives_abort else unwinding or leaving,
            progress=None if witnessed is None else witnessed.progress,
        )
    except Exception as error:
        words = last_words_of(error, step=0, phase="start", micro_batch=0)
        leave_behind(directory, words, rank=place.rank, host=place.host)
        raise
    notices.say_through(member)
    rank = _Rank(directory, place, file, member, nonce, launch_started or begun, mine, unwinding)
    return _Opened(rank, notices, leaving, unwinding, witnessed)


class _Channel(Member):
    """Knows whether something could not be said any more."""

    mute = False

    def _send(self, message: p.Message) -> None:
        try:
            super()._send(message)
        except OSError:
            self.mute = True
            raise


class _Notices:
    """Signals seen while there is no channel are said as soon as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: list[Signals] = []
        self._member: Member | None = None

    def seen(self, signal: Signals) -> None:
        with self._lock:
            if self._member is None:
                self._early.append(signal)
            else:
                self._member.send(p.Notice(what=signal.name))

    def say_through(self, member: Member | None) -> None:
        with self._lock:
            self._member = member
            if member is None:
                return
            early, self._early = self._early, []
        for signal in early:
            self.seen(signal)


class Kept:
    """What a process has once, however many launches it is a rank of.  Main thread."""

    def __init__(self) -> None:
        self.notices = _Notices()
        self.watcher = SignalWatcher(self.notices.seen)
        #: The program, once it is imported: what it keeps in its modules is kept.
        self.entry: Callable[..., Any] | None = None


class _Rank:
    """The steps of one rank's life, with what its last words need."""

    def __init__(
        self,
        directory: RunDirectory,
        place: RankPlace,
        file: RunFile,
        member: _Channel,
        nonce: str,
        launch_started: float,
        kept: Kept | None = None,
        unwinding: Unwinding | None = None,
    ) -> None:
        self._kept = kept
        self._unwinding = unwinding
        #: Who looks on, where this rank's own script ends it (``leave``).
        self.witnessed: Witnessed | None = None
        self._failed_of: Cause | None = None
        self._journal: JournalWriter | None = None
        self._directory = directory
        self._place = place
        self._file = file
        self._member = member
        self._nonce = nonce
        self._launch_started = launch_started
        self._run: Any = None
        self._brief: Any = None
        self._variables = process_environ()

    def train(self) -> Result:
        """Train, and leave the channel when the last words are said."""
        try:
            if self._unwinding is None:
                return self._train()
            result: Result = self._unwinding.run(self._train)
            return result
        except LaunchOver:
            return Result(Outcome.UNWOUND, 0)
        finally:
            if self._journal is not None:
                self._journal.close()
            self._member.close()

    def may_go_on(self, result: Result) -> bool:
        """Whether this process may be a rank of the next launch too, by its end and by policy."""
        if result.outcome is Outcome.FAILED:
            cause, policy = self._failed_of, self._file.job.recovery
            if cause is Cause.NCCL_ERROR:  # it has only lost another rank
                return trusts_process(policy)
            return cause is not None and trusts_process(policy, cause)
        return result.outcome in (Outcome.UNWOUND, Outcome.GIVEN_UP)

    @property
    def _is_over(self) -> bool:
        return self._unwinding is not None and self._unwinding.begun

    def _train(self) -> Result:
        # Everything below may import torch; the three unwinding classes live beside it.
        try:
            run = self._prepare()
        except Exception as error:
            if self._is_over:
                raise
            self._last_words(error)
            return Result(Outcome.FAILED, 0)
        from slurm_forge.training.entry import call_entry

        def work() -> int:
            assert self._entry is not None  # noqa: S101  loaded above
            call_entry(self._entry, run, run.args)
            return int(run.finish())

        return self._outcome(work)

    def begin(self) -> Any:
        """For a script that is its own entry: the run to train with; raises after last words."""
        try:
            return self._prepare()
        except Exception as error:
            self._last_words(error)
            self._close()
            raise

    def leave(self, error: BaseException | None) -> Result:
        """The script's own part is over, by ``error`` if there was one."""

        def work() -> int:
            if error is not None:
                raise error
            return int(self._run.finish())

        try:
            return self._outcome(work)
        finally:
            self._close()

    def _close(self) -> None:
        if self.witnessed is not None:
            self.witnessed.end()
        if self._journal is not None:
            self._journal.close()
        self._member.close()

    def _outcome(self, work: Callable[[], int]) -> Result:
        from slurm_forge.training.boundary import RunStopped
        from slurm_forge.training.skips import LaunchGivenUp

        run = self._run
        try:
            return Result(Outcome.FINISHED, work())
        except RunStopped:
            return Result(Outcome.STOPPED, run.step_number)
        except LaunchGivenUp:
            return Result(Outcome.GIVEN_UP, run.step_number)
        except LaunchOver:
            raise
        except BaseException as error:  # SystemExit and DCP's CheckpointException are neither
            if self._is_over:
                raise
            run.let_land()  # the last words end the other ranks, and their part of a save
            self._last_words(error)
            return Result(Outcome.FAILED, run.step_number)

    def _prepare(self) -> Any:
        import torch

        from slurm_forge.control.brief import BRIEF_KEY, LaunchBrief
        from slurm_forge.training import rng
        from slurm_forge.training.context import RankContext
        from slurm_forge.training.entry import load_entry
        from slurm_forge.training.process_group import choose_device, join
        from slurm_forge.training.run import Run

        imported = time.time()
        member, place, spec = self._member, self._place, self._file.job
        brief = LaunchBrief.from_text(member.published(BRIEF_KEY, _MEET_WITHIN.total_seconds()))
        self._brief = brief
        device = choose_device(place.local_rank)
        if device.type == "cpu" and "OMP_NUM_THREADS" not in self._variables:
            # Ranks that share a node's cores slow each other down by more than they gain; and a
            # fixed number keeps the order of additions, hence every bit, the same.
            torch.set_num_threads(spec.resources.cpus_per_task or 1)
        groups = join(
            member,
            rank=place.rank,
            world_size=place.world_size,
            nonce=self._nonce,
            device=device,
            wait=_MEET_WITHIN,
            collective_timeout=_COLLECTIVE_TIMEOUT,
        )
        met = time.time()
        journal = None
        if place.rank == 0:
            journal = self._journal = JournalWriter(
                self._directory, attempt=brief.attempt, writer="rank0", launch=brief.launch
            )
        context = RankContext(
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            host=place.host,
            brief=brief,
            directory=self._directory,
            spec=spec,
            folder=self._file.folder,
            variables=self._variables,
        )
        if place.rank == 0:  # trackers are not to be told by several ranks
            first = (brief.attempt, brief.launch) == (1, 1)
            os.environ.update(
                tracker_variables(
                    name=spec.name,
                    directory=self._directory.path,
                    step=brief.resume_step,
                    first=first,
                    given=self._variables,
                )
            )
        # The same on all ranks, so that they build the same model; the program may seed anew.
        rng.derive(spec.seed, 0, 0)
        known = None if self._kept is None else self._kept.entry
        if known is None and spec.entry is not None:  # a script is its own entry
            known = load_entry(spec.entry, self._file.folder)
        self._entry = known
        if self._kept is not None:
            self._kept.entry = known
        self._run = Run(
            context,
            device=device,
            groups=groups,
            member=member,
            journal=journal,
            timings=lambda: (imported - self._launch_started, met - imported),
        )
        return self._run

    def _last_words(self, error: BaseException) -> None:
        """Over the channel, never over a collective: the others may be inside one."""
        run = self._run
        if self._unwinding is not None:
            self._unwinding.last_words()
        words = last_words_of(
            error,
            step=0 if run is None else run.step_number,
            phase="start" if run is None else "train",
            micro_batch=0 if run is None else run.micro_batch,
        )
        self._failed_of = Cause(words.cause)
        sys.stderr.write(words.trace)
        if run is not None and words.cause in (Cause.CUDA_OOM.value, Cause.HOST_OOM.value):
            with contextlib.suppress(Exception):  # the words matter more
                self._account_for_memory(error)
        self._member.send(words)
        if self._member.mute:
            known = self._brief
            attempt, launch = (0, 0) if known is None else (known.attempt, known.launch)
            leave_behind(
                self._directory,
                words,
                rank=self._place.rank,
                host=self._place.host,
                attempt=attempt,
                launch=launch,
            )

    def _account_for_memory(self, error: BaseException) -> None:
        """Where the memory had gone, for a person to look at; takes two seconds at most."""
        from slurm_forge.training.memory import RankInfo, write_account

        run, place = self._run, self._place
        info = RankInfo(
            rank=place.rank,
            world_size=place.world_size,
            host=place.host,
            device=str(run.device),
            step=run.step_number,
            micro_batch=run.micro_batch,
        )
        file = self._directory.memory_account(run.attempt, run.launch, place.rank)
        write_account(file, error, run.registry, info, run.device)


def _stay(reason: str) -> None:
    del reason


def main(argv: list[str] | None = None, parking: ParkingPlace | None = None) -> NoReturn:
    """Entry point of ``python -m slurm_forge.training.worker RUN``, and of a forked worker.

    ``parking`` is where it may wait for another launch.
    """
    arguments = sys.argv[1:] if argv is None else argv
    knobs = Knobs.from_environ(os.environ)
    kept = None
    code = 1
    try:
        if parking is not None:
            kept = Kept()
        if len(arguments) != 1 or knobs.channel is None:
            raise ForgeError(
                "the worker is started by slurm_forge itself",
                next_step="Start a run with slurm-forge submit or slurm-forge run.",
            )
        while True:
            result = run_rank(
                RunDirectory.existing(arguments[0]),
                place_from_environ(os.environ),
                channel=knobs.channel or "",
                nonce=knobs.nonce,
                launch_started=knobs.started,
                kept=kept,
            )
            if parking is None or result.outcome is not Outcome.UNWOUND:
                break
            order = parking.wait()
            if order is None:
                break
            knobs = Knobs(
                channel=order.channel,
                nonce=order.nonce,
                attempt=order.attempt,
                launch=order.launch,
                started=order.started,
            )
            os.environ.update(knobs.to_environ())
        code = 1 if result.outcome is Outcome.FAILED else 0
    except ForgeError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
    except Exception:
        sys.stderr.write(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter shutdown would join loader workers and tear down groups that peers still use.
        os._exit(code)


if __name__ == "__main__":
    main()
