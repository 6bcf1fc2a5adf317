"""A run on this machine without Slurm: ranks as local processes.

``train_here``: a training function on this machine, from Python, as local processes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_forge.errors import AlreadyFinishedError
from slurm_forge.journal import RunState, RunStatus, fold, read_to_fold
from slurm_forge.journal.events import VIA_THIS_MACHINE, Submitted, UserAsked
from slurm_forge.launch.attempt.lifeline import LifelineHeld
from slurm_forge.launch.attempt.report_refresh import ReportRefresh
from slurm_forge.launch.attempt.run_lock import (
    RunLock,
    hold_run_lock,
)
from slurm_forge.launch.attempt.stop_request import StopRequest
from slurm_forge.launch.local.tasks import end_session, is_over, start_tasks
from slurm_forge.launch.notify.sender_process import notifications
from slurm_forge.launch.submit.submission import (
    create_run,
    entry_of,
    note,
    run_state,
)
from slurm_forge.person import person
from slurm_forge.recovery.policy.remedies import train_further
from slurm_forge.run_directory import RunDirectory, newest_claim
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile, read_run_file

if TYPE_CHECKING:
    from slurm_forge.launch.attempt.attempt import Attempt

#: Added to the number of the signal that ended it, as shells do.
ENDED_BY_SIGNAL = 128
_LOOK_EVERY_S = 0.25
_GOES_ON = frozenset({RunStatus.RUNNING, RunStatus.REQUEUED})


def run_locally(
    run: RunDirectory,
    file: RunFile,
    ranks: int,
    progress: Callable[[], None],
    *,
    say: Callable[[str], None] = lambda text: None,
    again: bool = False,
) -> int:
    """Start (or continue) the run here and wait for its end; 0 once it is finished.

    ``progress`` is called about four times a second, ``say`` with a line for the
    person who waits.  The tasks of one local job are started at most six times; a run that
    needs more becomes another job.  ``again``: a person wants it, an old STOP doesn't count.

    SIGINT, SIGTERM or SIGHUP let the run save at its next step and stop, a second one ends its
    processes; the result is then 128 and the signal's number.  If this process goes without a
    word, the run saves and stops too.  ``RunDirectoryError`` while another process trains it here.
    """
    run.refuse_others()
    if run.is_done():
        raise AlreadyFinishedError(
            f"{run.name} is finished",
            next_step=f"To train further: {train_further(run.name)}.",
        )
    with (
        hold_run_lock(run) as presence,
        StopRequest() as request,
        notifications(run, file.job.notify),
    ):
        if again:
            run.stop_file.unlink(missing_ok=True)
        note(run, UserAsked(verb="run", user=person()))
        lifeline = LifelineHeld()
        try:
            return _LocalRun(run, file, progress, say, presence, request, lifeline).train(ranks)
        finally:
            lifeline.let_go()


class _LocalRun:
    """Job after job, until the run is finished or rests."""

    def __init__(
        self,
        run: RunDirectory,
        file: RunFile,
        progress: Callable[[], None],
        say: Callable[[str], None],
        presence: RunLock,
        request: StopRequest,
        lifeline: LifelineHeld,
    ) -> None:
        self._run = run
        self._file = file
        self._progress = progress
        self._say = say
        self._presence = presence
        self._request = request
        self._lifeline = lifeline
        self._job = ""

    def train(self, ranks: int) -> int:
        while True:
            report = ReportRefresh(self._run, None) if self._file.job.report else None
            try:
                code = None if self._request else self._train_job(ranks)
                if code is None and self._request:
                    self._keep_stopped()
                    code = ENDED_BY_SIGNAL + self._request.number
            finally:
                if report is not None:
                    report.last()
            if code is not None:
                if report is not None:
                    report.finish(urgent=bool(self._request))
                return code

    def _train_job(self, ranks: int) -> int | None:
        """One job; None where the run goes on with another one, or a signal has stopped it."""
        run = self._run
        lock = self._presence.descriptor
        inherited = () if lock is None else (lock,)
        before = len(run_state(run).attempts)
        process = start_tasks(run, ranks=ranks, stdin=self._lifeline.reader, inherited=inherited)
        self._job = job = f"local-{process.pid}"
        self._presence.name(job)
        note(run, Submitted(job=job, via=VIA_THIS_MACHINE))
        self._wait(process)
        state = run_state(run)
        is_ours = len(state.attempts) > before and state.attempts[-1].job == job
        if self._request and is_ours:
            self._conclude_abandoned(state)
            state = run_state(run)
        self._show()
        if run.is_done():
            return 0
        if self._request:
            return None
        if not is_ours and len(state.attempts) > before:
            self._say_line(f"{run.name} has been taken over by {state.attempts[-1].job}")
            return 1
        if not is_ours:
            self._say_line(
                f"the processes of {job} ended before they began an attempt; their output: "
                f"{run.submissions / str(process.pid)}_0_log.err"
            )
            return 1
        if state.status not in _GOES_ON or not self._restarts(state):
            return 1
        return None

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Until every process of the job has ended."""
        stopping = insisted = False
        while not is_over(process):
            if self._request and not stopping:
                stopping = True
                self._stop()
            if self._request.insists and not insisted:
                insisted = True
                self._say_line("ending all processes")
                end_session(process)
            self._show()
            time.sleep(_LOOK_EVERY_S)
        # A rank that outlived the process that watched over it belongs to nobody any more.
        end_session(process)
        process.wait()

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            note(self._run, UserAsked(verb="stop", user=person()))
        state = run_state(self._run)
        self._lifeline.let_go(self._request.name)
        what = "saving at the next step; once more ends it at once"
        if _between_launches(state):
            what = "nothing was being trained, nothing is lost"
        self._say_line(f"{self._request.name}: stopping: {what}")

    def _conclude_abandoned(self, state: RunState) -> None:
        """Nobody of an attempt that was ended at once could still say what had become of it."""
        attempt = self._abandoned_attempt(state)
        if attempt is not None:
            from slurm_forge.recovery import LaunchFacts

            why = f"{self._request.name}, and its processes were ended at once"
            attempt.conclude(LaunchFacts(now=datetime.now(timezone.utc), stopped_by=why))
            attempt.end("stop")

    def _keep_stopped(self) -> None:
        """The run waits for its next start, which is not to come: have its journal say so."""
        from slurm_forge.launch.attempt.stop_between_attempts import (
            keep_stopped,
            stopped_before_start,
        )

        records = read_to_fold(self._run)
        state = fold(records)
        if state.job == self._job:
            keep_stopped(self._run, state, records, stopped_before_start(self._request.name))

    def _restarts(self, state: RunState) -> bool:
        """Whether the run is started again, after an attempt that is over.

        Where rank 0 was killed, nobody has decided: it conducts the attempt.
        """
        attempt = self._abandoned_attempt(state)
        if attempt is None:
            return True
        from slurm_forge.launch.attempt.attempt import REQUEUEING
        from slurm_forge.launch.attempt.post_mortem import post_mortem
        from slurm_forge.recovery import LaunchFacts

        decision = post_mortem(
            self._run, state, self._file, attempt.claim, slurm=None, now=time.time()
        )
        if decision is None and not state.attempts[-1].decisions:
            # Rank 0 wrote down what had happened, and was killed before it decided.
            decision = attempt.conclude(LaunchFacts(now=datetime.now(timezone.utc)))
        again = decision is None or decision.action in REQUEUEING
        attempt.end("requeued" if again else "held")
        self._show()
        until = time.monotonic() + (decision.wait_s if decision is not None and again else 0.0)
        while time.monotonic() < until and not self._request:
            time.sleep(_LOOK_EVERY_S)
        if again and self._request:
            self._stop()
        return again

    def _abandoned_attempt(self, state: RunState) -> Attempt | None:
        """The newest attempt, if nobody wrote down its end."""
        attempt, claim = state.attempts[-1], newest_claim(self._run)
        if attempt.ended is not None or claim is None or claim.attempt != attempt.number:
            return None
        # What judges an attempt takes a third of a second to import, and most runs need none of it.
        from slurm_forge.launch.attempt.attempt import Attempt

        launch = attempt.launches[-1].number if attempt.launches else 0
        return Attempt.abandoned(self._run, claim, writer="cli", launch=launch)

    def _show(self) -> None:
        with self._tolerate_hangup():
            self._progress()

    def _say_line(self, text: str) -> None:
        with self._tolerate_hangup():
            self._say(text)

    def _tolerate_hangup(self) -> contextlib.AbstractContextManager[None]:
        """After a hangup nobody can be told anything, and the run is to be saved all the same."""
        return contextlib.suppress(OSError) if self._request else contextlib.nullcontext()


