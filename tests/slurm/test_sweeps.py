"""Sweeps on a real Slurm: an array of runs, some of which are preempted, ends with every result."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause

pytestmark = pytest.mark.slurm

#: Ends once it may; when it is asked to save, it notes that and ends.
PROGRAM = """\
import os, pathlib, signal, sys, time
name = os.environ["POINT"]
saved, may_end = pathlib.Path("saved-" + name), pathlib.Path("may-end")
signal.signal(signal.SIGTERM, lambda *_: (saved.touch(), sys.exit(1)))
pathlib.Path("begun-" + name).touch()
while not may_end.exists():
    time.sleep(0.05)
pathlib.Path("result-" + name).write_text(f"{name}, saved before: {saved.exists()}")
"""
TRAINING = """\
import json, pathlib, time
import torch
import slurm_forge as forge

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        return torch.tensor([float(index % 7), 1.0])

def train(run, lr, seed, steps):
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run.register(model=model, optimizer=optimizer)
    loss = 0.0
    for batch in run.batches(Numbers(), global_batch_size=8, until=forge.Steps(steps)):
        time.sleep(1.0 if pathlib.Path("slow-" + run.name).exists() else 0.03)
        loss = run.train_step(batch, lambda rows: model(rows).square().mean(), max_norm=1.0)
    result = {"lr": lr, "seed": seed, "weights": [w.tolist() for w in model.parameters()]}
    pathlib.Path(f"result-{lr}-{seed}.json").write_text(json.dumps(result))
"""


#: As submitit documents it: what is counted is saved with the object, and nobody sleeps on it.
COUNTER = """\
import pathlib, sys, time
import submitit
from submitit.helpers import Checkpointable, DelayedSubmission

class Counter(Checkpointable):
    def __init__(self):
        self.saved = 0
    def __call__(self, name, factor):
        pathlib.Path("begun-" + name).touch()
        while not pathlib.Path("may-end").exists():
            time.sleep(0.05)
        return f"{name} {factor}, saved {self.saved}"
    def checkpoint(self, *args, **kwargs):
        self.saved += 1
        return DelayedSubmission(self, *args, **kwargs)
"""
SUBMIT = """\
import json, sys
import submitit
from counter import Counter

