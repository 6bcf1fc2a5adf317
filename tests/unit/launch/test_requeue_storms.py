"""Whatever befalls a run on Slurm: it ends, within its budgets, and no job of it runs twice."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path

import pytest

from slurm_forge.journal import JournalWriter, RunState, RunStatus, line_reader
from slurm_forge.journal import file as journal_file
from slurm_forge.journal.fold import advance
from slurm_forge.journal.order import causal_order, without_fenced
from slurm_forge.launch.attempt import attempt as attempt_module
from slurm_forge.launch.requeue import reconcile as asked_back
from slurm_forge.launch.requeue.requeue import (
    JobRequeuer,
    RequeueOutcome,
)
from slurm_forge.launch.submit import submission
from slurm_forge.recovery.incident.classify import classify
from slurm_forge.recovery.incident.launch_facts import LaunchFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause
from tests.fake_slurm import FakeSlurm, Runs
from tests.unit.launch.storm_life import Life, Weather


class Folded:
    """``fold`` for a journal that grows: goes on from what it has in common with the last one."""

    def __init__(self) -> None:
        self._records: list[journal_file.Record] = []
        self._states = [RunState()]

    def __call__(self, records: Iterable[journal_file.Record]) -> RunState:
        ordered = causal_order(without_fenced(records))
        pairs = zip(ordered, self._records, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
        del self._states[common + 1 :]
        for record in ordered[common:]:
            self._states.append(advance(self._states[-1], record))
        self._records = ordered
        return self._states[-1]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory where that can be had, and without reading the same lines again and again."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="forge-", dir=memory if memory.is_dir() else None))
    decode = line_reader.decode
    known: dict[tuple[bytes, str], journal_file.Record | None] = {}

    def once(line: bytes, writer: str) -> journal_file.Record | None:
        if (line, writer) not in known:
            known[line, writer] = decode(line, writer)
        return known[line, writer]

    monkeypatch.setattr(line_reader, "decode", once)
    folded = Folded()
    for module in (attempt_module, submission):
        monkeypatch.setattr(module, "fold", folded)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def live(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, weather: Weather
) -> tuple[Life, RunStatus]:
    run = RunDirectory.at(folder / f"run-{seed}")
    spec = job_from_mapping({"name": run.name, "entry": "a.b:train", "resources": {"nodes": 2}})
    file = RunFile(submitted_from=str(folder), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    # Neither YAML nor templates are what this is about.
    for module in (attempt_module, asked_back):
        monkeypatch.setattr(module, "read_run_file", lambda path: file)
    life = Life(run, file, seed, weather)
    text = life.script.read_text()
    monkeypatch.setattr(submission, "render", lambda file, site, run: text)
    in_virtual_time = partial(JournalWriter, clock=life.fake.clock.seconds)
    for module in (submission, asked_back):  # what people write down
        monkeypatch.setattr(module, "JournalWriter", in_virtual_time)
    state = life.live()
    shutil.rmtree(run.path)
    return life, state.status


WEATHERS = (
    Weather(),
    Weather(version="24.05.1"),
    Weather(partition="preempt-nograce"),
    Weather(partition="cancel"),
    Weather(requeue=False),
    Weather(people=False),
    Weather(silent=0.2, lost=0.2, busy=0.1),
)


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_happenings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    happened: Counter[str] = Counter()
    rests: Counter[RunStatus] = Counter()
    outcomes: Counter[str] = Counter()
    seed = 0
    while happened.total() < number:
        life, status = live(folder, monkeypatch, seed, WEATHERS[seed % len(WEATHERS)])
        happened += life.happenings
        outcomes += life.outcomes
        rests[status] += 1
        seed += 1
    # A storm in which nothing can go wrong would prove nothing.
    assert rests[RunStatus.FINISHED] > seed / 10 and rests[RunStatus.HELD] > seed / 50, rests
    assert {"requeued", "successor", "open", "held", "hold"} <= outcomes.keys(), outcomes
    assert {"preempt", "freeze_node", "scancel", "lost_answer", "twice"} <= happened.keys()


def test_a_cancel_in_the_grace_time_is_not_taken_for_the_preemption() -> None:
    """EndTime tells them apart: it is earlier than the end of the grace time was to be."""
    fake = FakeSlurm()
    fake.script("job.sbatch", Runs(batch_term=None))
    job = fake.submit(Path("job.sbatch"), ("-ppreempt",))
    first = fake.wait_state(job, JobState.RUNNING)
    fake.preempt(job)
    fake.wait_until(lambda: shown(fake, job).preempt_time is not None)
    noticed = shown(fake, job)
    fake.advance(timedelta(seconds=2))
    fake.cancel(job)
    facts = LaunchFacts(
        now=fake.clock.now, step=7, stopped_at=7, rank_signals=("SIGTERM",),
        batch_signals=("SIGTERM",), job_at_start=first, job_at_notice=noticed,
        job_at_end=shown(fake, job),
    )  # fmt: skip
    assert classify(facts, "1.1").cause is Cause.USER_CANCELLED


def test_what_is_said_to_be_held_is_held(folder: Path) -> None:
    """Slurm, or somebody, has requeued it while the decision was taken."""
    run = RunDirectory.at(folder / "run")
    run.create(b"made")
    fake = FakeSlurm()
    fake.script("job.sbatch", Runs(batch_term=None))
    job = fake.submit(Path("job.sbatch"))
    fake.wait_state(job, JobState.RUNNING)
    fake.requeue(job)
    journal = JournalWriter(run, attempt=1, writer="supervisor")
    job_requeuer = JobRequeuer(fake, job=job, script=None, journal=journal, fence=lambda: None)
    assert job_requeuer.hold("for a person to judge").outcome is RequeueOutcome.HELD
    assert shown(fake, job).priority == 0


def shown(fake: FakeSlurm, job: str) -> JobRecord:
    record = fake.show_job(job)
    assert record is not None
    return record
