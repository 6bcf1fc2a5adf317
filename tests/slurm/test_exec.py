"""Programs that know nothing of slurm_forge: preempted for real, brought back, finished."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.journal.events import Note, NoticeSeen, Resumed
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    run_state,
    submit_script,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from tests.slurm.harness import REPOSITORY, Watched, environment, left_of_limit

pytestmark = [pytest.mark.slurm]

EXAMPLES = REPOSITORY / "examples" / "exec"


@dataclass
class Script:
    """One of the example scripts, submitted."""

    cluster: SlurmCluster
    job: str
    out: Path
    run: RunDirectory

    @property
    def watched(self) -> Watched:
        return Watched(self.cluster, self.run, read_run_file(self.run.spec_file), self.job)

    @property
    def state(self) -> RunState:
        return run_state(self.run)

    def wait_file(self, pattern: str, seconds: float = 60) -> None:
        self.cluster.wait_for(lambda: bool(list(self.out.glob(pattern))), seconds, pattern)

    def texts(self, kind: type) -> str:
        return "\n".join(str(event) for _, event in self.watched.events(kind))


def submit(
    cluster: SlurmCluster,
    folder: Path,
    script: str,
    *options: str,
    steps: int = 200,
    partition: str = "preempt",
) -> Script:
    out = folder / "out"
    runs = folder / "runs"
    job = cluster.sbatch(
        EXAMPLES / f"{script}.sbatch",
        f"--partition={partition}",
        f"--output={folder}/slurm-%j.out",
        *options,
        cwd=REPOSITORY,
        settings={
            "PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}",
            "OUT": str(out),
            "STEPS": str(steps),
            "SLURM_FORGE_RUNS": str(runs),
            "SLURM_FORGE_NODES": "off",
            "MASTER_ADDR": "127.0.0.1",  # the names of these nodes are Slurm's alone
        },
    )
    return Script(cluster, job, out, RunDirectory.at(runs / f"{script}-demo"))


def preempted_once(script: Script) -> RunState:
    """Preempt it, wait for its end; what the journal tells of the interruption is right."""
    script.cluster.preempt(script.job)
    state = script.watched.wait_finished(90)
    assert len(state.attempts) == 2
    incident = state.attempts[0].incidents[0][1]
    assert (incident.cause, incident.confidence) == (Cause.PREEMPTED, Confidence.CERTAIN)
    assert state.attempts[0].outcome == "requeued"
    assert script.run.is_done()
    return state


@pytest.mark.slow
def test_a_torchrun_script(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = submit(slurm, tmp_path, "torchrun", steps=160)
    script.wait_file("checkpoint-20.pt")
    preempted_once(script)

    assert "SIGTERM to process" in script.texts(Note), "torchrun was not told"
    assert "--resume" in script.texts(Note)
    steps = [int(path.stem.partition("-")[2]) for path in script.out.glob("checkpoint-*")]
    assert any(step % 20 for step in steps), "it did not save when it was told"
    # 0.01 * (sum over ranks) summed over steps and 8 weights, as without an interruption.
    expected = -0.08 * sum(2 * step + 1 for step in range(160))
    assert float((script.out / "result.txt").read_text()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.versions
def test_a_loop_in_bash(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = submit(slurm, tmp_path, "loop", steps=50)
    script.wait_file("done")
    preempted_once(script)

    assert (script.out / "all").read_text().split() == [str(n) for n in range(1, 51)]
    notice = script.watched.events(NoticeSeen)[0][1]
    assert isinstance(notice, NoticeSeen)
    assert notice.source == "tasks of steps", "the sentinel did not hear of it"


@pytest.mark.slow
def test_the_habits_of_a_trainer(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = submit(slurm, tmp_path, "hf", steps=120)
    script.wait_file("checkpoint-10")
    preempted_once(script)

    assert "by Slurm itself" in script.texts(Note), "its task was signalled twice"
    total = json.loads((script.out / "all_results.json").read_text())["total"]
    assert total == sum(range(1, 121))
    log = next(tmp_path.glob("slurm-*.out")).read_text()
    assert "resumed at" in log


@pytest.mark.slow
def test_a_program_that_ignores_the_notice(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = submit(slurm, tmp_path, "deaf", steps=200)
    script.wait_file("state-20")
    state = preempted_once(script)

    assert "SIGTERM, then SIGKILL" in script.texts(Note)
    requeued = state.attempts[0].requeues[0][0]
    noticed = script.watched.events(NoticeSeen)[0][0]
    assert requeued - noticed < 10, "requeued after the grace time"
    assert (script.out / "result").read_text() == "200\n"


@pytest.mark.slow
def test_after_scancel_nothing_comes_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = submit(slurm, tmp_path, "loop", steps=1000, partition="normal")
    script.wait_file("done")
    slurm.cancel(script.job)
    slurm.wait_for(lambda: script.state.status is RunStatus.CANCELLED, 30, "the journal to say so")
    slurm.wait_state(script.job, "CANCELLED", 30)
    assert not script.state.attempts[-1].requeues


@pytest.mark.slow
def test_a_command_in_a_job_file(slurm: SlurmCluster, tmp_path: Path) -> None:
    """``command:`` through the script that submit renders, preempted as well."""
    out = tmp_path / "out"
    spec = job_from_mapping(
        {
            "name": "pieces",
            "command": ["bash", "examples/exec/loop.sh", str(out), "40"],
            "program": {"progress_file": str(out / "done")},
            "resources": {"mem": "1000M", "time": "10m", "partition": "preempt"},
        }
    )
    site = find_site("generic")
    with environment(slurm, tmp_path / "nodes"):
        run, file = create_run(spec, runs=tmp_path / "runs", site=site, submitted_from=REPOSITORY)
        job = submit_script(run, file, site, SubprocessSlurm.of_this_process())
    script = Script(slurm, job, out, run)
    script.wait_file("done")
    preempted_once(script)
    assert (out / "all").read_text().split() == [str(n) for n in range(1, 41)]


def own(cluster: SlurmCluster, folder: Path, options: str, *arguments: str, command: str) -> str:
    """A script of somebody's own, handed in by hand; the job."""
    script = folder / "own.sbatch"
    head = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=1 --mem=500M --open-mode=append"
    script.write_text(
        f"{head} --job-name=own --output={folder}/slurm-%A-%a.out {options}\n{command}\n"
    )
    settings = {
        "PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}",
        "OUT": str(folder / "out"),
        "SLURM_FORGE_RUNS": str(folder / "runs"),
        "SLURM_FORGE_NODES": "off",
    }
    argv = ("sbatch", "--parsable", str(script), *arguments)
    return cluster.run(*argv, cwd=REPOSITORY, settings=settings).stdout.strip()


