"""The process ``local_tasks FOLDER RUN DESCRIPTOR…``: the tasks of a job on this machine.

It is submitit's controller, except that it imports once what a rank needs, and forks the ranks: the
second rank of a node, and every rank that is started again, costs no interpreter and no import.
Ranks that can't be forked are started as submitit starts them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.local.local import Controller

from slurm_forge.errors import ForgeError
from slurm_forge.knobs import process_environ
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file

#: What a task imports besides; submitit's part imports numpy, which may start threads.
_MORE = ("submitit.core.submission", "slurm_forge.launch.submitit.job")


class _IsTask(BaseException):
    """Raised in a forked child: it leaves the controller's code and becomes the task."""


class _ForkedTask:
    """As much of a ``Popen`` as submitit's controller uses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """How it ended, as ``Popen`` tells it; None while it lives."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """Only while its process id is its own."""
        if self.poll() is None:
            os.kill(self._pid, number)


class TaskController(Controller):
    """Submitit's controller with tasks that are forked.

    Args:
        folder: Of submitit's files.
        run: What the tasks train.
        descriptors: Open here and of no use to a task, such as the lock of the run.
    """

    tasks: list[Any]  # of either kind

    def __init__(self, folder: Path, run: RunDirectory, descriptors: Sequence[int]) -> None:
        super().__init__(folder)
        self._run = run
        self._descriptors = descriptors
        self._preload: Any = importlib.import_module("slurm_forge.training.rank.preload")
        self._why_not: str | None = None

    def start_tasks(self) -> None:
        """Fork them; or have submitit start them, where what was imported forbids it."""
        if self._why_not is None:
            self._why_not = self._prepare()
        if self._why_not:
            sys.stderr.write(f"slurm_forge: ranks are not forked: {self._why_not}\n")
            super().start_tasks()
            return
        paths = [utils.JobPaths(self.folder, self.pid, k) for k in range(self.ntasks)]
        self.stdouts = [each.stdout.open("a") for each in paths]
        self.stderrs = [each.stderr.open("a") for each in paths]
        sys.stdout.flush()
        sys.stderr.flush()
        for number in range(self.ntasks):
            pid = os.fork()
            if pid == 0:
                self._become(number)
            self.tasks.append(_ForkedTask(pid))

    def _prepare(self) -> str:
        """Import what a rank needs; why this process must not be forked, else nothing."""
        variables = importlib.import_module("slurm_forge.training.core.rank_variables")
        # Torch reads some variables when it is imported.  What is wrong with the file a rank says.
        with contextlib.suppress(ForgeError, OSError):
            variables.take_on(read_run_file(self._run.spec_file), one_node=True)
        problem = self._preload.preload(process_environ(), _MORE)
        return problem or str(self._preload.why_not_forkable())

    def _become(self, number: int) -> None:
        """In the child: have what a process of its own would have, and leave the controller."""
        self.tasks = []  # they are the parent's to signal and to end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(self.stdouts[number].fileno(), 1)
        os.dup2(self.stderrs[number].fileno(), 2)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._preload.give_threads_back(process_environ())
        os.environ["SUBMITIT_LOCAL_LOCALID"] = os.environ["SUBMITIT_LOCAL_GLOBALID"] = str(number)
        os.environ["SUBMITIT_LOCAL_JOB_ID"] = self.pid
        raise _IsTask


def main() -> int:
    """Start the tasks, and again as often as they ask for it; in a task, be it."""
    folder, run, *descriptors = sys.argv[1:]
    try:
        TaskController(
            Path(folder), RunDirectory.at(run), [int(each) for each in descriptors]
        ).run()
    except _IsTask:
        from submitit.core.submission import process_job

        process_job(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
