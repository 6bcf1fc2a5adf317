"""The tasks of a job on this machine, and the process ``local_tasks RUN DESCRIPTOR…`` above them.

That process imports once what a rank needs and forks the ranks: the second rank of a node, and
every rank that is started again, costs no interpreter and no import.  What the tasks find in their
environment and where their output goes is as submitit's local executor has it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from slurm_forge.errors import ForgeError
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file

#: A job whose tasks are started so often has ended; the runner then starts another one.
_MOST_STARTS = 6
_JOB = "slurm_forge.launch.submitit.job"
#: In front of the run: be the task that the environment names.
_TASK = "--task"


# -- for the starter -------------------------------------------------------------------------------


def start_tasks(
    run: RunDirectory, *, ranks: int, stdin: int, inherited: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Start a job on this machine.

    Ctrl-C in a terminal and a hangup reach every process of the terminal's foreground group, and
    the ranks are to hear of it from their starter alone: they are in a session of their own.

    Args:
        run: What is trained.
        ranks: How many tasks the job has.
        stdin: What every process of the job reads.
        inherited: Descriptors that stay open in the process that watches over the tasks.

    Returns:
        The leader of the session; its process id is that of the job.
    """
    variables = {
        **process_environ(),
        **Knobs(lifeline=True).to_environ(),
        "SUBMITIT_LOCAL_NTASKS": str(ranks),
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_EXECUTOR": "local",
    }
    words = process_words("local_tasks", str(run.path), *map(str, inherited))
    return subprocess.Popen(
        [sys.executable, "-u", *words],
        env=variables,
        stdin=stdin,
        pass_fds=inherited,
        start_new_session=True,
    )


def is_over(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended.  It keeps its process id until it is waited for."""
    try:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:
        return True  # somebody else has waited for it


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End everything that is left in its process group, now.  Only before it is waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# -- above the tasks -------------------------------------------------------------------------------


class _Tasks:
    """Starts the tasks of one job, and again as often as they ask for it."""

    def __init__(self, run: RunDirectory, descriptors: Sequence[int]) -> None:
        self._run = run
        self._descriptors = descriptors
        self._alive: set[int] = set()
        self._preload: Any = importlib.import_module("slurm_forge.training.rank.preload")
        self._why_not = ""
        self._job = os.getpid()
        #: By a SIGTERM that came while there was no task that it could be passed on to.
        self._ended = False
        signal.signal(signal.SIGTERM, self._pass_on)

    def prepare(self) -> None:
        """Import what a rank needs; what can't be forked then is started anew."""
        variables = importlib.import_module("slurm_forge.training.core.rank_variables")
        before = process_environ()
        # Torch reads some variables when it is imported.  What is wrong with the file a rank says.
        with contextlib.suppress(ForgeError, OSError):
            variables.take_on(read_run_file(self._run.spec_file), one_node=True)
        self._why_not = self._preload.preload(process_environ(), (_JOB,))
        # Every start reads the file anew: what was changed meanwhile must not be found set.
        os.environ.clear()
        os.environ.update(before)
        self._why_not = self._why_not or self._preload.why_not_forkable()
        if self._why_not:
            sys.stderr.write(f"slurm_forge: ranks can't be forked: {self._why_not}\n")

    def supervise(self, ranks: int) -> bool:
        """Until no task asks to be started again; whether this is a task now, in a child."""
        for _ in range(_MOST_STARTS):
            for number in range(ranks):
                if self._ended:
                    break
                pid = os.fork()
                if pid == 0:
                    self._become(number)
                    return True
                self._alive.add(pid)
            if importlib.import_module(_JOB).START_AGAIN not in self._ends():
                break
        return False

    def _ends(self) -> list[int]:
        """How the tasks ended, when all have."""
        codes = []
        while self._alive:
            pid, status = os.wait()
            self._alive.discard(pid)
            codes.append(os.waitstatus_to_exitcode(status))
        return codes

    def _become(self, number: int) -> None:
        """In the child: have what a process of its own would have."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._alive = set()  # they are the parent's
        for stream, ending in ((1, "out"), (2, "err")):
            path = self._run.submissions / f"{self._job}_{number}_log.{ending}"
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(descriptor, stream)
            os.close(descriptor)
        for descriptor in self._descriptors:
            os.close(descriptor)
        os.environ["SUBMITIT_LOCAL_LOCALID"] = os.environ["SUBMITIT_LOCAL_GLOBALID"] = str(number)
        os.environ["SUBMITIT_LOCAL_JOB_ID"] = str(self._job)
        if self._why_not:
            words = process_words("local_tasks", _TASK, str(self._run.path))
            os.execve(sys.executable, [sys.executable, "-u", *words], process_environ())  # noqa: S606
        self._preload.give_threads_back(process_environ())

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self._ended = self._ended or not self._alive
        for pid in self._alive:  # what was not waited for keeps its process id
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def main() -> int:
    """Be the process above the tasks, and in a child the task."""
    first, *rest = sys.argv[1:]
    if first == _TASK:
        (path,) = rest
    else:
        path = first
        tasks = _Tasks(RunDirectory.at(path), [int(each) for each in rest])
        tasks.prepare()
        if not tasks.supervise(int(process_environ()["SUBMITIT_LOCAL_NTASKS"])):
            return 0
    importlib.import_module(_JOB).ForgeJob(path)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
