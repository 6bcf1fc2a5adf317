"""Whole runs on this machine through submitit's own executors: local processes, and in process.

Nothing is forked from here: interpreters start, ranks meet through the run directory, and submitit
starts them again when they ask for it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import submitit
import torch
import torch.nn.functional as F

import slurm_forge as forge
from slurm_forge.control import member
from slurm_forge.errors import AlreadyFinishedError
from slurm_forge.journal import RunState, RunStatus, read_journal
from slurm_forge.journal.events import CheckpointCommitted, StepSkipped
from slurm_forge.launch.local.runner import (
    run_locally,
    train_here,
)
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    run_state,
)
from slurm_forge.launch.submitit.job import ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import EnvironmentSets, Site
from slurm_forge.spec import job_from_mapping
from slurm_forge.testing.faults import Faults
from slurm_forge.training.core.sample_order import SampleOrder
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.jobs import Samples, _Record, build, consumed, told_variables
from tests.strange import not_understood, strange_task

pytestmark = [pytest.mark.distributed]

BATCH, STEPS = 16, 12


def train(run: forge.Run) -> None:
    """``args``: faults; hold, a step before which rank 0 waits for the file ``go`` in attempt 1;
    return, a step after which rank 0 is gone; batch, the global batch that each rank believes in;
    until, what is said of the run's length instead of its steps.
    """
    model = build(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    run.register(model=model, optimizer=optimizer)
    faults, record = Faults(run.args.get("faults", ())), _Record(run)
    size = run.args.get("batch", [BATCH, BATCH])[run.rank]
    until = run.args.get("until", forge.Steps(STEPS))
    for batch in run.batches(Samples(), global_batch_size=size, until=until):
        step = run.step_number
        if run.rank == 0 and step == run.args.get("return"):
            return
        (run.directory / f"micro-{run.attempt}").write_text(str(list(batch.micro_sizes)))
        if step == run.args.get("hold") and run.attempt == 1 and run.rank == 0:
            wait_until_known_to_train(run)
            (run.directory / "here").touch()
            wait(run.directory / "go")

        def compute_loss(micro: Any) -> torch.Tensor:
            loss = F.cross_entropy(model(micro[0]), micro[1])
            return faults.loss(loss, run, samples=len(micro[1]))

        run.train_step(batch, compute_loss, max_norm=1.0)
        record.write(step, batch.sample_ids)
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    (run.directory / f"words-{run.rank}").write_text(" ".join(map(os.fsdecode, words)))
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    (run.directory / f"weights-{run.rank}").write_text(hashlib.sha256(weights).hexdigest())


def wait(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def wait_until_known_to_train(run: forge.Run) -> None:
    """Ranks say every second that they do; a signal before that ends a launch at once, unsaved."""
    said, channel = threading.Semaphore(0), run._member
    original = channel._beat

    def beat() -> Any:
        message = original()
        if message.started:
            said.release()
        return message

    with mock.patch.object(channel, "_beat", beat), mock.patch.object(member, "_BEAT_S", 0.05):
        for _ in range(2):  # at the second one the first one has been sent
            said.acquire()


class Held:
    """Called while a run goes on: once it is held, does something; lets go when that is known."""

    def __init__(self, runs: Path, act: Callable[[RunDirectory], Any], until: Callable[..., Any]):
        self._run, self._act, self._until = RunDirectory.at(runs / "run"), act, until
        self._acted = False

    def __call__(self, state: RunState) -> None:
        here, go = self._run.path / "here", self._run.path / "go"
        if not here.exists() or go.exists():
            return
        if not self._acted:
            self._acted = True
            self._act(self._run)
        elif self._until(state):
            go.touch()


def here(runs: Path, held: Held | None = None, *, ranks: int = 2, **spec: Any) -> RunDirectory:
    quiet = {"probe": {"enabled": False}, "report": False}
    whole = {"name": "run", "checkpoint": {"every_steps": 4}, **quiet, **spec}
    progress = held or (lambda state: None)
    return train_here(f"{__file__}:train", whole, ranks=ranks, runs=runs, progress=progress)


def events(run: RunDirectory, kind: type) -> list[Any]:
    records, damage = read_journal(run)
    assert not damage
    return [record.event for record in records if isinstance(record.event, kind)]


def check_samples(run: RunDirectory) -> None:
    order = SampleOrder(0, len(Samples()), BATCH)
    assert consumed(run.path) == {
        step: sorted(order.indices(step * BATCH, BATCH)) for step in range(STEPS)
    }


def incidents(state: RunState) -> list[tuple[Cause, Action]]:
    return [
        (incident.cause, decision.action)
        for attempt in state.attempts
        for (_, incident), (_, decision) in zip(attempt.incidents, attempt.decisions, strict=True)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with one NaN, on one rank, that somebody asked for a save in between."""
    runs = tmp_path_factory.mktemp("runs")
    asked = Held(runs, lambda run: run.save_file.touch(), lambda s: s.attempts[0].notices)
    return here(runs, asked, args={"faults": ["nan@5:rank1"], "hold": 2})


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(finished: RunDirectory) -> None:
    assert run_state(finished).status is RunStatus.FINISHED
    skipped = events(finished, StepSkipped)
    assert [(s.step, s.first_sample, s.samples) for s in skipped] == [(6, 5 * BATCH, BATCH)]
    first, second = ((finished.path / f"weights-{rank}").read_text() for rank in (0, 1))
    assert first == second
    check_samples(finished)


