"""A launch as a job step: ``srun`` with one worker per task, its own output kept for evidence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path, PurePath
from typing import IO

from slurm_forge.recovery.incident.launch_facts import WorkerEnd
from slurm_forge.recovery.nodes.placement import Placement
from slurm_forge.signals import signal_name
from slurm_forge.slurm.text.nodelist import fold_nodes

_TAIL_LINES = 60


def srun_command(
    payload: Sequence[str],
    *,
    options: Sequence[str] = (),
    placement: Placement | None = None,
    hosts_file: Path | None = None,
    tasks: int | None = None,
    again: bool = False,
) -> tuple[str, ...]:
    """The argument list that starts every rank.

    ``--kill-on-bad-exit=1``: without it a dead rank leaves the others hanging (srun man page).
    ``placement`` are those of a launch that does not take all nodes of the job, which then has
    ``--no-kill``; ``--no-kill=off`` undoes it for the step, where it would disable the other option
    (man page).  ``hosts_file`` names the node of each rank, where Slurm's own order is another.
    ``tasks`` is for a job that came back on other nodes than its script asks for.  ``again``: a
    step of this job may not have gone, as far as Slurm knows (its daemon was killed), and must not
    be waited for.
    """
    overlap = ("--overlap",) if again else ()
    if placement is not None:
        number = _placement_options(placement, hosts_file)
    else:
        number = () if tasks is None else (f"--ntasks={tasks}",)
    return (
        "srun",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        *overlap,
        *number,
        *options,
        *payload,
    )


def takes_hosts_file(placement: Placement, words: Sequence[str]) -> bool:
    """Whether ranks must be placed one by one; not where somebody has said how to place them.

    ``words`` are srun's, with the command behind them: an interpreter's ``-m`` says no such thing.
    """
    own = takewhile(lambda word: not PurePath(word).name.startswith("python"), words)
    has_distribution = any(word.startswith(("--distribution", "-m")) for word in own)
    return not placement.in_order and not has_distribution


def _placement_options(placement: Placement, hosts_file: Path | None) -> tuple[str, ...]:
    several = (f"--nodes={len(placement.nodes)}", f"--ntasks={placement.tasks}", "--no-kill=off")
    if hosts_file is not None:
        # By "arbitrary" the file's lines are the ranks, whatever the order of the nodes.
        return (*several, f"--nodelist={hosts_file}", "--distribution=arbitrary")
    per_node = f"--ntasks-per-node={placement.tasks_per_node}"
    return (*several, per_node, f"--nodelist={fold_nodes(placement.nodes)}")


class StepProcess:
    """A running srun.  Its error output passes through to ours, the last lines are kept."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._killed = False
        # A session of its own: a signal for the batch step's process group is ours to interpret,
        # and srun would turn it into something else for the ranks.
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        assert self._process.stderr is not None  # noqa: S101  asked for above
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stderr,), name="forge-srun", daemon=True
        )
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._tail.append(line)
            os.write(2, line.encode(errors="replace"))

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._reader.join(timeout=1)
        return status

    def kill(self) -> None:
        """End the step: srun passes SIGTERM on, SIGKILL ends srun and slurmstepd the tasks."""
        if self._process.poll() is None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself meanwhile
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Exit status once it has ended, None if it has not within the time."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def launcher_signal(self) -> str:
        """The signal that ended srun, empty where none did or ``kill`` sent it."""
        number = -(self._process.poll() or 0)
        return "" if self._killed or number <= 0 else signal_name(number)

    def ends(self) -> tuple[WorkerEnd, ...]:
        """Nothing: srun prints how its tasks end."""
        return ()

    def forget_tail(self) -> None:
        """Another launch begins on the same step: what was printed before says nothing of it."""
        self._tail.clear()

    def tail(self) -> str:
        """The last lines of its error output."""
        return "".join(self._tail)