def _between_launches(state: RunState) -> bool:
    """Whether the newest launch is over, and no other has begun."""
    launches = state.attempts[-1].launches if state.attempts else ()
    return bool(launches) and launches[-1].ended is not None


def train_here(
    train: Callable[..., Any] | str,
    spec: Mapping[str, Any],
    *,
    ranks: int = 1,
    runs: Path | str = "runs",
    progress: Callable[[RunState], None] = lambda state: None,
) -> RunDirectory:
    """Train with ``ranks`` local processes until the run is finished or held; continues a run.

    ``spec`` has the keys of a job file.  Look at the state of the returned run to know how it went.
    A signal that would end this process (Ctrl-C, SIGTERM) does so once the run has saved.
    """
    from slurm_forge.launch.render.site_choice import find_site

    entry = train if isinstance(train, str) else entry_of(train)
    job = job_from_mapping({**spec, "entry": entry})
    run = RunDirectory.at(Path(runs) / job.name)
    if run.exists():
        file = read_run_file(run.spec_file)
    else:
        run, file = create_run(
            job,
            runs=Path(runs),
            site=find_site("generic"),
            submitted_from=Path.cwd(),
            queued=False,
        )
    code = run_locally(run, file, ranks, lambda: progress(run_state(run)))
    if code > ENDED_BY_SIGNAL:
        signal.raise_signal(signal.Signals(code - ENDED_BY_SIGNAL))
    return run
