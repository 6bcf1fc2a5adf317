"""The callables that submitit pickles: a pointer to a run, or what runs without knowing of one.

A ``ForgeJob`` is a pointer and nothing else.  The same one runs under our executor
(``cluster="forge"``, a supervisor conducts) and under the stock executors ``slurm``, ``local`` and
``debug`` (rank 0 conducts).  Everything that changes between attempts lives in the run directory: a
requeue after a node failure runs the original pickle.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurm_forge.control.handshake import Credentials
from slurm_forge.errors import ForgeError
from slurm_forge.journal.events import VIA_THIS_MACHINE
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    StartRefusal,
    begin,
)
from slurm_forge.launch.attempt.lifeline import Lifeline
from slurm_forge.launch.attempt.unrecognized import note_unrecognized
from slurm_forge.launch.submit.submission import keep_payload
from slurm_forge.launch.submitit.embedded import (
    EmbeddedConductor,
    Rendezvous,
    await_rendezvous,
    withdraw,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.signals import SAVE_SIGNALS
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

#: The exit status by which the tasks are to be started again; submitit's local executor has it so.
START_AGAIN = 144
#: The exit status of a ``ForgeCall`` that has saved (EX_TEMPFAIL of sysexits.h: try again).
CALL_AGAIN = 75


@dataclass(frozen=True)
class ForgeJob:
    """What one of submitit's own executors submits: ``executor.submit(ForgeJob("runs/my-run"))``.

    Attributes:
        run: The run directory, which ``slurm-forge render`` has made.
    """

    #: Pickles outlive the place of this module: they name the public one.
    __module__ = "slurm_forge"

    run: str

    def __call__(self) -> str:
        """Be one rank of an attempt; submitit calls it in every task.

        In a process of submitit's any other outcome than a finished run ends the process, after the
        run was requeued or held.  In your own process (the debug executor) the run continues there.

        Returns:
            A line about the run, once it is finished.

        Raises:
            ForgeError: The run did not finish, and this is your own process.
        """
        run = RunDirectory.existing(self.run)
        if run.is_done():
            return _summary(run)
        knobs = Knobs.from_environ(os.environ)
        worker = importlib.import_module("slurm_forge.training.rank.main")
        place = worker.place_from_environ(os.environ)
        if knobs.channel is not None:
            result = worker.run_rank(
                run,
                place,
                channel=knobs.channel,
                credentials=Credentials(knobs.nonce, knobs.secret),
                launch_started=knobs.started,
            )
            return _end_rank(run, worker, result)
        if not _in_process(os.environ):
            lifeline = Lifeline.of_standard_input() if knobs.lifeline else None
            return _StockTask(run, worker, place, lifeline=lifeline).be_a_rank()
        # Whatever surrounds the user's process (an interactive job, say) is not the run's.
        with _signals_given_back(), _environment_given_back():
            return _StockTask(
                run, worker, worker.place_from_environ({}), in_process=True
            ).be_a_rank()

    def checkpoint(self) -> DelayedSubmission:
        """Submitit's protocol for a requeue: run the same pointer again.

        Returns:
            The submission of the same job; nothing is saved here.
        """
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class ForgeCall:
    """A callable that knows nothing of runs, and the run that it is conducted as.

    Submitit calls it in every task.  Asked to save, rank 0 calls the ``checkpoint`` of the callable
    as submitit does, and the next start calls what that has returned; without one, the same again.

    Attributes:
        run: The run directory.
        function: What was submitted: a function, or an object such as a Checkpointable.
    """

    run: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one rank; when Slurm gives notice, the process saves and ends.

        Args:
            args: Those of the submission.
            kwargs: Those of the submission.

        Returns:
            What the callable returns.
        """
        from submitit import JobEnvironment

        environment = JobEnvironment()

        def save(number: int, frame: object) -> None:
            del number, frame
            if environment.global_rank == 0:
                self._save(environment.paths.submitted_pickle, args, kwargs)

        # In the place of submitit's own, which requeues the job itself.
        for signal_number in {signal.SIGUSR2, environment._usr_sig()}:
            signal.signal(signal_number, save)
        return self.function(*args, **kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission | None:
        """Submitit's protocol for a requeue.

        Args:
            args: Those of the call that is interrupted.
            kwargs: Those of the call that is interrupted.

        Returns:
            What the next start calls; None where the callable wants none.
        """
        from submitit.core.utils import DelayedSubmission

        own = getattr(self.function, "checkpoint", None)
        if own is None:
            return DelayedSubmission(self, *args, **kwargs)
        next_call = own(*args, **kwargs)
        if next_call is None:
            return None
        again = ForgeCall(self.run, next_call.function)
        return DelayedSubmission(again, *next_call.args, **next_call.kwargs)

    def _save(self, pickle: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        from submitit.core import utils

        run = RunDirectory.existing(self.run)
        again = self.checkpoint(*args, **kwargs)
        if again is None:  # to submitit that means: not again
            run.stop_file.touch(mode=0o600)
        else:
            keep_payload(run, again.dump)  # a successor of the job begins with it
            with utils.temporary_save_path(pickle) as written:
                again.dump(written)
        # SystemExit: what the callable has open is closed on the way out.
        sys.exit(CALL_AGAIN)


#: Pickles outlive the place of this module: they name that one.
ForgeCall.__module__ = "slurm_forge.launch.submitit_job"


class _StockTask:
    """A task under a stock executor, or (``in_process``) the user's own process."""

    def __init__(
        self,
        run: RunDirectory,
        worker: Any,
        place: Any,
        *,
        in_process: bool = False,
        lifeline: Lifeline | None = None,
    ) -> None:
        self._run = run
        self._worker = worker
        self._place = place
        self._key = f"{place.job}-{place.restart_count}"
        self._in_process = in_process
        self._lifeline = lifeline

    def be_a_rank(self) -> str:
        if self._place.rank == 0:
            return self._conduct()
        unwanted = (lambda: False) if self._lifeline is None else self._lifeline.is_cut
        rendezvous = await_rendezvous(self._run, self._key, unwanted=unwanted)
        if rendezvous is None:
            return _summary(self._run)
        result = self._worker.run_rank(
            self._run,
            self._place,
            channel=rendezvous.channel,
            credentials=rendezvous.credentials,
            attempt=rendezvous.attempt,
        )
        return _end_rank(self._run, self._worker, result)

    def _conduct(self) -> str:
        """Rank 0: claim, conduct, and be a rank too."""
        withdraw(self._run, self._key)
        environment = SlurmEnvironment.from_environ(os.environ)
        local = self._in_process or self._place.job.startswith("local-")
        in_slurm = environment is not None and not local
        attempt = begin(
            self._run,
            job=self._place.job,
            restart_count=self._place.restart_count,
            nodes=environment.nodes if in_slurm and environment else (socket.gethostname(),),
            via="submitit slurm" if in_slurm else VIA_THIS_MACHINE,
            slurm=SubprocessSlurm.of_this_process() if in_slurm else None,
            unwanted="" if self._lifeline is None else self._lifeline.why_cut(),
        )
        if isinstance(attempt, StartRefusal):
            Rendezvous().publish(self._run, self._key)
            return _summary(self._run, attempt)
        if in_slurm and environment:
            note_unrecognized(attempt, environment.unrecognized)
        with attempt.held_on_error():
            embedded = EmbeddedConductor(
                attempt,
                world_size=self._place.world_size,
                job=self._place.job,
                slurm=SubprocessSlurm.of_this_process() if in_slurm else None,
                environment=environment if in_slurm else None,
                requeue_exit_code=None if in_slurm else START_AGAIN,
                leave=_raise_in_main if self._in_process else None,
                lifeline=self._lifeline,
            )
        if attempt.verdict is not None:
            Rendezvous().publish(self._run, self._key)
            embedded.conclude()
            raise ForgeError(
                f"{self._run.name} does not continue: {embedded.reason}",
                next_step=f"slurm-forge explain {self._run.name}",
            )
        embedded.start()
        embedded.rendezvous.publish(self._run, self._key)
        result = self._worker.run_rank(
            self._run,
            self._place,
            channel=embedded.rendezvous.channel,
            credentials=embedded.rendezvous.credentials,
            survives_abort=True,
            attempt=embedded.rendezvous.attempt,
        )
        embedded.wait_over()
        del result
        if embedded.finished:
            return _summary(self._run)
        if embedded.code == START_AGAIN:  # any other process has ended
            return self.be_a_rank()
        raise ForgeError(
            f"{self._run.name} did not finish: {embedded.reason}",
            next_step=f"slurm-forge explain {self._run.name}",
        )


def _in_process(environ: Mapping[str, str]) -> bool:
    """Whether this is the user's own process: the debug executor, or a plain call.

    That executor sets its variable for ``job.result()`` and not for ``job.exception()``.
    """
    return "SUBMITIT_DEBUG_JOB_ID" in environ or "SUBMITIT_EXECUTOR" not in environ


@contextlib.contextmanager
def _signals_given_back() -> Iterator[None]:
    """The user's process is to die of SIGTERM again once the run is over."""
    handlers = [(number, signal.getsignal(number)) for number in SAVE_SIGNALS]
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers:
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment_given_back() -> Iterator[None]:
    """What the site and the job file set is the run's, not of what the user does afterwards."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _raise_in_main(code: int) -> None:
    """The user's own process must not be ended: what is to be told, its main thread tells."""
    del code


def _summary(run: RunDirectory, refusal: StartRefusal | None = None) -> str:
    word = "finished" if refusal in (None, StartRefusal.DONE) else f"not started ({refusal.value})"
    return f"{run.name}: {word}"


def _end_rank(run: RunDirectory, worker: Any, result: Any) -> str:
    """A rank that is not the conductor's: done, or gone without a result of its own."""
    if result.outcome is worker.RankOutcome.FINISHED:
        return _summary(run)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: submitit would pickle an error, and job.done() would stay "failed" for ever.
    os._exit(1 if result.outcome is worker.RankOutcome.FAILED else 0)
