"""The life of one rank: meet the others, call the user's function, send last words."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from slurm_forge.control.interfaces import preferred_address
from slurm_forge.device.accelerator import choose_device
from slurm_forge.integrations.trackers import tracker_variables
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Note
from slurm_forge.json_codec import parse
from slurm_forge.knobs import process_environ
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.recovery import trusts_process
from slurm_forge.spec.run_file import RunFile
from slurm_forge.training.core.rank_info import RankPlace
from slurm_forge.training.core.rank_variables import take_on_plan
from slurm_forge.training.monitor.client import MonitorClient
from slurm_forge.training.rank.error_file import (
    last_words_of,
    leave_behind,
)
from slurm_forge.training.rank.in_process_relaunch import (
    Channel,
    LaunchOver,
    PersistentWorkerState,
    Unwinding,
)
from slurm_forge.training.rank.preload import no_collections
from slurm_forge.vocabulary.cause import Cause

_MEET_WITHIN = timedelta(minutes=10)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
#: Of a probe's group, so that torch's own watchdog never precedes our verdict.
_PROBE_DEADLINES = 20


class RankOutcome(str, Enum):
    """How the user's function ended on a rank."""

    FINISHED = "finished"
    STOPPED = "stopped"
    GIVEN_UP = "given_up"
    FAILED = "failed"
    #: Out of a launch that is over, and usable for another one in this process.
    UNWOUND = "unwound"


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome and the number of optimizer steps done."""

    outcome: RankOutcome
    step: int


class Rank:
    """The steps of a rank's life, with what its last words need."""

    def __init__(
        self,
        directory: RunDirectory,
        place: RankPlace,
        file: RunFile,
        member: Channel,
        nonce: str,
        launch_started: float,
        persistent: PersistentWorkerState | None = None,
        unwinding: Unwinding | None = None,
    ) -> None:
        self._persistent = persistent
        self._unwinding = unwinding
        #: The observer of a rank whose own script ends it (``leave``).
        self.monitor_client: MonitorClient | None = None
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
        """Train, and leave the channel after the last words."""
        try:
            if self._unwinding is None:
                return self._train()
            result: Result = self._unwinding.run(self._train)
            return result
        except LaunchOver:
            return Result(RankOutcome.UNWOUND, 0)
        finally:
            if self._run is not None:
                self._run.leave()
            if self._journal is not None:
                self._journal.close()
            self._member.close()

    def may_go_on(self, result: Result) -> bool:
        """Whether this process may be a rank of the next launch, by its end and by policy."""
        if result.outcome is RankOutcome.FAILED:
            cause, policy = self._failed_of, self._file.job.recovery
            if cause is Cause.NCCL_ERROR:  # it only lost another rank
                return trusts_process(policy)
            return cause is not None and trusts_process(policy, cause)
        return result.outcome in (RankOutcome.UNWOUND, RankOutcome.GIVEN_UP)

    @property
    def _is_over(self) -> bool:
        return self._unwinding is not None and self._unwinding.has_started

    def _train(self) -> Result:
        # Everything below may import torch; the three unwinding classes live beside it.
        try:
            run = self._prepare()
        except Exception as error:
            if self._is_over:
                raise
            self._last_words(error)
            return Result(RankOutcome.FAILED, 0)
        from slurm_forge.training.core.entry import call_entry

        def work() -> int:
            assert self._entry is not None  # noqa: S101  loaded above
            call_entry(self._entry, run, run.args)
            return int(run.finish())

        return self._outcome(work)

    def begin(self) -> Any:
        """For a script with its own entry point: the run to train with; raises after last words."""
        try:
            return self._prepare()
        except Exception as error:
            self._last_words(error)
            self._close()
            raise

    def leave(self, error: BaseException | None) -> Result:
        """The script's own part is over, with ``error`` if there was one."""

        def work() -> int:
            if error is not None:
                raise error
            return int(self._run.finish())

        try:
            return self._outcome(work)
        finally:
            self._close()

    def _close(self) -> None:
        if self._run is not None:
            self._run.leave()
        if self.monitor_client is not None:
            self.monitor_client.end()
        if self._journal is not None:
            self._journal.close()
        self._member.close()

    def _outcome(self, work: Callable[[], int]) -> Result:
        from slurm_forge.training.core.step_boundary import RunStopped
        from slurm_forge.training.instability.skip_tracker import LaunchGivenUp

        run = self._run
        try:
            return Result(RankOutcome.FINISHED, work())
        except RunStopped:
            return Result(RankOutcome.STOPPED, run.step_number)
        except LaunchGivenUp:
            return Result(RankOutcome.GIVEN_UP, run.step_number)
        except LaunchOver:
            raise
        except BaseException as error:  # SystemExit and CheckpointException are not Exceptions
            if self._is_over:
                raise
            run.wait_for_save()  # last words end the other ranks, and their part of a save
            self._last_words(error)
            return Result(RankOutcome.FAILED, run.step_number)

    def _prepare(self) -> Any:
        with no_collections():
            import torch

            from slurm_forge.control.brief import BRIEF_KEY, LaunchBrief
            from slurm_forge.torch_versions import resolve_vector_functions
            from slurm_forge.training.core import rng
            from slurm_forge.training.core.memory_snapshot import record_memory_history
            from slurm_forge.training.core.process_group import (
                join,
                refuse_another,
            )
            from slurm_forge.training.core.rank_info import RankContext
            from slurm_forge.training.loop.run import Run
            from slurm_forge.training.preflight.main import (
                Preflight,
                requirements_of_run,
            )

        resolve_vector_functions()
        imported = time.time()
        member, place, spec = self._member, self._place, self._file.job
        brief = parse(LaunchBrief, member.published(BRIEF_KEY, _MEET_WITHIN.total_seconds()))
        self._brief = brief
        refuse_another(place.rank, place.world_size)  # before waiting for others
        take_on_plan(self._file, brief.plan)  # used when groups are created, below
        requirements = requirements_of_run(
            self._directory,
            self._file,
            place,
            attempt=brief.attempt,
            launch=brief.launch,
            thoroughness=brief.preflight,
            on_hang=bool(brief.plan.variables),
        )
        own_address = preferred_address(self._file.socket_interface, self._file.host_suffix)
        # Before this process uses a GPU: its forks could use none any more.
        Preflight(
            member,
            place,
            requirements,
            nonce=self._nonce,
            environ=process_environ(),
            within=spec.preflight.within,
            own_address=own_address,
        ).run()
        device = choose_device(place.local_rank)
        if device.type == "cpu" and "OMP_NUM_THREADS" not in self._variables:
            # Ranks that share a node's cores slow each other down by more than they gain; and a
            # fixed number keeps the order of additions, hence every bit, the same.
            torch.set_num_threads(spec.resources.cpus_per_task or 1)
        if spec.memory_snapshot:
            record_memory_history(device)
        groups = join(
            member,
            rank=place.rank,
            world_size=place.world_size,
            nonce=self._nonce,
            device=device,
            wait=_MEET_WITHIN,
            collective_timeout=_COLLECTIVE_TIMEOUT,
            own_address=own_address,
            one_node=place.one_node,
            probe_timeout=max(_COLLECTIVE_TIMEOUT, _PROBE_DEADLINES * spec.probe.deadline),
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
            fallback=self._file.fallback,
            earlier_fallbacks=self._file.earlier_fallbacks,
            code=None if self._file.code is None else self._file.code.revision,
            changes=self._file.changes,
        )
        if place.rank == 0:  # a tracker must get messages from one rank only
            first = (brief.attempt, brief.launch) == (1, 1)
            os.environ.update(
                tracker_variables(
                    name=spec.name,
                    directory=self._directory.path,
                    step=brief.resume_step,
                    first=first,
                    environment=self._variables,
                )
            )
        # The same on all ranks, so that they build the same model; the program may reseed.
        rng.derive(spec.seed, 0, 0)
        entry = None if self._persistent is None else self._persistent.entry
        if entry is None and spec.entry is not None:  # a script is its own entry point
            entry = self._load(spec.entry, journal)
        self._entry = entry
        if self._persistent is not None:
            self._persistent.entry = entry
        self._run = Run(
            context,
            device=device,
            groups=groups,
            member=member,
            journal=journal,
            timings=lambda: (imported - self._launch_started, met - imported),
        )
        return self._run

    def _load(self, name: str, journal: JournalWriter | None) -> Callable[[Any], Any]:
        from slurm_forge.training.core.entry import load_entry, use_snapshot

        code, folder = self._file.code, self._file.folder
        if code is None:
            return load_entry(name, folder)
        snapshot = self._directory.code_pool / code.digest
        name, folder = use_snapshot(name, snapshot, root=Path(code.root), folder=folder)
        entry = load_entry(name, folder)
        place = Path(sys.modules[entry.__module__].__file__ or snapshot).resolve()
        if journal is not None and not place.is_relative_to(snapshot.resolve()):
            text = f"the entry is imported from {place}, not from the snapshot of the code"
            journal.write(Note(text=text))
        return entry

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
            with contextlib.suppress(Exception):  # the last words are more important
                self._account_for_memory(error)
        self._member.send(words)
        if self._member.mute:
            brief_words = self._brief
            attempt, launch = (
                (0, 0) if brief_words is None else (brief_words.attempt, brief_words.launch)
            )
            leave_behind(
                self._directory,
                words,
                rank=self._place.rank,
                host=self._place.host,
                attempt=attempt,
                launch=launch,
            )

    def _account_for_memory(self, error: BaseException) -> None:
        """Record where the memory went, for a person; takes two seconds at most."""
        from slurm_forge.training.core.memory_report import (
            RankInfo,
            write_account,
        )
        from slurm_forge.training.core.memory_snapshot import write_memory_snapshot

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
        if self._file.job.memory_snapshot:
            file = self._directory.memory_snapshot(run.attempt, run.launch, place.rank)
            write_memory_snapshot(file, run.device)
