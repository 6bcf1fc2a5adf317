"""One rank: meet the others, run the user's function, send last words.

Reached by name only (the process ``worker RUN``), and through
``slurm_forge.launch.submitit.job`` inside a submitit task.  Imports no torch before the signal
handlers are installed: a notice during the imports must not end the process.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import Credentials
from slurm_forge.descendants import die_with_parent
from slurm_forge.errors import ForgeError
from slurm_forge.knobs import KNOBS, Knobs, process_environ
from slurm_forge.open_files import raise_open_files_limit
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.recovery import trusts_process
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.training.core.rank_info import (
    RankPlace,
    place_from_environ,
    place_of_script,
)
from slurm_forge.training.core.rank_variables import outlive_peers, take_on, take_on_place
from slurm_forge.training.monitor.client import (
    MonitorClient,
    prepare_monitor,
)
from slurm_forge.training.rank.error_file import (
    last_words_of,
    leave_behind,
)
from slurm_forge.training.rank.exit import (
    RankExit,
    show_crashes,
)
from slurm_forge.training.rank.in_process_relaunch import (
    Channel,
    Notices,
    ParkingPlace,
    PersistentWorkerState,
    Unwinding,
    can_unwind,
)
from slurm_forge.training.rank.rank import (
    Rank,
    RankOutcome,
    Result,
)

__all__ = [
    "RankOutcome",
    "RankPlace",
    "Result",
    "main",
    "open_rank",
    "place_from_environ",
    "place_of_script",
    "run_rank",
]


def run_rank(
    directory: RunDirectory,
    place: RankPlace,
    *,
    channel: str,
    credentials: Credentials,
    launch_started: float | None = None,
    survives_abort: bool = False,
    persistent: PersistentWorkerState | None = None,
    attempt: int | None = None,
) -> Result:
    """Train as one rank.  Returns for every outcome, last words included; the caller exits.

    ``survives_abort`` is for the rank that hosts the conductor itself, of that ``attempt``;
    ``persistent`` is for a process that may be the rank of several launches.
    """
    opened = _open(
        directory,
        place,
        channel=channel,
        credentials=credentials,
        launch_started=launch_started,
        survives_abort=survives_abort,
        persistent=persistent,
        attempt=attempt,
    )
    rank, unwinding, leaving = opened.rank, opened.unwinding, opened.leaving
    notices, monitor_client = opened.notices, opened.monitor_client
    del opened
    try:
        result = rank.train()
    finally:
        if monitor_client is not None:
            monitor_client.end()
    if unwinding is None or not rank.may_go_on(result):
        return result
    notices.say_through(None)
    # This releases the rest of the launch: models, process groups, loader workers.
    del rank
    problem = unwinding.clear()
    if problem:
        leaving(f"it can't continue in its process: {problem}")
    unwinding.over()
    return Result(RankOutcome.UNWOUND, result.step)


def open_rank(
    directory: RunDirectory,
    place: RankPlace,
    *,
    channel: str,
    credentials: Credentials,
    launch_started: float | None = None,
    survives_abort: bool = False,
    attempt: int | None = None,
    keys: Mapping[str, Any] | None = None,
) -> Rank:
    """A rank that has joined the channel, for a script with its own entry point (``attach``).

    ``keys`` are job keys that the script sets differently from the run.
    """
    opened = _open(
        directory,
        place,
        channel=channel,
        credentials=credentials,
        launch_started=launch_started,
        survives_abort=survives_abort,
        attempt=attempt,
        keys=keys,
    )
    opened.rank.monitor_client = opened.monitor_client
    return opened.rank


@dataclass(frozen=True, slots=True)
class _Opened:
    """A rank on the channel, and the resources of its process."""

    rank: Rank
    notices: Notices
    leaving: RankExit
    unwinding: Unwinding | None
    monitor_client: MonitorClient | None


def _open(
    directory: RunDirectory,
    place: RankPlace,
    *,
    channel: str,
    credentials: Credentials,
    launch_started: float | None,
    survives_abort: bool,
    persistent: PersistentWorkerState | None = None,
    attempt: int | None = None,
    keys: Mapping[str, Any] | None = None,
) -> _Opened:
    started_at = time.time()
    knobs = Knobs.from_environ(process_environ())
    # Processes that the program starts, and trackers that record the environment, must not get it.
    os.environ.pop(KNOBS["secret"].name, None)
    raise_open_files_limit()
    show_crashes(knobs.attempt, knobs.launch)
    state = PersistentWorkerState() if persistent is None else persistent
    notices = state.notices
    monitor_client: MonitorClient | None = None
    try:
        file = read_run_file(directory.spec_file)
        if keys:
            file = file.model_copy(update={"job": file.job.model_copy(update=dict(keys))})
        take_on(file, one_node=place.one_node)
        take_on_place(place.rank, place.local_rank, place.world_size, one_node=place.one_node)
        watchdog = file.job.watchdog
        # A silent rank is examined with the probe, too.
        if watchdog.enabled or (file.job.probe.enabled and place.world_size > 1):
            monitor_client = prepare_monitor()
        if monitor_client is not None:
            monitor_client.start(
                directory,
                rank=place.rank,
                world_size=place.world_size,
                host=place.host,
                channel=channel,
                credentials=credentials,
                attempt=knobs.attempt if attempt is None else attempt,
                launch=knobs.launch or 1,
                alone_after=watchdog.at_most if watchdog.enabled and survives_abort else None,
            )
        hosts, port = parse_addresses(channel)
        leaving = RankExit(
            directory,
            rank=place.rank,
            in_slurm=bool(place.node),
            second=place.leads_second_node and file.job.outlives_nodes,
        )
        trusted = persistent is not None and trusts_process(file.job.recovery) and can_unwind()
        unwinding = Unwinding(leaving) if trusted else None
        if survives_abort or (trusted and watchdog.enabled):
            outlive_peers()
        member = Channel(
            rank=place.rank,
            world_size=place.world_size,
            credentials=credentials,
            hosts=hosts,
            port=port,
            host=place.host,
            pid=os.getpid(),
            on_abort=_stay if survives_abort else unwinding or leaving,
            progress=None if monitor_client is None else monitor_client.progress,
        )
    except Exception as error:
        words = last_words_of(error, step=0, phase="start", micro_batch=0)
        leave_behind(directory, words, rank=place.rank, host=place.host)
        raise
    notices.say_through(member)
    rank = Rank(
        directory,
        place,
        file,
        member,
        credentials.nonce,
        launch_started or started_at,
        state,
        unwinding,
    )
    return _Opened(rank, notices, leaving, unwinding, monitor_client)


def _stay(reason: str) -> None:
    del reason


def main(argv: list[str] | None = None, parking: ParkingPlace | None = None) -> NoReturn:
    """Entry point of the process ``worker RUN``, and of a forked worker.

    ``parking`` is where it may wait for another launch.
    """
    arguments = sys.argv[1:] if argv is None else argv
    knobs = Knobs.from_environ(os.environ)
    persistent = None
    code = 1
    try:
        if parking is not None:
            persistent = PersistentWorkerState()
        if len(arguments) != 1 or knobs.channel is None:
            raise ForgeError(
                "the worker is started by slurm_forge itself",
                next_step="Start a run with slurm-forge submit or slurm-forge run.",
            )
        place = place_from_environ(os.environ)
        if place.below_torchrun:
            die_with_parent(os.getppid())  # when the step ends, torchrun leaves its children behind
        while True:
            result = run_rank(
                RunDirectory.existing(arguments[0]),
                place,
                channel=knobs.channel or "",
                credentials=Credentials(knobs.nonce, knobs.secret),
                launch_started=knobs.started,
                persistent=persistent,
            )
            if parking is None or result.outcome is not RankOutcome.UNWOUND:
                break
            order = parking.wait()
            if order is None:
                break
            knobs = Knobs(
                channel=order.channel,
                nonce=order.nonce,
                secret=knobs.secret,
                attempt=order.attempt,
                launch=order.launch,
                started=order.started,
            )
            os.environ.update(knobs.to_environ())
        code = 1 if result.outcome is RankOutcome.FAILED else 0
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