executor = submitit.AutoExecutor("logs", cluster="forge")
executor.update_parameters(
    timeout_min=10, slurm_partition="preempt", slurm_mem="200M", slurm_array_parallelism=1
)
jobs = executor.map_array(Counter(), ["a", "b"], [1, 2])
print(jobs[0].job_id, flush=True)
print(json.dumps([job.result() for job in jobs]))
"""


def forge(slurm: SlurmCluster, folder: Path, *words: str, status: int = 0) -> str:
    variables = {
        **slurm.env,
        "HOME": str(folder),
        "SLURM_FORGE_NODES": "off",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [Path(sys.executable).parent / "slurm-forge", *words],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == status, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def status_of(slurm: SlurmCluster, folder: Path) -> dict:
    return json.loads(forge(slurm, folder, "status", "grid", "--json"))


def submitted(slurm: SlurmCluster, folder: Path) -> str:
    return json.loads(forge(slurm, folder, "submit", "grid.yaml", "--json"))["job"]


def preempt(slurm: SlurmCluster, job: str) -> None:
    slurm.preempt(job, hold=0)
    slurm.wait_for(lambda: slurm.job(job).state != "RUNNING", 60, f"job {job} to be preempted")


def attempts(folder: Path, number: int) -> list[list[Cause]]:
    state = run_state(RunDirectory.existing(folder / "runs" / f"grid-{number}"))
    assert state.status is RunStatus.FINISHED
    return [[found.cause for _, found in each.incidents] for each in state.attempts]


def test_a_preempted_task_comes_back_and_the_limit_is_kept(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "work.py").write_text(PROGRAM)
    (tmp_path / "grid.yaml").write_text(
        f"name: grid\ncommand: [{sys.executable}, work.py]\n"
        "program: {progress_file: 'saved-*'}\n"
        "resources: {partition: preempt, time: '00:10:00', mem: 200M}\n"
        "sweep: {env.POINT: [a, b], limit: 1}\n"
    )
    job = submitted(slurm, tmp_path)
    slurm.wait_for((tmp_path / "begun-a").exists, 60, "the first of them")
    assert status_of(slurm, tmp_path)["counts"] == {"running": 1, "submitted": 1}
    slurm.preempt(f"{job}_0")
    slurm.wait_for((tmp_path / "saved-a").exists, 60, "the notice")
    (tmp_path / "may-end").touch()
    results = [tmp_path / f"result-{point}" for point in "ab"]
    slurm.wait_for(lambda: all(each.exists() for each in results), 120, "all results")
    runs = [tmp_path / "runs" / f"grid-{number}" for number in (0, 1)]
    finished = RunStatus.FINISHED
    slurm.wait_for(
        lambda: all(run_state(RunDirectory.at(each)).status is finished for each in runs),
        30,
        "the end of the sweep",
    )
    assert status_of(slurm, tmp_path)["done"]
    assert [each.read_text() for each in results] == [
        "a, saved before: True",
        "b, saved before: False",
    ]
    assert attempts(tmp_path, 0) == [[Cause.PREEMPTED], []]
    assert attempts(tmp_path, 1) == [[]]
    logs = [sorted((tmp_path / f"runs/grid-{n}/submissions").glob("grid-*.out")) for n in range(2)]
    assert [len(each) for each in logs] == [1, 1]
    # The file of a task has an id that is not in the journal.
    shown = forge(slurm, tmp_path, "logs", "grid-0", "--attempt", "1")
    assert "slurm_forge: grid-0: preempted: requeue: requeued\n" in shown


@pytest.mark.slow
def test_twenty_runs_of_which_some_are_preempted_and_one_is_held(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "work.py").write_text(TRAINING)
    (tmp_path / "grid.yaml").write_text(
        "name: grid\nentry: work.py:train\nargs: {steps: 60}\n"
        "resources: {partition: preempt, time: '00:10:00', cpus_per_task: 1, mem: 1500M}\n"
        "checkpoint: {every_steps: 20}\n"
        "sweep: {args.lr: [1e-2, 3e-2, 1e-1, 3e-1], args.seed: '0-4', limit: 3}\n"
    )
    preempted = (1, 4, 11)
    for number in preempted:
        (tmp_path / f"slow-grid-{number}").touch()
    job = submitted(slurm, tmp_path)

    def trains(number: int) -> bool:
        run = RunDirectory.existing(tmp_path / "runs" / f"grid-{number}")
        launches = [each for a in run_state(run).attempts for each in a.launches]
        return any((each.step or 0) > 0 for each in launches)

    def state(number: int) -> str:
        return slurm.job(f"{job}_{number}").state

    slurm.run("scontrol", "hold", f"{job}_19")
    for number in preempted:
        slurm.wait_for(lambda n=number: trains(n) and state(n) == "RUNNING", 300, f"run {number}")
        preempt(slurm, f"{job}_{number}")
        (tmp_path / f"slow-grid-{number}").unlink()

    def counts() -> dict:
        return status_of(slurm, tmp_path)["counts"]

    slurm.wait_for(lambda: counts().get("finished") == 19, 600, "all but the one that is held")
    assert counts() == {"finished": 19, "held": 1}
    shown = forge(slurm, tmp_path, "status", "grid")
    assert "held by an administrator" in shown, shown
    told = forge(slurm, tmp_path, "requeue", "grid")
    assert told.startswith("grid-19: "), told
    slurm.wait_for(lambda: status_of(slurm, tmp_path)["done"], 120, "the end of the sweep")
    results = [json.loads(each.read_text()) for each in tmp_path.glob("result-*.json")]
    assert len({(each["lr"], each["seed"]) for each in results}) == 20
    for number in range(20):
        *before, last = attempts(tmp_path, number)
        # Whatever shares the node of a preempted one is preempted as well.
        assert (before, last) == ([[Cause.PREEMPTED]] * len(before), []), number
        assert before or number not in preempted


@pytest.mark.slow
def test_checkpointables_of_submitit_return_their_results(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "counter.py").write_text(COUNTER)
    (tmp_path / "submit.py").write_text(SUBMIT)
    variables = {**slurm.env, "HOME": str(tmp_path), "SLURM_FORGE_NODES": "off"}
    with subprocess.Popen(
        [sys.executable, "submit.py"],
        cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as submitting:  # fmt: skip
        assert submitting.stdout is not None
        try:
            first = submitting.stdout.readline().strip()
            slurm.wait_for((tmp_path / "begun-a").exists, 60, "the first call")
            slurm.preempt(first)
            slurm.wait_for(lambda: run_of(tmp_path, first).status is RunStatus.REQUEUED, 60, "a")
            (tmp_path / "may-end").touch()
            told = submitting.stdout.read()
        finally:
            submitting.kill()
    assert json.loads(told.splitlines()[-1]) == ["a 1, saved 1", "b 2, saved 0"], told
    attempts = run_of(tmp_path, first).attempts
    assert [[found.cause for _, found in each.incidents] for each in attempts] == [
        [Cause.PREEMPTED], [],
    ]  # fmt: skip


def run_of(folder: Path, job: str) -> RunState:
    runs = [RunDirectory.at(each.parent) for each in folder.glob("logs/runs/*/run.yaml")]
    states = [run_state(each) for each in runs]
    return next(each for each in states if each.job == job)


@pytest.mark.slow
def test_a_sweep_of_hydra_is_preempted_and_taken_up_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    pytest.importorskip("hydra")
    forge(
        slurm, tmp_path, "init", ".", "--way", "hydra", "--yes", "--name", "grid", "--time", "10m",
        "--partition", "preempt", "--mem", "1500M",
    )  # fmt: skip
    variables = {
        **slurm.env, "HOME": str(tmp_path), "SLURM_FORGE_NODES": "off", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [sys.executable, "train.py", "-m", "hydra.sweep.dir=sweep", "pace=0.02"]

    def launch(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words, *more], cwd=tmp_path, env=variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def runs() -> list[RunState]:
        found = [
            RunDirectory.at(each.parent) for each in tmp_path.glob("sweep/.forge/runs/*/run.yaml")
        ]
        return [run_state(each) for each in found]

    def trains() -> str:
        for each in runs():
            launches = [launch for attempt in each.attempts for launch in attempt.launches]
            if each.status is RunStatus.RUNNING and any((one.step or 0) > 0 for one in launches):
                return each.job
        return ""

    first = launch("lr=0.01,0.02", "seed=0,1")
    try:
        slurm.wait_for(lambda: bool(trains()), 120, "the first steps")
        victim = trains()
        preempt(slurm, victim)
        first.kill()  # the terminal is closed; the sweep goes on
        told, _ = first.communicate()
    finally:
        first.kill()
    again = launch("lr=0.01,0.02", "seed=0,1,2")
    try:
        told, _ = again.communicate(timeout=slurm.deadline(300))
    finally:
        again.kill()
    assert again.returncode == 0, told
    sweep = ("status", "sweep/.forge/runs/grid", "--json")
    slurm.wait_for(lambda: json.loads(forge(slurm, tmp_path, *sweep))["done"], 30, told)
    preempted = [each for each in runs() if len(each.attempts) > 1]
    assert victim in [each.job for each in preempted]
    for each in preempted:
        causes = [found.cause for one in each.attempts for _, found in one.incidents]
        assert set(causes) == {Cause.PREEMPTED}


#: Ends the process that calls it once the job is in the queue.
KILLING = """#!/bin/sh
"{sbatch}" "$@" && touch "{submitted}" && kill -9 $PPID
"""


@pytest.mark.slow
def test_a_sweep_of_hydra_whose_client_is_killed_is_submitted_once(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    pytest.importorskip("hydra")
    forge(
        slurm, tmp_path, "init", ".", "--way", "hydra", "--yes", "--name", "grid", "--time", "10m",
        "--partition", "normal", "--mem", "1500M",
    )  # fmt: skip
    submitted, commands = tmp_path / "submitted", tmp_path / "bin"
    commands.mkdir()
    sbatch = shutil.which("sbatch", path=slurm.env["PATH"])
    (commands / "sbatch").write_text(KILLING.format(sbatch=sbatch, submitted=submitted))
    (commands / "sbatch").chmod(0o755)
    variables = {
        **slurm.env, "HOME": str(tmp_path), "SLURM_FORGE_NODES": "off", "OMP_NUM_THREADS": "1",
        "PATH": f"{commands}:{slurm.env['PATH']}",
    }  # fmt: skip
    words = [
        sys.executable, "train.py", "-m", "hydra.sweep.dir=sweep", "pace=0", "lr=0.01,0.02",
    ]  # fmt: skip

    def launch() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
            timeout=slurm.deadline(300),
        )  # fmt: skip

    assert launch().returncode == -signal.SIGKILL
    submitted.unlink()
    again = launch()
    assert again.returncode == 0, again.stdout + again.stderr
    assert not submitted.exists()
    runs = [RunDirectory.at(each.parent) for each in tmp_path.glob("sweep/.forge/runs/*/run.yaml")]

    def ends() -> list[tuple[RunStatus, int]]:
        return [(run_state(run).status, len(run_state(run).attempts)) for run in runs]

    slurm.wait_for(lambda: ends() == [(RunStatus.FINISHED, 1)] * 2, 60, "both, once each")
