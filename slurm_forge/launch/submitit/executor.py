"""``submitit.AutoExecutor(folder, cluster="forge")``: submitit's Slurm executor with a supervisor.

Takes every parameter of submitit's own Slurm executor, as ``forge_*`` and under the ``slurm_*``
names that existing code has (``slurm_aliases``).  What is submitted is a ``ForgeJob``,
a training function, or any callable that submitit takes (a Checkpointable, say); for the last
two a run directory is made under ``<folder>/runs``.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor

from slurm_forge.errors import SubmissionError
from slurm_forge.files import make_private_directory, write_atomic
from slurm_forge.journal.events import Submitted, UserAsked
from slurm_forge.launch.render.batch_script import start_file
from slurm_forge.launch.render.site_choice import find_site, site_places
from slurm_forge.launch.submit.importing import (
    module_of,
    modules_beside_script,
    path_of_job,
    refuse_not_importable,
)
from slurm_forge.launch.submit.submission import (
    create_run,
    entry_of,
    job_script,
    keep_payload,
    keep_start_file,
    keep_successor,
    note,
    payload,
)
from slurm_forge.launch.submitit.batch_script import (
    Array,
    Successor,
    batch_script,
    directives,
)
from slurm_forge.launch.submitit.calls import training_call
from slurm_forge.launch.submitit.handle import RunHandle
from slurm_forge.launch.submitit.job import CALL_AGAIN, ForgeCall, ForgeJob
from slurm_forge.launch.submitit.slurm_aliases import accept_slurm_names
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.rules import refused
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file


@dataclass(frozen=True, slots=True)
class _Room:
    """How many spare nodes a job has, and whether it goes on without a node that it loses."""

    spares: int = 0
    outlives_nodes: bool = False


class ForgeExecutor(SlurmExecutor):
    """A submitit executor whose jobs are brought back by a supervisor in the batch step."""

    job_class = RunHandle

    def __init__(self, folder: str | Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(folder, *args, **kwargs)
        if "\\" in str(self.folder):
            raise SubmissionError(
                f"Slurm leaves backslashes out of the paths of logs: {self.folder}",
                next_step="Give a folder without one in its path.",
            )
        if not str(self.folder).isprintable():
            raise SubmissionError(
                f"a folder of logs can't be {str(self.folder)!r}",
                next_step="Give a folder whose path is one line of printable text.",
            )
        # Submitit's pickles are executed by whoever starts the job: nobody else may write there.
        make_private_directory(utils.JobPaths.get_first_id_independent_folder(self.folder))

    @classmethod
    def affinity(cls) -> int:
        """Never chosen unasked where submitit's own Slurm executor is available (that is 2)."""
        return -1 if shutil.which("srun") is None else 1

    #: Spare nodes of the runs that are made here.
    _spare_nodes: int | None = None

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        """Submitit's, and ``forge_spare_nodes``: nodes beyond those of the ranks."""
        return {*super()._valid_parameters(), "spare_nodes"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if "spare_nodes" in kwargs:
            self._spare_nodes = kwargs.pop("spare_nodes")
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        runs = [self._as_run(delayed) for delayed in delayed_submissions]
        self._room = self._room_of(runs)
        self._calls = _all_or_none(delayed_submissions)
        for run, delayed in zip(runs, delayed_submissions, strict=True):
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            keep_payload(run, delayed.dump)
            keep_start_file(run.submissions, str(start_file(run.submissions)))
            note(run, UserAsked(verb="submit", user=person()))
        jobs = (
            [self._submit_one(delayed_submissions[0], runs[0])]
            if len(runs) == 1
            else self._submit_array(delayed_submissions, runs)
        )
        for run, job in zip(runs, jobs, strict=True):
            keep_successor(run, self._successor(run, job))
            note(run, Submitted(job=job.job_id, via="submitit forge"))
        return jobs

    def prepare(
        self, function: Callable[..., Any], args: Sequence[Any], run: RunDirectory | None = None
    ) -> tuple[utils.DelayedSubmission, RunDirectory]:
        """A call that is ready to be submitted, and its run: made here, unless ``run`` is given."""
        if run is None:
            delayed = utils.DelayedSubmission(function, *args)
        elif read_run_file(run.spec_file).job.command is None:
            delayed = utils.DelayedSubmission(ForgeJob(str(run.path)))
        else:
            delayed = utils.DelayedSubmission(ForgeCall(str(run.path), function), *args)
        return delayed, self._as_run(delayed)

    def submit_prepared(
        self, submissions: list[utils.DelayedSubmission], announce: Callable[[Path], None]
    ) -> list[RunHandle]:
        """The jobs of prepared calls; ``announce`` is given the script just before Slurm is."""
        self._announce = announce
        try:
            jobs: list[Any] = self._internal_process_submissions(submissions)
        finally:
            self._announce = None
        return jobs

    #: Of a submission under way.
    _announce: Callable[[Path], None] | None = None

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        if self._announce is not None:
            self._announce(submission_file_path)
        command: list[str] = super()._make_submission_command(submission_file_path)
        return command

    def complete(self, run: RunDirectory, job: RunHandle) -> None:
        """Write what is missing of a submission whose process was killed after sbatch."""
        pickle = job.paths.submitted_pickle
        if payload(run).is_file() and not pickle.exists():
            make_private_directory(pickle.parent)
            write_atomic(pickle, payload(run).read_bytes())
        if not job_script(run).is_file():
            self._room = self._room_of([run])
            self._calls = read_run_file(run.spec_file).job.command is not None
            keep_successor(run, self._successor(run, job))

    def _as_run(self, delayed: utils.DelayedSubmission) -> RunDirectory:
        """Exchange what was submitted for a pointer to a run, made here unless it is one."""
        function = delayed.function
        if isinstance(function, ForgeCall):
            return RunDirectory.existing(function.run)
        if isinstance(function, ForgeJob):
            run = RunDirectory.existing(function.run)
            spares = read_run_file(run.spec_file).job.resources.spare_nodes
            if self._spare_nodes not in (None, spares):
                raise SubmissionError(
                    f"the run {run.name} was made with {spares or 'no'} spare nodes, and "
                    f"forge_spare_nodes={self._spare_nodes} asks for another number",
                    next_step="Leave forge_spare_nodes out; a run keeps what it was made with.",
                )
            # The job may start in another folder than this process is in.
            delayed.function = ForgeJob(str(run.path))
            return run
        training = training_call(function, delayed.args, delayed.kwargs)
        if training is None:
            self._refuse_not_importable(function, travels_whole=True)
        else:
            self._refuse_not_importable(training.function)
        if training is None:
            job = {
                "command": [sys.executable, "-u", "-m", "submitit.core._submit", str(self.folder)],
                "program": {"convention": "submitit", "requeue_exit_code": CALL_AGAIN},
            }
            run = self._new_run(_name_of(function), job)
            delayed.function = ForgeCall(str(run.path), function)
            return run
        entry = entry_of(training.function)
        run = self._new_run(entry.rpartition(":")[2], {"entry": entry, "args": training.arguments})
        delayed.function, delayed.args, delayed.kwargs = ForgeJob(str(run.path)), (), {}
        return run

    def _refuse_not_importable(
        self, function: Callable[..., Any], *, travels_whole: bool = False
    ) -> None:
        module = module_of(function)
        needed = [] if module is None else [module]
        if travels_whole:
            needed += modules_beside_script(function)
        if self._path_of_job is None:
            self._path_of_job = path_of_job(Path.cwd())
        for each in needed:
            refuse_not_importable(each, self._path_of_job, Path.cwd())

    #: Where the jobs that are submitted here look for modules.
    _path_of_job: tuple[str, ...] | None = None

    def _new_run(self, usual_name: str, what: dict[str, Any]) -> RunDirectory:
        parameters = self.parameters
        base = folder_name(str(parameters.get("job_name", usual_name)), "run")
        job = job_from_mapping(
            {
                "name": f"{base}-{secrets.token_hex(3)}",
                **what,
                "resources": {
                    "nodes": int(parameters.get("nodes", 1)),
                    "spare_nodes": self._spare_nodes,
                    "tasks_per_node": int(parameters.get("ntasks_per_node") or 1),
                    # What a job that comes back is to leave out is added to these.
                    "exclude": parameters.get("exclude"),
                    "nodelist": parameters.get("nodelist"),
                },
            }
        )
        run, _ = create_run(
            job,
            runs=self.runs_folder,
            site=self._site(),
            submitted_from=Path.cwd(),
            python=sys.executable,
            partition=parameters.get("partition"),
            qos=parameters.get("qos"),
            site_file=site_places().named_file(None),
        )
        return run

    @property
    def runs_folder(self) -> Path:
        """The folder of the runs that are made here."""
        return Path(utils.JobPaths.get_first_id_independent_folder(self.folder)) / "runs"

    def _site(self) -> Site:
        """Asked for once: an array has many runs."""
        if self._own_site is None:
            self._own_site = find_site(slurm=SubprocessSlurm.of_this_process())
        return self._own_site

    _own_site: Site | None = None

    @staticmethod
    def _room_of(runs: list[RunDirectory]) -> _Room:
        """What one job, or each task of an array, has to ask for."""
        jobs = [read_run_file(run.spec_file).job for run in runs]
        rooms = {_Room(job.resources.spares, job.outlives_nodes) for job in jobs}
        if len(rooms) > 1:
            raise SubmissionError(
                "runs with and without spare nodes can't be tasks of one array",
                next_step="Submit those with spare_nodes (or fewer_nodes) apart from the others.",
            )
        return rooms.pop()

    def _submit_one(self, delayed: utils.DelayedSubmission, run: RunDirectory) -> core.Job[Any]:
        self._subject = run.path
        return super()._internal_process_submissions([delayed])[0]

    def _submit_array(
        self, delayed_submissions: list[utils.DelayedSubmission], runs: list[RunDirectory]
    ) -> list[core.Job[Any]]:
        """One array job; which task is which run stands in files beside the pickles."""
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        name = f"array-{uuid.uuid4().hex}"
        index, folders = folder / f"{name}.json", folder / f"{name}.txt"
        write_atomic(index, json.dumps([str(run.path) for run in runs]).encode())
        write_atomic(folders, "".join(f"{run.submissions}\n" for run in runs).encode())
        pickles = []
        for delayed in delayed_submissions:
            path = folder / f"{uuid.uuid4().hex}.pkl"
            delayed.dump(path)
            pickles.append(path)
        self._subject = Array(index, folders, len(runs))
        self._throttle()
        first: core.Job[Any] = self._submit_command(self._submitit_command_str)
        tasks = list(range(first.num_tasks))
        jobs: list[core.Job[Any]] = [
            self.job_class(folder=self.folder, job_id=f"{first.job_id}_{task}", tasks=tasks)
            for task in range(len(runs))
        ]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _successor(self, run: RunDirectory, job: core.Job[Any]) -> str:
        """The script for when the job can't be started again: in its folder, for its run alone."""
        pickle = payload(run)
        subject = Successor(run.path, pickle, first=job.job_id, tasks=self._num_tasks())
        return self._script(subject, job.paths.folder)

    #: What the submission under way is for.
    _subject: Path | Array | None = None
    _room = _Room()
    _calls = False

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """Submitit's script, with the supervisor in the place of srun."""
        if self._subject is None:
            raise TypeError("only submit, batch and map_array make scripts")
        return self._script(self._subject, self.folder)

    def _script(self, subject: Path | Array | Successor, folder: Path) -> str:
        text = batch_script(
            subject,
            folder,
            self.python,
            self.parameters,
            spares=self._room.spares,
            outlives_nodes=self._room.outlives_nodes,
            calls=self._calls,
        )
        # A run that was made elsewhere has been looked at there.
        refusal = None if self._own_site is None else refused(directives(text), self._own_site)
        if refusal is not None:
            raise SubmissionError(refusal.message, next_step=refusal.advice)
        return text


def folder_name(name: str, usual: str) -> str:
    """A name of Slurm jobs, which may hold what names of folders can't."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:48] or usual


def _name_of(function: Callable[..., Any]) -> str:
    """What a run of it is called where the executor has no name for its jobs."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _all_or_none(submissions: list[utils.DelayedSubmission]) -> bool:
    """Whether callables are submitted that know nothing of runs."""
    kinds = {isinstance(each.function, ForgeCall) for each in submissions}
    if len(kinds) > 1:
        raise SubmissionError(
            "functions that take a run and callables that don't can't be tasks of one array",
            next_step="Submit them in two batches.",
        )
    return kinds.pop()


accept_slurm_names()
