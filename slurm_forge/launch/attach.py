"""``with slurm_forge.attach("my-run") as run:`` in a script that somebody else has started.

By ``srun python``, by torchrun, or plainly.  Under ``slurm-forge exec`` the ranks join its channel;
else rank 0 claims the attempt and conducts from a thread, as under submitit's own executors.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from slurm_forge.control.handshake import Credentials
from slurm_forge.errors import ConfigError
from slurm_forge.journal.events import VIA_THIS_MACHINE
from slurm_forge.knobs import Knobs, LocalRanks, process_environ
from slurm_forge.launch.attempt.attempt import (
    StartRefusal,
    begin,
)
from slurm_forge.launch.attempt.run_lock import hold_run_lock
from slurm_forge.launch.attempt.unrecognized import note_unrecognized
from slurm_forge.launch.command.signal_listener import (
    SentinelStep,
    sentinel_command,
    sentinel_environment,
)
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.command_runs import open_run
from slurm_forge.launch.submit.submission import note_asked
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
from slurm_forge.spec import JobSpec, job_from_mapping

#: Exit status of a script that has saved and stopped, where there is no Slurm to start it again
#: (EX_TEMPFAIL of sysexits.h: try again).
STOPPED = 75
#: What a script may say otherwise than ``slurm-forge exec`` has made the run with.
_OF_THE_SCRIPT = ("args", "checkpoint", "environment", "seed", "batch_coupled")


def attach(
    name: str | None = None,
    *,
    spec: Mapping[str, Any] | None = None,
    runs: Path | str | None = None,
) -> Attachment:
    """Make the ``with`` block of a script a run: ``with forge.attach("my-run") as run:``.

    The script of every rank calls it, in its main thread.  Where torch.distributed is not
    initialised yet, it is afterwards.

    At the end of the block the run is finished: last save, ``DONE``.  When it has to stop, it
    saves, and the process ends inside the block with status 0, or 75 where there is no Slurm to
    start it again.  An exception is reported to the other ranks and ends the process with status 1,
    once it is decided how the run continues.  A script whose run is finished or held ends at once
    with status 0.

    Args:
        name: The name of the run; None takes that of the surrounding ``slurm-forge exec``, of the
            Slurm job, or of the script.
        spec: The keys of a job file, without ``name`` and ``entry``.
        runs: The folder of runs; None is ``SLURM_FORGE_RUNS``, else ``./runs``.

    Returns:
        A context manager, to be used once, whose value is the ``Run`` that a training function
        gets.

    Raises:
        ConfigError: On entry: the default process group has other ranks than the environment says,
            the name differs from that of ``slurm-forge exec``, or this is not the main thread.
    """
    return Attachment(name, dict(spec or {}), None if runs is None else Path(runs))


class Attachment:
    """What ``attach`` returns: use it as a context, once."""

    def __init__(self, name: str | None, spec: dict[str, Any], runs: Path | None) -> None:
        self._name = name
        self._spec = spec
        self._runs = runs
        self._rank: Any = None
        self._worker: Any = None
        self._embedded: EmbeddedConductor | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            # Before anything is claimed: signals reach the main thread alone.
            raise ConfigError(
                "slurm_forge.attach() in a thread",
                next_step="Attach in the script's main thread; the loop may be in there, too.",
            )
        self._worker = importlib.import_module("slurm_forge.training.rank.main")
        knobs = Knobs.from_environ(process_environ())
        place = self._worker.place_of_script(process_environ())
        self._stack.callback(_give_back, _signals())
        try:
            if knobs.run is not None and knobs.channel is not None:
                self._rank = self._under_exec(knobs, place)
            elif place.rank == 0:
                self._rank = self._host(place)
            else:
                self._rank = self._join(place)
            run = self._rank.begin()
        except BaseException as error:
            self._stack.close()
            if self._embedded is not None and self._rank is not None:
                self._embedded.wait_over()  # the words are said; it decides, and mostly ends us
            if isinstance(error, SystemExit | KeyboardInterrupt) or self._rank is None:
                raise
            _leave(error)
        return run

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        outcome = self._worker.RankOutcome
        result = self._rank.leave(error)
        if self._embedded is not None:
            self._embedded.wait_over()  # where the run does not finish, the process ends in here
        elif result.outcome is not outcome.FINISHED:
            _exit(1 if result.outcome is outcome.FAILED else 0)
        if self._embedded is not None and not self._embedded.finished:
            _exit(self._embedded.code or 1)
        self._stack.close()

    # -- ways in -----------------------------------------------------------------------------

    def _under_exec(self, knobs: Knobs, place: Any) -> Any:
        """The attempt is claimed already, by whoever has started us."""
        run = RunDirectory.existing(knobs.run or "")
        if self._name is not None and self._name != run.name:
            raise ConfigError(
                f'slurm_forge.attach("{self._name}"), but slurm-forge exec runs "{run.name}"',
                next_step=f"Give both the same name: slurm-forge exec --name {self._name}, or "
                "attach() without one.",
            )
        return self._worker.open_rank(
            run,
            place,
            channel=knobs.channel,
            credentials=Credentials(knobs.nonce, knobs.secret),
            launch_started=knobs.started,
            attempt=knobs.attempt,
            keys=self._keys(run.name),
        )

    def _host(self, place: Any) -> Any:
        """Rank 0: make the run where there is none, claim, conduct, and be a rank too."""
        environment = SlurmEnvironment.from_environ(process_environ())
        slurm = None if environment is None else SubprocessSlurm.of_this_process()
        run = self._ensure_run(place)
        key = _key(place)
        withdraw(run, key)
        if slurm is None:
            self._stack.enter_context(hold_run_lock(run)).name(place.job)
        refused = None if not run.is_done() else StartRefusal.DONE
        attempt = None
        if refused is None:
            if slurm is None:
                run.stop_file.unlink(missing_ok=True)
            note_asked(run, place.job, place.restart_count, slurm)
            attempt = begin(
                run,
                job=place.job,
                restart_count=place.restart_count,
                nodes=(socket.gethostname(),) if environment is None else environment.nodes,
                via=VIA_THIS_MACHINE if environment is None else "attach",
                slurm=slurm,
                command=True,
            )
        if attempt is None or isinstance(attempt, StartRefusal):
            Rendezvous().publish(run, key)
            _nothing_to_do(run, refused or attempt)
        if environment is not None:
            note_unrecognized(attempt, environment.unrecognized)
        embedded = EmbeddedConductor(
            attempt,
            world_size=place.world_size,
            job=place.job,
            slurm=slurm,
            environment=environment,
            requeue_exit_code=STOPPED if slurm is None else None,
            ear=None if environment is None else self._ear(environment),
        )
        if attempt.verdict is not None:
            Rendezvous().publish(run, key)
            embedded.conclude()
        embedded.start()
        embedded.rendezvous.publish(run, key)
        self._embedded = embedded
        return self._worker.open_rank(
            run,
            place,
            channel=embedded.rendezvous.channel,
            credentials=embedded.rendezvous.credentials,
            survives_abort=True,
            attempt=embedded.rendezvous.attempt,
            keys=self._keys(run.name),
        )

    def _ear(
        self, environment: SlurmEnvironment
    ) -> Callable[[Callable[[str, str], None]], None] | None:
        """In the batch step nothing is heard of a preemption: a sentinel step listens for it."""
        if environment.in_srun_step:
            return None

        def listen(hear: Callable[[str, str], None]) -> None:
            sentinel = SentinelStep(
                sentinel_command(sys.executable, environment.node_name),
                sentinel_environment(process_environ()),
                lambda name: hear(name, "tasks of steps"),
            )
            self._stack.callback(sentinel.close)

        return listen

    def _join(self, place: Any) -> Any:
        """Any other rank: by what rank 0 has written into the run directory."""
        run = RunDirectory.at(self._folder() / self._run_name(place))
        rendezvous = await_rendezvous(run, _key(place))
        if rendezvous is None:
            _nothing_to_do(run, None)
        return self._worker.open_rank(
            run,
            place,
            channel=rendezvous.channel,
            credentials=rendezvous.credentials,
            attempt=rendezvous.attempt,
            keys=self._keys(run.name),
        )

    # -- the run -----------------------------------------------------------------------------

    def _folder(self) -> Path:
        if self._runs is not None:
            return self._runs.expanduser().absolute()
        return Path(Knobs.from_environ(process_environ()).runs or "runs").expanduser().absolute()

    def _run_name(self, place: Any) -> str:
        del place
        if self._name is not None:
            return self._name
        environment = SlurmEnvironment.from_environ(process_environ())
        if environment is not None and environment.job_name:
            return environment.job_name
        stem = Path(sys.argv[0]).stem
        if not stem[:1].isalnum():  # python -c, a pipe, an interactive session
            raise ConfigError(
                "the run has no name, and there is no script to name it after",
                next_step='Give it one: slurm_forge.attach("my-run")',
            )
        return stem

    def _ensure_run(self, place: Any) -> RunDirectory:
        job = self._job(self._run_name(place))
        run = RunDirectory.at(self._folder() / job.name)
        if not run.is_done():
            site = find_site(run_exists=run.exists())
            open_run(job, runs=self._folder(), site=site, folder=Path.cwd())
        return run

    def _job(self, name: str) -> JobSpec:
        words = [sys.executable, *(word for word in sys.argv if word.isprintable())]
        spec = {key: value for key, value in self._spec.items() if key != "args"}
        return job_from_mapping({**spec, "name": name, "command": words})

    def _keys(self, name: str) -> dict[str, Any]:
        """What the script says of the training itself, as its ranks are to take it."""
        settings = {key: self._spec[key] for key in _OF_THE_SCRIPT if key in self._spec}
        job = job_from_mapping({"name": name, "entry": "the.script:itself", **settings})
        return {key: getattr(job, key) for key in settings}


def _key(place: Any) -> str:
    """The same for all ranks of one start, and for no other."""
    started = LocalRanks.from_environ(process_environ()).torchrun
    return "-".join(filter(None, (place.job, str(place.restart_count), started)))


def _nothing_to_do(run: RunDirectory, refused: StartRefusal | None) -> NoReturn:
    why = "" if refused is None else f" ({refused.value})"
    sys.stderr.write(f"slurm_forge: {run.name}: nothing to do{why}\n")
    raise SystemExit(0)


def _leave(error: BaseException) -> NoReturn:
    """Its last words are said: the others are told, and must not be waited for."""
    del error
    _exit(1)


def _exit(code: int) -> NoReturn:
    # Interpreter shutdown would join loader workers and tear down groups that peers still use.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _signals() -> list[tuple[signal.Signals, Any]]:
    return [(number, signal.getsignal(number)) for number in SAVE_SIGNALS]


def _give_back(handlers: list[tuple[signal.Signals, Any]]) -> None:
    """The script is to die of SIGTERM again once its run is over."""
    with contextlib.suppress(ValueError):  # not of the main thread
        signal.set_wakeup_fd(-1)
        for number, handler in handlers:
            signal.signal(number, handler)
