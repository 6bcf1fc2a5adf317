"""Starts the command of a run, and conducts each start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

from slurm_forge.control import Hub
from slurm_forge.control.addresses import parse_addresses, usable_hosts
from slurm_forge.control.interfaces import interfaces, preferred_address
from slurm_forge.errors import ConfigError
from slurm_forge.journal.events import Note
from slurm_forge.knobs import Knobs, mark_of_run
from slurm_forge.launch.attempt.attempt import Attempt
from slurm_forge.launch.command.checkpoint_files import CheckpointWatch, ProgressFile, resumable
from slurm_forge.launch.command.conductor import ProgramConductor
from slurm_forge.launch.command.metrics import MetricJournal
from slurm_forge.launch.command.program_process import (
    ProgramProcess,
    read_marked,
)
from slurm_forge.launch.command.program_signals import ProgramSignals
from slurm_forge.launch.command.progress import ProgressWatch, sample_progress
from slurm_forge.launch.command.signal_listener import SentinelStep
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.containers import into_container
from slurm_forge.launch.render.launch_command import (
    by_torchrun,
    for_torchrun,
    master_address,
    meeting_port,
)
from slurm_forge.launch.render.rank_environment import for_command
from slurm_forge.launch.render.schedule import (
    planned_end,
    timing,
)
from slurm_forge.launch.render.signal_convention import forwarding
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.policy.decide import skips_allowed
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.spec.templates import Placeholder, fields_of, fill
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.plan import RecoveryPlan

_CLEARED_S = 5.0
_TICK_S = 0.05
#: What shells say of a program that is not there.
_NOT_STARTED = 127


class CommandLauncher:
    """Starts the run's command inside one attempt: what ``exec`` does, in a job or without one."""

    def __init__(
        self,
        attempt: Attempt,
        variables: Mapping[str, str],
        signals: ProgramSignals,
        job_poller: JobPoller,
        *,
        slurm: Slurm | None = None,
        environment: SlurmEnvironment | None = None,
        sentinel: SentinelStep | None = None,
        words: tuple[str, ...] = (),
        kill_wait: Callable[[], timedelta | None] = lambda: None,
    ) -> None:
        self._attempt = attempt
        self._variables = variables
        self._signals = signals
        self._job_poller = job_poller
        self._slurm = slurm
        self._environment = environment
        self._sentinel = sentinel
        #: The command as the script has it; else that of the job.
        self._words = words
        self._kill_wait = kill_wait
        #: The last start; None where the command could not be started at all.
        self._process: ProgramProcess | None = None

    def output_of(self, rank: int) -> Path | None:
        """It is not known where a command has its ranks write."""
        return None

    def clear(self) -> None:
        """Nothing of the last start is left."""
        process, self._process = self._process, None
        if process is not None:
            process.clear(_CLEARED_S)

    def launch(self) -> LaunchFacts:
        """Start it, and conduct it to its end."""
        attempt, environment = self._attempt, self._environment
        program, file = attempt.file.job.program, attempt.file
        folder = file.folder
        hub = Hub(
            world_size=0,
            interface_address=preferred_address(file.socket_interface, file.host_suffix),
        )
        hub.start()
        try:
            self._kill_leftovers()
            nodes = () if environment is None else environment.nodes
            attempt.next_launch(hub, nodes)
            state = attempt.state()
            before = sum(len(each.launches) for each in state.attempts) - 1
            newest_file = self._newest(state.plan)
            latest = None if newest_file is None else str(newest_file.path)
            command, latest = self._command(max(before, 0), latest)
            knobs = Knobs(
                channel=hub.addresses,
                nonce=hub.credentials.nonce,
                secret=hub.credentials.secret,
                attempt=attempt.claim.attempt,
                launch=attempt.launch,
                started=time.time(),
                run=str(attempt.run.path),
                latest=latest,
                restarts=max(before, 0),
            )
            variables = for_command(
                file,
                self._variables,
                state.plan,
                master=master_address(
                    file,
                    nodes[0] if nodes else None,
                    this_node=None if environment is None else environment.node_name,
                ),
                interfaces=interfaces(),
            )
            if by_torchrun(file) and environment is not None:
                variables = self._meeting(variables, hub, environment)
            variables.update(knobs.to_environ())
            variables = into_container(command, file, state.plan, variables)
            if program.metric_pattern or program.step_pattern:
                # What Python keeps back for a pipe would be read minutes later.
                variables.setdefault("PYTHONUNBUFFERED", "1")
            checkpoints = CheckpointWatch(program, folder, state.plan)
            there = None
            with contextlib.suppress(OSError):
                there = sample_progress(program, folder)
            process = self._process = ProgramProcess(
                command,
                variables,
                program,
                mark=f"SLURM_FORGE_NONCE={hub.credentials.nonce}",
                slurm=self._slurm,
                job="" if environment is None else environment.job_ref,
                folder=str(folder) if folder.is_dir() else None,
            )
            end = None
            if environment is not None:
                end = environment.end_time or planned_end(file.job, state)
            times = timing(
                file.job,
                self._job_poller.latest,
                state=state,
                now=time.time(),
                end=end,
                kill_wait=self._kill_wait(),
                usual_save=file.usual_save,
            )
            conductor = ProgramConductor(
                hub,
                journal=attempt.journal,
                job_poller=self._job_poller,
                timing=times,
                program=program,
                how=forwarding(program, command),
                process=process,
                progress=ProgressWatch(
                    program, folder, state, lambda: process.metrics, there, checkpoints
                ),
                metrics=MetricJournal(
                    time.monotonic(),
                    None if newest_file is None else newest_file.number,
                    None if newest_file is None else newest_file.path.name,
                ),
                most_non_finite=max(1, skips_allowed(file.job.recovery, Cause.NON_FINITE)),
                only_warns=attempt.only_warns,
                folder=folder,
                stop_file=attempt.run.stop_file,
                save_file=attempt.run.save_file,
                sentinel=self._sentinel,
                restart_count=None if environment is None else environment.restart_count,
                fence=attempt.fence,
            )
            with self._signals.go_to(conductor.stops):
                return conductor.watch()
        except ConfigError as error:
            text = error.message.replace("\n", " ")
            now = datetime.now(timezone.utc)
            return LaunchFacts(
                now=now, exit_status=_NOT_STARTED, launcher="exec", launcher_text=text
            )
        except BaseException:
            self.clear()  # before anything is journalled: a newer attempt may own the run
            raise
        finally:
            # Else a rank of ours would take the end of the channel for that of its conductor.
            hub.abort("the launch is over")
            hub.close()

    def _meeting(
        self, variables: dict[str, str], hub: Hub, environment: SlurmEnvironment
    ) -> dict[str, str]:
        """Where torchrun's agents of this start meet."""
        file, first = self._attempt.file, (environment.nodes or ("",))[0]
        here = first in ("", environment.node_name)
        master = master_address(file, first or None, this_node=environment.node_name)
        if master is None:
            master = usable_hosts(parse_addresses(hub.addresses)[0])[0] if here else first
        port = meeting_port(environment.job_id, self._attempt.launch, here=here)
        return for_torchrun(variables, file, master=master, port=port)

    def _kill_leftovers(self) -> None:
        """Of a start whose exec was killed: two of them would write to the same files."""
        with contextlib.suppress(OSError):
            self._attempt.fence()
        mark = mark_of_run(str(self._attempt.run.path))
        until, killed_pids = time.monotonic() + _CLEARED_S, set[int]()
        while (leftovers := read_marked(mark)) and time.monotonic() < until:
            for pid in leftovers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            killed_pids.update(leftovers)
            time.sleep(_TICK_S)
        if killed_pids:
            text = (
                "ended processes that an earlier start had left running: "
                f"{len(killed_pids)} processes"
            )
            with contextlib.suppress(OSError):
                self._attempt.journal.write(Note(text=text))

    def _newest(self, plan: RecoveryPlan) -> ProgressFile | None:
        """The checkpoint that a start may resume from."""
        file = self._attempt.file
        with contextlib.suppress(OSError):
            return next(iter(resumable(file.job.program, file.folder, plan)), None)
        return None

    def _command(self, before: int, latest: str | None) -> tuple[tuple[str, ...], str | None]:
        """The words of this start, and the checkpoint that it may resume from."""
        attempt, job = self._attempt, self._attempt.file.job
        program = job.program
        command = self._words or job.command or ()
        template = program.resume_arg
        if template is None or before == 0:
            return command, latest
        if latest is None and Placeholder.LATEST in fields_of(template):
            return command, None
        values = {
            Placeholder.LATEST: latest or "",
            Placeholder.ATTEMPT: str(attempt.claim.attempt),
            Placeholder.LAUNCH: str(attempt.launch),
            Placeholder.RESTARTS: str(before),
            Placeholder.RUN_DIR: str(attempt.run.path),
        }
        added = fill(template, values)
        with contextlib.suppress(OSError):
            attempt.journal.write(Note(text=f"started again with {' '.join(added)}"[:400]))
        return (*command, *added), latest