def test_the_ranks_are_forked_from_a_process_that_has_imported_what_they_need(
    finished: RunDirectory,
) -> None:
    words = [(finished.path / f"words-{rank}").read_text() for rank in (0, 1)]
    assert all("slurm_forge.process local_tasks" in each for each in words), words


def test_the_file_save_asks_for_a_checkpoint(finished: RunDirectory) -> None:
    saved = [e for e in events(finished, CheckpointCommitted) if e.reason == "SAVE file"]
    assert [e.step for e in saved] == [3], "not once, or not at the next step"
    assert not finished.save_file.exists()
    assert len(run_state(finished).attempts) == 1


def test_a_finished_run_that_is_started_again_returns_at_once(
    finished: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(AlreadyFinishedError, match="in a new run"):
        here(finished.path.parent)
    executor = submitit.LocalExecutor(folder=tmp_path)
    executor.update_parameters(tasks_per_node=2, timeout_min=1)
    assert executor.submit(ForgeJob(str(finished.path))).results() == ["run: finished"] * 2
    assert len(run_state(finished).attempts) == 1


def test_three_bad_gradients_in_a_row_roll_back_with_half_the_learning_rate(
    tmp_path: Path,
) -> None:
    ladder = [
        {"do": "skip", "times": 3},
        {"do": "rollback", "times": 1, "lr_scale": 0.5, "skip_samples": "window"},
    ]
    inject = [f"nan:samples={5 * BATCH}-{8 * BATCH - 1}"]
    run = here(tmp_path, ranks=1, inject=inject, recovery={"non_finite": ladder})
    state = run_state(run)
    assert state.status is RunStatus.FINISHED
    assert incidents(state) == [(Cause.NON_FINITE, Action.ROLLBACK)]
    assert [s.consecutive for s in state.attempts[0].skipped] == [1, 2, 3]
    (launch,) = state.attempts[0].launches
    assert launch.resumed.step == 4, "not the last save before the fault"
    (_, decision), *_ = state.attempts[0].decisions
    assert [(c.parameter, c.old, c.new) for c in decision.changes] == [
        ("lr_scale", "1", "0.5"),
        ("skipped_samples", "-", f"{5 * BATCH}-{8 * BATCH - 1}"),
    ]
    assert state.plan.lr_scale(5) == 0.5
    order = SampleOrder(0, 997, BATCH)
    for step, samples in consumed(run.path).items():
        left_out = 3 * BATCH if step >= 5 else 0
        assert samples == sorted(order.indices(step * BATCH + left_out, BATCH))


@pytest.mark.slow
def test_out_of_memory_on_one_rank_halves_the_micro_batch_and_nothing_else(tmp_path: Path) -> None:
    run = here(tmp_path, args={"faults": ["oom@5:rank1:above=4"]})
    state = run_state(run)
    assert state.status is RunStatus.FINISHED
    assert incidents(state) == [(Cause.CUDA_OOM, Action.SHRINK_MICRO_BATCH)]
    (_, decision), *_ = state.attempts[0].decisions
    assert [(c.parameter, c.old, c.new) for c in decision.changes] == [("micro_batch", "8", "4")]
    assert [incident.rank for _, incident in state.attempts[0].incidents] == [1]
    assert [(run.path / f"micro-{n}").read_text() for n in (1, 2)] == ["[8]", "[4, 4]"]
    check_samples(run)


@pytest.mark.core
def test_sigterm_brings_the_run_back_without_a_step_lost(tmp_path: Path) -> None:
    def signalled(run: RunDirectory) -> None:
        os.kill(int(run_state(run).job.removeprefix("local-")), signal.SIGTERM)

    held = Held(tmp_path, signalled, lambda state: len(state.attempts[0].notices) == 2)
    run = here(tmp_path, held, args={"hold": 6})
    state = run_state(run)
    assert state.status is RunStatus.FINISHED
    assert [attempt.outcome for attempt in state.attempts] == ["requeued", "finished"]
    assert [(c.step, c.reason) for _, c in state.attempts[0].checkpoints][-1] == (7, "stop")
    assert state.attempts[1].launches[0].resumed.step == 7
    assert len((run.path / "samples" / "a001-l001-r0.jsonl").read_text().splitlines()) == 7
    check_samples(run)


@pytest.mark.slow
def test_a_rank_that_returns_early_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    run = here(tmp_path, args={"return": 5}, recovery={"app_error": [{"do": "hold"}]})
    ((_, incident),) = run_state(run).attempts[0].incidents
    assert run_state(run).status is RunStatus.HELD
    assert (incident.cause, incident.rank, incident.step) == (Cause.APP_ERROR, 0, 5)
    assert "rank 0 returned after step 5" in incident.evidence[0].text


@pytest.mark.slow
def test_ranks_with_other_batch_sizes_are_refused_before_the_first_step(tmp_path: Path) -> None:
    run = here(tmp_path, args={"batch": [16, 32]}, recovery={"app_error": [{"do": "hold"}]})
    ((_, incident),) = run_state(run).attempts[0].incidents
    assert run_state(run).status is RunStatus.HELD
    assert "global_batch_size is 16 on rank 0 and 32 on rank 1" in incident.evidence[0].text
    assert run_state(run).high_water == 0


def test_a_call_that_can_not_work_is_held_at_once_whatever_the_ladder_says(tmp_path: Path) -> None:
    ladder = [{"do": "relaunch", "times": 3}]
    run = here(tmp_path, ranks=1, args={"until": 60}, recovery={"app_error": ladder})
    state = run_state(run)
    assert incidents(state) == [(Cause.APP_ERROR, Action.HOLD)]
    assert state.status is RunStatus.HELD and state.high_water == 0
    assert [len(attempt.launches) for attempt in state.attempts] == [1], "a useless second start"
    assert "would repeat the request; next: Write until=forge.Steps(60)" in state.reason
    ((_, incident),) = state.attempts[0].incidents
    assert incident.confidence is Confidence.CERTAIN
    assert "; next: Write until=forge.Steps(60)" in incident.evidence[0].text
    assert "(test_local_runs.py:" in incident.evidence[0].text, "not where it is written"


@pytest.mark.slow
def test_an_error_of_the_program_climbs_its_ladder_and_then_the_run_is_held(
    tmp_path: Path,
) -> None:
    ladder = [{"do": "requeue", "times": 1}]
    args = {"faults": ["exception@6:always"]}
    run = here(tmp_path, ranks=1, args=args, recovery={"app_error": ladder})
    state = run_state(run)
    assert state.status is RunStatus.HELD
    assert "the same error at the same step" in state.reason
    assert incidents(state) == [(Cause.APP_ERROR, Action.REQUEUE), (Cause.APP_ERROR, Action.HOLD)]
    words = state.attempts[1].incidents[0][1].evidence[0].text
    assert "an injected fault at step 6" in words
    assert not run.is_done()


@pytest.mark.slow
def test_the_file_stop_ends_the_run_until_it_is_taken_away(tmp_path: Path) -> None:
    held = Held(tmp_path, lambda run: run.stop_file.touch(), lambda s: s.attempts[0].notices)
    run = here(tmp_path, held, ranks=1, args={"hold": 5})
    state = run_state(run)
    assert state.status is RunStatus.STOPPED
    assert incidents(state) == [(Cause.STOP_REQUESTED, Action.STOP)]
    assert state.committed_step == 6
    here(tmp_path, ranks=1)
    assert len(run_state(run).attempts) == 1, "began although STOP is there"
    run.stop_file.unlink()
    here(tmp_path, ranks=1)
    assert run_state(run).status is RunStatus.FINISHED
    check_samples(run)


# -- submitit's debug executor: no other process --------------------------------------------------


def in_process(
    runs: Path, act: Callable[[RunDirectory], None] | None = None, **spec: Any
) -> tuple[RunDirectory, str]:
    """Run to the end in a forked process: what submitit's job came to, or its error.

    ``act`` runs on a thread beside it.
    """
    from tests.distributed.ranks import run_ranks

    job = job_from_mapping(
        {"name": "run", "entry": f"{__file__}:train", "checkpoint": {"every_steps": 4}, **spec}
    )
    run, _ = create_run(job, runs=runs, site=find_site("generic"), submitted_from=Path.cwd())

    def body(rank: int) -> str:
        before = signal.getsignal(signal.SIGTERM)
        executor = submitit.AutoExecutor(runs / "submitit", cluster="debug")
        if act is not None:
            threading.Thread(target=act, args=(run,), daemon=True).start()
        submitted = executor.submit(ForgeJob(str(run.path)))
        error = submitted.exception()
        assert signal.getsignal(signal.SIGTERM) is before, "this process would survive SIGTERM"
        return repr(error) if error is not None else submitted.result()

    (result,) = run_ranks(1, body, init=False)
    return run, result


def test_in_process_a_run_finishes(tmp_path: Path) -> None:
    run, result = in_process(tmp_path)
    assert result == "run: finished"
    assert run.is_done()
    check_samples(run)


def test_in_process_a_stopped_run_goes_on(tmp_path: Path) -> None:
    def act(run: RunDirectory) -> None:
        wait(run.path / "here")
        os.kill(os.getpid(), signal.SIGTERM)
        while not run_state(run).attempts[0].notices:
            time.sleep(0.01)
        (run.path / "go").touch()

    run, result = in_process(tmp_path, act, args={"hold": 6})
    assert result == "run: finished"
    state = run_state(run)
    assert [attempt.outcome for attempt in state.attempts] == ["requeued", "finished"]
    assert state.attempts[1].launches[0].resumed.step == 7
    check_samples(run)


def test_in_process_an_error_comes_back_as_one(tmp_path: Path) -> None:
    args = {"faults": ["exception@6:always"]}
    recovery = {"app_error": [{"do": "requeue", "times": 1}]}
    run, result = in_process(tmp_path, args=args, recovery=recovery)
    assert "ForgeError" in result
    assert "did not finish: app_error: the same error at the same step" in result
    assert run_state(run).status is RunStatus.HELD
    assert len(run_state(run).attempts) == 2


def test_what_a_stock_executor_s_task_does_not_understand_of_slurm_is_noted(
    tmp_path: Path,
) -> None:
    from tests.distributed.ranks import run_ranks

    job = job_from_mapping({"name": "run", "entry": f"{__file__}:train"})
    run, _ = create_run(job, runs=tmp_path, site=find_site("generic"), submitted_from=Path.cwd())

    def body(rank: int) -> str:
        os.environ.update(strange_task(), SUBMITIT_EXECUTOR="slurm")
        return ForgeJob(str(run.path))()

    assert run_ranks(1, body, init=False) == ["run: finished"]
    assert not_understood(run) == ["SLURM_JOB_END_TIME='tomorrow'"]


@pytest.mark.slow
def test_a_rank_0_that_holds_its_interpreters_lock_is_ended_by_its_own_witness(
    tmp_path: Path,
) -> None:
    """The conductor sits in that very process: nobody but the witness beside it can act."""
    watchdog = {"at_least": "1s", "at_most": "12s"}
    run = here(tmp_path, inject=["gil@6:rank0"], watchdog=watchdog)
    state = run_state(run)
    assert state.status is RunStatus.FINISHED
    assert len(state.attempts) == 2
    incident = state.attempts[0].incidents[-1][1]
    assert (incident.cause, incident.rank, incident.step) == (Cause.HANG, 0, 6)
    assert "C code holds the interpreter's lock" in incident.evidence[0].text
    assert "hold_interpreter" in (run.stacks(1, 1) / "rank-00000.txt").read_text()
    check_samples(run)


def test_ranks_that_no_supervisor_starts_have_the_variables_too(tmp_path: Path) -> None:
    """Those of the job file, of the site, and after trouble those of the recovery plan."""
    env = EnvironmentSets(
        always={"NCCL_DEBUG": "WARN", "NCCL_CROSS_NIC": "1"}, on_hang={"NCCL_DEBUG": "INFO"}
    )
    names = ["NCCL_DEBUG", "NCCL_CROSS_NIC", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
    job = job_from_mapping(
        {
            "name": "variables",
            "entry": "tests/jobs.py:train",
            "args": {"steps": 4, "misbehave": ["segfault@2:rank1"], "variables": names},
            "env": {"NCCL_CROSS_NIC": "0"},
            "recovery": {"crash": [{"do": "relaunch", "times": 1, "variables": "on_hang"}]},
        }
    )
    site = Site(name="tested", env=env, socket_interface="l")
    root = Path(__file__).resolve().parents[2]
    run, file = create_run(job, runs=tmp_path, site=site, submitted_from=root)
    assert run_locally(run, file, 2, lambda: None) == 0
    usual = {
        "NCCL_DEBUG": "WARN",
        "NCCL_CROSS_NIC": "0",
        "NCCL_SOCKET_IFNAME": "l",
        "GLOO_SOCKET_IFNAME": "lo",  # whose beginning NCCL knows, gloo knows as a whole
    }
    for rank in (0, 1):
        assert told_variables(run.path, rank) == [usual, {**usual, "NCCL_DEBUG": "INFO"}]
