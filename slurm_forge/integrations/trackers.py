"""Experiment trackers go on with the same run after every resume: W&B, MLflow, TensorBoard.

W&B takes an id from us: with ``resume="allow"`` it makes the run if there is none of that id and
continues it if there is (W&B, "Resume a run").  It comes from the run's first claim, so that it is
known before the first checkpoint, equal on every start, and another one for another run of the same
name in the same place.  MLflow makes its ids itself: the one it made is kept in the run directory.
TensorBoard is told from which step on what is written replaces what an earlier start wrote
(``SummaryWriter(purge_step=…)`` hides events of that step and later ones).

One process per run talks to a tracker: all of this is for rank 0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol, TypedDict

from slurm_forge.errors import ForgeError, UnsupportedError
from slurm_forge.files import read_json, write_atomic
from slurm_forge.run_directory import RunDirectory

_LIMIT = 1 << 20
_FIRST_CLAIM = "1.json"
_FILE = "trackers.json"
#: W&B refuses / \ # ? % : in ids; nobody needs more than this.
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 40
#: What MLflow takes for the id of a run.
_MLFLOW_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,255}")


class TrackedRun(Protocol):
    """What is asked of a run: ``forge.Run`` has it."""

    @property
    def name(self) -> str:
        """The run's name."""
        ...

    @property
    def directory(self) -> Path:
        """The run directory."""
        ...

    @property
    def step_number(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def restored(self) -> bool:
        """Whether the checkpoint has been loaded, if there is one: ``step_number`` counts."""
        ...


class WandbArguments(TypedDict):
    """For ``wandb.init(**…)``."""

    id: str
    resume: Literal["allow"]
    name: str


class TensorBoardArguments(TypedDict):
    """For ``SummaryWriter(log_dir, **…)``."""

    purge_step: int | None


def wandb_arguments(run: TrackedRun) -> WandbArguments:
    """``wandb.init(project=…, **wandb_arguments(run))``, on rank 0.

    W&B takes no step twice: the steps that are repeated after a resume are dropped where they are
    given as ``wandb.log(step=…)``.  Log the step as a value, with ``define_metric``, to see them.
    """
    return {"id": _wandb_id(run.name, run.directory), "resume": "allow", "name": run.name}


def mlflow_run_id(run: TrackedRun) -> str | None:
    """``mlflow.start_run(run_id=mlflow_run_id(run))``, on rank 0; None makes a new run.

    Tell which one that was: ``remember_mlflow_run(run, mlflow.active_run().info.run_id)``.
    """
    return _mlflow_id(run.directory)


def remember_mlflow_run(run: TrackedRun, run_id: str) -> None:
    """Keep the id of the MLflow run for later starts; durable on return."""
    if not _MLFLOW_ID.fullmatch(run_id):
        raise ValueError(f"{run_id[:80]!r} is not the id of an MLflow run")
    body = json.dumps({"mlflow_run_id": run_id}, sort_keys=True) + "\n"
    write_atomic(run.directory / _FILE, body.encode("ascii"))


def tensorboard_arguments(run: TrackedRun, *, first: bool = False) -> TensorBoardArguments:
    """``SummaryWriter(log_dir, **tensorboard_arguments(run))``, on rank 0, after ``run.restore()``.

    For events whose ``global_step`` is ``run.step_number`` after the step.  ``first`` says that
    nobody has written there yet: then nothing is hidden.
    """
    if not run.restored:
        raise UnsupportedError(
            "tensorboard_arguments() before the checkpoint is loaded: the step is not known yet",
            next_step="Call run.register(…) and run.restore() first, then make the SummaryWriter.",
        )
    return {"purge_step": _purge_step(run.step_number, first)}


def tracker_variables(
    *, name: str, directory: Path, step: int | None, first: bool, environment: Mapping[str, str]
) -> Mapping[str, str]:
    """Variables for a program that knows nothing of us: for rank 0, before its code is imported.

    ``step`` is the one that is resumed from (None: from the start), ``first`` says that no launch
    of the run came before.  Variables of ``environment`` stay as they are, and are not returned.
    """
    wanted: dict[str, str] = {}
    # A sweep gives ids itself and fails if somebody else does.
    if not {"WANDB_RUN_ID", "WANDB_SWEEP_ID"} & set(environment):
        wanted["WANDB_RUN_ID"] = _wandb_id(name, directory)
        wanted["WANDB_RESUME"] = "allow"
    mlflow = _mlflow_id(directory)
    if mlflow is not None:
        wanted["MLFLOW_RUN_ID"] = mlflow
    purge = _purge_step(step or 0, first)
    if purge is not None:
        wanted["SLURM_FORGE_TB_PURGE_STEP"] = str(purge)
    return {key: value for key, value in wanted.items() if key not in environment}


def _purge_step(step: int, first: bool) -> int | None:
    if first:
        return None
    # From the start again: what the first try wrote is hidden as a whole.
    return step + 1 if step else 0


def _wandb_id(name: str, directory: Path) -> str:
    run = RunDirectory.at(directory)
    try:
        seed = str(read_json(run.attempts / _FIRST_CLAIM, _LIMIT)["nonce"])
    except (OSError, KeyError, ForgeError):
        seed = str(run.path)  # unknown to us, and still the same on every start
    digest = hashlib.sha256(f"{name}\0{seed}".encode("utf-8", "surrogateescape")).hexdigest()
    return f"{_UNFIT.sub('-', name)[:_LONGEST_NAME]}-{digest[:16]}"


def _mlflow_id(directory: Path) -> str | None:
    try:
        run_id = read_json(directory / _FILE, _LIMIT).get("mlflow_run_id")
    except (OSError, ForgeError):
        return None  # a tracker is no reason not to train
    return run_id if isinstance(run_id, str) and _MLFLOW_ID.fullmatch(run_id) else None