def of_name(cluster: SlurmCluster, folder: Path, name: str, job: str) -> Script:
    return Script(cluster, job, folder / "out", RunDirectory.at(folder / "runs" / name))


@pytest.mark.slow
def test_a_successor_gets_the_arguments_of_its_script(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Where a job can't be requeued: preempted by a partition that cancels."""
    job = own(
        slurm,
        tmp_path,
        "--partition=cancel --time=10 --no-requeue",
        "60",
        command='exec slurm-forge exec --progress-file "$OUT/done" -- '
        'bash examples/exec/loop.sh "$OUT" "$1"',
    )
    script = of_name(slurm, tmp_path, "own", job)
    script.wait_file("done")
    slurm.preempt(job)
    state = script.watched.wait_finished(90)
    assert len(state.attempts) == 2 and state.attempts[0].outcome == "successor"
    assert (script.out / "all").read_text().split() == [str(n) for n in range(1, 61)]


@pytest.mark.slow
def test_a_task_of_an_array_comes_back_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = own(
        slurm,
        tmp_path,
        "--partition=cancel --time=10 --no-requeue --array=3-4",
        command='exec slurm-forge exec --progress-file "$OUT.$SLURM_ARRAY_TASK_ID/done" -- '
        'bash examples/exec/loop.sh "$OUT.$SLURM_ARRAY_TASK_ID" 80',
    )
    tasks = {task: of_name(slurm, tmp_path, f"own-{task}", f"{job}_{task}") for task in (3, 4)}
    for task in tasks:
        slurm.wait_for(lambda t=task: (tmp_path / f"out.{t}" / "done").exists(), 60, "its work")
    slurm.preempt(f"{job}_3")
    state = tasks[3].watched.wait_finished(120)
    other = tasks[4].watched.wait_finished(120)
    assert len(state.attempts) == 2 and state.attempts[0].outcome == "successor"
    assert len(other.attempts) <= 2
    for task in tasks:
        done = (tmp_path / f"out.{task}" / "all").read_text().split()
        assert done == [str(n) for n in range(1, 81)], "two of them did its work"


@pytest.mark.slow
def test_a_program_that_slurm_does_not_signal_is_told_by_the_clock(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """``--signal=USR1@30`` goes to steps, up to 90 s before the end; the lead is 24 s."""
    job = own(
        slurm,
        tmp_path,
        "--partition=normal --time=2 --signal=USR1@30 --requeue",
        command='exec slurm-forge exec --progress-file "$OUT/done" -- '
        'bash examples/exec/loop.sh "$OUT" 520',
    )
    script = of_name(slurm, tmp_path, "own", job)
    script.wait_file("done")
    state = script.watched.wait_finished(240)
    assert len(state.attempts) == 2 and state.attempts[0].outcome == "requeued"
    assert state.attempts[0].incidents[0][1].cause is Cause.TIME_LIMIT
    assert "SIGUSR1: Slurm's warning of the time limit" in script.texts(Note)
    ((stopped, notice),) = script.watched.events(NoticeSeen)
    assert (notice.what, notice.source) == ("end of the time limit", "clock")
    left = left_of_limit(script.texts(Note), at=stopped)
    assert left <= 24 + 2, "a part of the limit was given away"
    assert (script.out / "all").read_text().split() == [str(n) for n in range(1, 521)]


@pytest.mark.slow
def test_tasks_that_slurm_has_signalled_are_stopped_by_it_as_ever(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """They have got the warning themselves, and what they do then is a stop."""
    tasks = tmp_path / "tasks.sh"
    tasks.write_text(
        "trap 'touch $OUT/signalled; exit 0' USR1; mkdir -p $OUT; touch $OUT/done.1\n"
        "[ -e $OUT/signalled ] || while true; do sleep 0.1; done\n"
    )
    job = own(
        slurm,
        tmp_path,
        "--partition=normal --time=2 --signal=USR1@30 --requeue",
        command=f"exec slurm-forge exec --notify USR1 -- srun bash {tasks}",
    )
    script = of_name(slurm, tmp_path, "own", job)
    script.wait_file("done.1")
    state = script.watched.wait_finished(240)
    assert len(state.attempts) == 2 and state.attempts[0].outcome == "requeued"
    ((_, notice),) = script.watched.events(NoticeSeen)
    assert (notice.what, notice.source) == ("SIGUSR1", "tasks of steps")
    assert "by Slurm itself" in script.texts(Note)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_lightning_trainer_goes_on_from_its_own_newest_checkpoint(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """It saves at its signal, and requeues the job itself: that is no administrator's wish."""
    pytest.importorskip("lightning")
    script = submit(slurm, tmp_path, "lightning", "--time=2", steps=1100)
    script.wait_file("ck-step=25.ckpt", 120)
    state = script.watched.wait_finished(400)

    causes = [each.incidents[0][1].cause for each in state.attempts[:-1]]
    assert causes and set(causes) == {Cause.TIME_LIMIT}
    assert "hpc_ckpt_1.ckpt" in script.texts(Note)
    first, second, *_ = (each for _, each in script.watched.events(Resumed))
    assert isinstance(first, Resumed) and isinstance(second, Resumed)
    assert (first.step, second.checkpoint) == (0, "hpc_ckpt_1.ckpt")
    assert second.step % 25 or second.step > 25, "it went on from the pattern's"
    assert state.high_water == 1100
    assert (script.out / "result.txt").read_text().startswith("1100 ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_train_is_told_of_a_preemption_and_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    script = submit(slurm, tmp_path, "ray", "--mem=5G", steps=600)

    def trains() -> bool:
        return "step 5 loss" in "".join(each.read_text() for each in tmp_path.glob("slurm-*.out"))

    slurm.wait_for(trains, 300, "Ray's workers")
    slurm.preempt(script.job)
    script.watched.wait_finished(400)
    state = script.watched.wait(lambda s: bool(s.attempts[-1].outcome), 60, "the attempt's end")
    assert [each.outcome for each in state.attempts] == ["requeued", "finished"]
    assert state.attempts[0].incidents[0][1].cause is Cause.PREEMPTED
    first, second = (each for _, each in script.watched.events(Resumed))
    assert isinstance(first, Resumed) and isinstance(second, Resumed)
    assert first.step == 0 and second.step % 50, "it went on from a periodic save"
    assert state.high_water == 600
    assert (script.out / "result.txt").read_text().startswith("600 ")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [False, True], ids=["preempted", "worker-killed"])
def test_horovod_s_elastic_workers_save_and_go_on(
    slurm: SlurmCluster, tmp_path: Path, killed: bool
) -> None:
    if shutil.which("horovodrun", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("Horovod has no wheel for this Python: docs/how-to/exec.md tells how to build")
    script = submit(slurm, tmp_path, "horovod", steps=200)
    script.wait_file("checkpoint-50.pt", 300)
    if killed:
        os.kill(workers(script.out)[0], signal.SIGKILL)
    else:
        slurm.preempt(script.job)
    state = script.watched.wait_finished(400)

    first, second = (each for _, each in script.watched.events(Resumed))
    assert isinstance(first, Resumed) and isinstance(second, Resumed)
    assert bool(second.step % 50) is not killed, "at a notice it saves behind the next step"
    if not killed:
        assert state.attempts[0].incidents[0][1].cause is Cause.PREEMPTED
    (tmp_path / "undisturbed").mkdir()
    undisturbed = submit(slurm, tmp_path / "undisturbed", "horovod", steps=200)
    undisturbed.wait_file("result.txt", 400)
    results = [(each.out / "result.txt").read_text() for each in (script, undisturbed)]
    assert results[0] == results[1]


def workers(out: Path) -> list[int]:
    """Processes of Python that were given the folder, and no shell or launcher around them."""
    words = {int(each.parent.name): each for each in Path("/proc").glob("[0-9]*/cmdline")}
    found = []
    for pid, path in words.items():
        with contextlib.suppress(OSError):  # it has ended
            if path.read_bytes().startswith(b"python\0") and os.fsencode(out) in path.read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
def test_tasks_that_print_nan_are_ended_on_every_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = submit(slurm, tmp_path, "nan", steps=60, partition="normal")
    script.wait_file("c-10")
    state = script.watched.wait_finished(120)

    assert len(state.attempts) == 1
    incident = state.attempts[0].incidents[0][1]
    assert (incident.cause, incident.onset) == (Cause.NON_FINITE, 30)
    assert state.attempts[0].decisions[0][1].target == "c-20"
    for rank in (0, 1):
        assert (script.out / f"result-{rank}").read_text() == "good"
        pids = [each.split()[1] for each in (script.out / f"steps-{rank}").read_text().splitlines()]
        assert pids == sorted(pids, key=pids.index), "two starts ran side by side"
    assert "no sentinel" not in script.texts(Note)
