"""``submitit.AutoExecutor(folder, cluster="forge")``: submitit's Slurm executor with a supervisor.

Takes every parameter of submitit's own Slurm executor, as ``forge_*`` and under the ``slurm_*``
names that existing code has (``submitit_names`` sees to that).  What is submitted is a ``ForgeJob``
or a plain training function, for which a run directory is made under ``<folder>/runs``.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor

from slurm_forge.errors import SubmissionError
from slurm_forge.files import make_private_directory, write_atomic
from slurm_forge.journal.events import Submitted, UserAsked
from slurm_forge.launch.entry_check import require_arguments
from slurm_forge.launch.sites import find_site
from slurm_forge.launch.submission import create_run, entry_of, note
from slurm_forge.launch.submitit_job import ForgeJob
from slurm_forge.launch.submitit_names import accept_slurm_names
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.units import parse_slurm_duration

__all__ = ["ForgeExecutor"]

#: Below this limit Slurm's early warning would cost a large part of every attempt; the supervisor
#: watches the clock itself.
_SIGNAL_FROM = timedelta(minutes=10)


class ForgeExecutor(SlurmExecutor):
    """A submitit executor whose jobs are brought back by a supervisor in the batch step."""

    def __init__(self, folder: str | Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(folder, *args, **kwargs)
        if "\\" in str(self.folder):
            raise SubmissionError(
                f"Slurm leaves backslashes out of the paths of logs: {self.folder}",
                next_step="Give a folder without one in its path.",
            )
        # Submitit's pickles are executed by whoever starts the job: nobody else may write there.
        make_private_directory(utils.JobPaths.get_first_id_independent_folder(self.folder))

    @classmethod
    def affinity(cls) -> int:
        """Never chosen unasked where submitit's own Slurm executor is available (that is 2)."""
        return -1 if shutil.which("srun") is None else 1

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        runs = [self._as_run(delayed) for delayed in delayed_submissions]
        for run in runs:
            note(run, UserAsked(verb="submit", user=person()))
        jobs = (
            [self._submit_one(delayed_submissions[0], runs[0])]
            if len(runs) == 1
            else self._submit_array(delayed_submissions, runs)
        )
        for run, job in zip(runs, jobs, strict=True):
            note(run, Submitted(job=job.job_id, via="submitit forge"))
        return jobs

    def _as_run(self, delayed: utils.DelayedSubmission) -> RunDirectory:
        """Exchange what was submitted for a pointer to a run, made here unless it is one."""
        function = delayed.function
        if isinstance(function, ForgeJob):
            run = RunDirectory.existing(function.run)
            # The job may start in another folder than this process is in.
            delayed.function = ForgeJob(str(run.path))
            return run
        if delayed.args:
            raise SubmissionError(
                "a training function takes the run and nothing else by position",
                next_step="Give its arguments by name: executor.submit(train, max_steps=400).",
            )
        entry = entry_of(function)
        require_arguments(function, delayed.kwargs)
        parameters = self.parameters
        base = str(parameters.get("job_name", entry.rpartition(":")[2]))
        # Slurm takes names of jobs that can't be names of folders.
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-._")[:48] or "run"
        job = job_from_mapping(
            {
                "name": f"{base}-{secrets.token_hex(3)}",
                "entry": entry,
                "args": dict(delayed.kwargs),
                "resources": {
                    "nodes": int(parameters.get("nodes", 1)),
                    "tasks_per_node": int(parameters.get("ntasks_per_node") or 1),
                },
            }
        )
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        run, _ = create_run(
            job,
            runs=folder / "runs",
            site=find_site("generic"),
            submitted_from=Path.cwd(),
            python=sys.executable,
        )
        delayed.function, delayed.args, delayed.kwargs = ForgeJob(str(run.path)), (), {}
        return run

    def _submit_one(self, delayed: utils.DelayedSubmission, run: RunDirectory) -> core.Job[Any]:
        self._supervised = [str(run.path)]
        try:
            return super()._internal_process_submissions([delayed])[0]
        finally:
            self._supervised = []

    def _submit_array(
        self, delayed_submissions: list[utils.DelayedSubmission], runs: list[RunDirectory]
    ) -> list[core.Job[Any]]:
        """One array job; which task is which run stands in a file beside the pickles."""
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        index = folder / f"array-{uuid.uuid4().hex}.json"
        write_atomic(index, json.dumps([str(run.path) for run in runs]).encode())
        pickles = []
        for delayed in delayed_submissions:
            path = folder / f"{uuid.uuid4().hex}.pkl"
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            delayed.dump(path)
            pickles.append(path)
        self._supervised = ["--array", str(index)]
        self.parameters["map_count"] = len(runs)
        try:
            self._throttle()
            first: core.Job[Any] = self._submit_command(self._submitit_command_str)
        finally:
            del self.parameters["map_count"]
            self._supervised = []
        tasks = list(range(first.num_tasks))
        jobs: list[core.Job[Any]] = [
            self.job_class(folder=self.folder, job_id=f"{first.job_id}_{task}", tasks=tasks)
            for task in range(len(runs))
        ]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    #: What the supervisor of the submission under way is told to conduct.
    _supervised: list[str] = []  # noqa: RUF012  set per instance while a job is submitted

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """Submitit's script, with the supervisor in the place of srun."""
        parameters = dict(self.parameters)
        extra = dict(parameters.get("additional_parameters") or {})
        if not {"no_requeue", "no-requeue"} & set(extra):
            extra.setdefault("requeue", True)
        parameters["additional_parameters"] = extra
        _check_printable({**parameters, **extra})
        srun_args = list(parameters.pop("srun_args", None) or [])
        if not parameters.pop("use_srun", True):
            raise SubmissionError(
                "forge needs srun to start the ranks (use_srun=False was given)",
                next_step="Leave use_srun out; the function may still start what it likes.",
            )
        text = _script(_PAYLOAD, parameters, self.folder)
        supervisor = [self.python, "-m", "slurm_forge.launch.supervise"]
        supervisor += [shlex.quote(word) for word in self._supervised]
        supervisor += ["--via", shlex.quote("submitit forge"), "--"]
        supervisor += [shlex.quote(word) for word in self._step_options(srun_args)]
        # The payload is submitit's own: it loads the pickle, calls the pointer, stores the result.
        run = "exec " if not parameters.get("teardown") else ""
        payload = run + " ".join([*supervisor, command])
        lines = [
            payload if line == _PAYLOAD else line
            for line in text.split("\n")
            if "signal" in extra or self._warns() or not line.startswith("#SBATCH --signal=")
        ]
        return "\n".join(lines)

    def _warns(self) -> bool:
        limit = self.parameters.get("time", 5)
        try:
            # Submitit means minutes, and passes on whatever else Slurm understands.
            text = isinstance(limit, str)
            given = parse_slurm_duration(limit) if text else timedelta(minutes=limit)
        except ValueError as error:
            raise SubmissionError(
                f"time={limit!r} is no time limit ({error})",
                next_step='Give minutes as a number, or Slurm\'s own form: "1-12:00:00".',
            ) from error
        return given is None or given >= _SIGNAL_FROM

    def _step_options(self, srun_args: list[str]) -> list[str]:
        """Per-task logs where submitit looks for them."""
        paths = utils.JobPaths(folder=self.folder)
        out, err = str(paths.stdout), str(paths.stderr)
        if "map_count" in self.parameters:
            out, err = out.replace("%j", "%A_%a"), err.replace("%j", "%A_%a")
        errors = [] if self.parameters.get("stderr_to_stdout") else ["--error", err]
        return ["--open-mode=append", "--output", out, *errors, *srun_args]


#: A line of its own in submitit's script, to be exchanged for ours.
_PAYLOAD = ":slurm_forge payload"


def _check_printable(parameters: dict[str, Any]) -> None:
    """A line break would end the comment that an option is, and begin a command."""
    for name, value in parameters.items():
        if isinstance(value, str) and not value.isprintable():
            raise SubmissionError(
                f"{name}={value!r} can't be an sbatch option",
                next_step="Options are one line of printable text.",
            )


def _script(command: str, parameters: dict[str, Any], folder: Path | str) -> str:
    from submitit.slurm.slurm import _make_sbatch_string

    return str(_make_sbatch_string(command=command, folder=folder, use_srun=False, **parameters))


accept_slurm_names()
