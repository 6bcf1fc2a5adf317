"""Submitit's local executor with our controller (``tasks``), in a session of its own.

Ctrl-C in a terminal and a hangup reach every process of the terminal's foreground group, and the
ranks are to hear of it from their starter alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import submitit
from submitit.local.local import LocalJob

from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory

#: Submitit ends a local job after this time; ours are ended by themselves.
_A_YEAR_MIN = 60 * 24 * 365


class LocalSession:
    """Starts local jobs.

    Args:
        run: What is trained; its ``submissions`` are the folder of submitit's files.
        ranks: How many tasks a job has.
        stdin: What every process of a job reads.
        inherited: Descriptors that stay open in the process that watches over the tasks.
    """

    def __init__(
        self, run: RunDirectory, *, ranks: int, stdin: int, inherited: tuple[int, ...]
    ) -> None:
        self._executor = _Executor(run, stdin, inherited)
        self._executor.update_parameters(tasks_per_node=ranks, timeout_min=_A_YEAR_MIN, nodes=1)

    def start(self, task: Callable[[], Any]) -> subprocess.Popen[bytes]:
        """The leader of a new session; submitit's job has its process id for a name."""
        self._executor.submit(task)
        return self._executor.started[-1]


class _Executor(submitit.LocalExecutor):
    def __init__(self, run: RunDirectory, stdin: int, inherited: tuple[int, ...]) -> None:
        super().__init__(run.submissions)
        self._run = run
        self.started: list[subprocess.Popen[bytes]] = []
        self._stdin = stdin
        self._inherited = inherited

    def _submit_command(self, command: str) -> LocalJob[Any]:
        ranks = self.parameters["tasks_per_node"]
        variables = {
            **process_environ(),
            **Knobs(lifeline=True).to_environ(),
            "SUBMITIT_LOCAL_NTASKS": str(ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        words = [str(self.folder), str(self._run.path), *map(str, self._inherited)]
        process = subprocess.Popen(
            [sys.executable, "-u", *process_words("local_tasks", *words)],
            env=variables,
            stdin=self._stdin,
            pass_fds=self._inherited,
            start_new_session=True,
        )
        self.started.append(process)
        tasks = list(range(ranks))
        return LocalJob(self.folder, job_id=str(process.pid), process=process, tasks=tasks)


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
