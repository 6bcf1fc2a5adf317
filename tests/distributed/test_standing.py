"""Standing agents with real ranks: warm relaunches, going on in the process, and what is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import EnvironmentSets, Site
from slurm_forge.spec import job_from_mapping
from slurm_forge.testing.digest import digest
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Start
from tests.distributed.standing import REPOSITORY, Job, below, children_of, standing
from tests.jobs import consumed, told_variables

IN_PROCESS = {
    cause: [{"do": do, "times": 2, "start": "in_process"}]
    for cause, do in (
        ("crash", "relaunch"),
        ("app_error", "relaunch"),
        ("nccl_error", "relaunch"),
        ("cuda_oom", "shrink_micro_batch"),
    )
}
STEPS = 24
#: For a run that is stopped: it never finishes before that, however busy the machine is.
ENDLESS = 1_000_000


def new_run(
    folder: Path, name: str, args: dict[str, Any], site: Site | None = None, **spec: Any
) -> RunDirectory:
    job = job_from_mapping(
        {
            "name": name,
            "entry": "tests/jobs.py:train",
            "args": {"steps": STEPS, "micro_batch": 4, **args},
            "probe": {"enabled": False},
            "checkpoint": {"every_steps": 6, "every_minutes": None},
            **spec,
        }
    )
    site = site or find_site("generic")
    run, _ = create_run(job, runs=folder, site=site, submitted_from=REPOSITORY)
    return run


def to_the_end(job: Job) -> list[tuple[Start, Cause | None]]:
    """Launch until the run is finished; how each was started, and of what it ended."""
    told: list[tuple[Start, Cause | None]] = []
    while len(told) < 4:
        start = job.launch()
        decision = job.conclude(job.ended())
        told.append((start, None if decision is None else decision.cause))
        if decision is None:
            return told
    raise AssertionError(f"it does not come to an end: {told}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("reference")
    run = new_run(folder, "reference", {})
    with standing(run, 2, folder) as job:
        assert to_the_end(job) == [(Start.COLD, None)]
    return digest(run.path, random=True), consumed(run.path)


@pytest.mark.parametrize(
    "recovery",
    [
        pytest.param({}, id="warm"),
        pytest.param({"crash": IN_PROCESS["crash"]}, id="in_process", marks=pytest.mark.slow),
    ],
)
@pytest.mark.core
def test_a_killed_rank_is_relaunched_without_a_new_interpreter(
    tmp_path: Path, uninterrupted: tuple[str, dict[int, Any]], recovery: dict[str, Any]
) -> None:
    args = {"hold": 10, "workers": 1, "misbehave": ["orphan@2:rank0", "orphan@2:rank1"]}
    run = new_run(tmp_path, "killed", args, recovery=recovery)
    with standing(run, 2, tmp_path, relay=True) as job:
        job.launch()
        job.until(lambda: job.training(8), "step 8")
        assert job.hub is not None and len(job.hub._peers) == 1, "the relay of the node"
        before, agents = job.workers, job.agents
        all_of_it = {pid for agent in agents.values() for pid in below(agent)}
        assert len(all_of_it) >= 6, "two workers, their loader workers, and what they started"
        assert all(threads_of(agent) == 1 for agent in agents.values())
        if not recovery:
            os.kill(before[0], signal.SIGSTOP)  # it hears of nothing, and must go all the same
        os.kill(before[1], signal.SIGKILL)
        facts = job.ended()
        decision = job.conclude(facts)
        assert decision is not None and decision.cause is Cause.CRASH
        assert [(end.rank, end.signal) for end in facts.ends if end.signal and not end.ours] == [
            (1, "SIGKILL")
        ]
        left = {pid for pid in all_of_it if Path(f"/proc/{pid}").exists()}
        # Where rank 0 goes on in its process, so does what it does not know of any more.
        kept = {before[0], *children_of(before[0])} if recovery else set()
        assert left == kept
        start = job.launch()
        assert start is (Start.IN_PROCESS if recovery else Start.WARM)
        job.until(lambda: len(job.workers) == 2, "both workers")
        assert job.agents == agents
        assert (job.workers[0] == before[0]) is bool(recovery)
        assert job.workers[1] != before[1]
        assert job.conclude(job.ended()) is None
    assert consumed(run.path) == uninterrupted[1]
    assert digest(run.path, random=True) == uninterrupted[0]


def test_after_an_exception_all_go_on_in_their_process(
    tmp_path: Path, uninterrupted: tuple[str, dict[int, Any]]
) -> None:
    run = new_run(tmp_path, "exception", {"misbehave": ["exception@15:rank1"]}, recovery=IN_PROCESS)
    with standing(run, 2, tmp_path) as job:
        job.launch()
        job.until(lambda: len(job.workers) == 2, "both workers")
        before = job.workers
        assert to_the_end_from(job) == [Cause.APP_ERROR, None]
        assert job.workers == before
    assert consumed(run.path) == uninterrupted[1]
    assert digest(run.path, random=True) == uninterrupted[0]


@pytest.mark.slow
def test_of_the_probe_of_a_launch_nothing_goes_on_in_the_next_one(tmp_path: Path) -> None:
    script = tmp_path / "counting.py"
    script.write_text(
        "import threading\n"
        "from tests.jobs import train as program\n"
        "def train(run):\n"
        "    names = [thread.name for thread in threading.enumerate()]\n"
        "    file = run.directory / f'threads-{run.launch}-{run.rank}'\n"
        "    file.write_text(' '.join(sorted(names)))\n"
        "    program(run)\n"
    )
    run = new_run(
        tmp_path,
        "probed",
        {"misbehave": ["exception@15:rank1"], "pace": 0.1},
        entry=f"{script}:train",
        recovery=IN_PROCESS,
        probe={"every": "1s", "deadline": "4s", "silence": "4s"},
    )
    with standing(run, 2, tmp_path) as job:
        assert to_the_end(job)[-1] == (Start.IN_PROCESS, None)
    for rank in (0, 1):
        names = [(run.path / f"threads-{launch}-{rank}").read_text() for launch in (1, 2)]
        assert [each.count("forge-probe") for each in names] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_out_of_memory_shrinks_in_the_process(
    tmp_path: Path, uninterrupted: tuple[str, dict[int, Any]], parallel: str
) -> None:
    args = {"faults": ["oom@9:rank1:above=2:always"], "parallel": parallel}
    run = new_run(tmp_path, "oom", args, recovery=IN_PROCESS)
    with standing(run, 2, tmp_path) as job:
        job.launch()
        job.until(lambda: len(job.workers) == 2, "both workers")
        before = job.workers
        assert to_the_end_from(job) == [Cause.CUDA_OOM, None]
        assert job.workers[1] == before[1]
        # FSDP2 on gloo may wait in an all-gather that can't be aborted: that rank is forked anew.
        assert parallel == "fsdp2" or job.workers[0] == before[0]
    assert consumed(run.path) == uninterrupted[1], "global batch or sample order changed"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["swallow", "gil"])
def test_a_rank_that_does_not_unwind_is_forked_anew(
    tmp_path: Path, uninterrupted: tuple[str, dict[int, Any]], how: str
) -> None:
    misbehave = [f"{how}@15:rank0", "exception@15:rank1"]
    run = new_run(tmp_path, how, {"misbehave": misbehave, "pace": 0.1}, recovery=IN_PROCESS)
    with standing(run, 2, tmp_path) as job:
        job.launch()
        job.until(lambda: len(job.workers) == 2, "both workers")
        before, agents = job.workers, job.agents
        assert to_the_end_from(job) == [Cause.APP_ERROR, None]
        assert job.workers[0] != before[0]
        assert job.workers[1] == before[1]
        assert job.agents == agents
    assert consumed(run.path) == uninterrupted[1]
    assert digest(run.path, random=True) == uninterrupted[0]


def to_the_end_from(job: Job) -> list[Cause | None]:
    """Of what the present launch ended, and those that came of it."""
    told: list[Cause | None] = []
    while len(told) < 4:
        decision = job.conclude(job.ended())
        told.append(None if decision is None else decision.cause)
        if decision is None:
            return told
        job.launch()
    raise AssertionError(f"it does not come to an end: {told}")


def test_a_signal_for_the_agent_alone_stops_all_ranks_together(tmp_path: Path) -> None:
    """What Slurm does where it tracks processes by control groups."""
    run = new_run(tmp_path, "signalled", {"pace": 0.02, "steps": ENDLESS})
    with standing(run, 2, tmp_path) as job:
        job.launch()
        job.until(lambda: job.training(3), "step 3")
        os.kill(job.agents[1], signal.SIGTERM)
        facts = job.ended()
        assert facts.rank_signals == ("SIGTERM",)
        assert facts.stopped_at is not None and facts.checkpoint is not None
        assert [end.exit_code for end in facts.ends] == [0, 0]
        assert all(Path(f"/proc/{agent}").exists() for agent in job.agents.values())


@pytest.mark.slow
def test_with_its_agent_a_rank_goes_and_the_next_launch_is_cold(tmp_path: Path) -> None:
    run = new_run(tmp_path, "agent", {"hold": 10, "workers": 1})
    with standing(run, 2, tmp_path) as job:
        job.launch()
        job.until(lambda: job.training(3), "step 3")
        everything = {pid for agent in job.agents.values() for pid in (agent, *below(agent))}
        os.kill(job.agents[1], signal.SIGKILL)
        facts = job.ended()
        decision = job.conclude(facts)
        assert decision is not None and decision.cause is Cause.CRASH
        incident = job.attempt.state().attempts[-1].incidents[-1][1]
        assert incident.rank == 1
        assert any(each.source == "srun" and "Killed" in each.text for each in incident.evidence)
        assert job.launch() is Start.COLD
        gone(everything)
        assert job.conclude(job.ended()) is None


@pytest.mark.slow
def test_agents_go_when_the_supervisor_is_gone(tmp_path: Path) -> None:
    run = new_run(tmp_path, "alone", {"pace": 0.02, "workers": 1, "steps": ENDLESS})
    with standing(run, 2, tmp_path) as job:
        job.launch()
        job.until(lambda: job.training(3), "step 3")
        everything = {pid for agent in job.agents.values() for pid in (agent, *below(agent))}
        assert job.hub is not None and job.step._agents is not None
        job.hub.close()
        job.step._agents.close()
        job.ended()
        gone(everything)


def gone(pids: set[int], within_s: float = 40.0) -> None:
    until = time.monotonic() + within_s
    while left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < until, f"{left} live on"
        time.sleep(0.01)


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.slow
def test_a_notice_while_the_agent_imports_is_not_lost(tmp_path: Path) -> None:
    run = new_run(tmp_path, "early", {})
    with standing(run, 2, tmp_path) as job:
        job.launch()
        job.until(lambda: len(job.agents) == 2, "the agents")
        os.kill(job.agents[0], signal.SIGTERM)
        facts = job.ended()
        assert facts.rank_signals == ("SIGTERM",)
        assert not (run.path / "samples").exists(), "it trained all the same"


@pytest.mark.parametrize(
    ("more", "warmly"),
    [
        ({}, True),
        # What an interpreter may have read when it started reaches no process that has.
        pytest.param({"FORGE_TESTED": "1"}, False, marks=pytest.mark.slow),
    ],
)
def test_variables_for_after_a_hang_reach_forked_ranks_and_are_taken_back(
    tmp_path: Path, uninterrupted: tuple[str, dict[int, Any]], more: dict[str, str], warmly: bool
) -> None:
    on_hang = {"NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": "23", **more}
    site = Site(name="tested", env=EnvironmentSets(always={"NCCL_DEBUG": "WARN"}, on_hang=on_hang))
    names = ["NCCL_DEBUG", "NCCL_IB_TIMEOUT", *more]
    run = new_run(
        tmp_path,
        "variables",
        {"misbehave": ["segfault@8:rank1", "exception@20:rank0"], "variables": names},
        site=site,
        recovery={"crash": [{"do": "relaunch", "times": 1, "variables": "on_hang"}]},
    )
    with standing(run, 2, tmp_path) as job:
        told = to_the_end(job)
    warm = Start.WARM if warmly else Start.COLD
    assert told == [(Start.COLD, Cause.CRASH), (warm, Cause.APP_ERROR), (warm, None)]
    usual = {**dict.fromkeys(names), "NCCL_DEBUG": "WARN"}
    for rank in (0, 1):
        assert told_variables(run.path, rank) == [usual, on_hang, usual]
    assert digest(run.path, random=True) == uninterrupted[0]
