"""What doctor promises of a cluster, held against what a real preemption there then does.

One configuration of the controller each: ``slurm-forge doctor --live --json`` is run as a person
runs it, then a real run and a job that will not leave are preempted, and every field of the
prediction is compared with what happened.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunState, RunStatus
from slurm_forge.journal.events import NoticeSeen, RequeueDone, Resumed
from slurm_forge.recovery.live_observations import (
    Receiver,
    RoundKind,
)
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    FirstSignal,
    ResumesFrom,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster
from slurm_forge.testing.cluster.spec import PartitionPreemption, PartitionSpec, QosSpec
from tests.jobs import consumed
from tests.slurm.harness import REPOSITORY, Watched, environment, job_mapping

VERB = (sys.executable, "-m", "slurm_forge.cli.main", "doctor", "--live", "--json")
#: Enough of them that the run still trains when doctor has looked.
STEPS = 600
#: Beyond what was promised before a run is back: the scheduler, and a busy machine.  Half of the
#: delay that Slurm has by default.
SLACK_S = 60.0
#: Slurm looks for grace times that are over now and then.
NOTICE_LATE_S = 35.0
_OVER = frozenset({RunStatus.FINISHED, RunStatus.HELD})
_TOP = PartitionSpec(
    name="normal", preempt_mode=PartitionPreemption.OFF, priority_tier=100, default=True
)
_GRACE = timedelta(seconds=20)
_LOW = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One configuration.  ``training`` are further arguments of ``tests/jobs.py``.

    ``hold`` is how long the nodes are taken away.
    """

    name: str
    spec: ClusterSpec
    partition: str = _LOW
    qos: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    hold: float = 1.0
    #: What the site file says beside its name.
    site: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One thing that was said, and what came."""

    name: str
    promised: str
    happened: str
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A configuration and its fields; ``seconds`` is all that it took."""

    name: str
    fields: tuple[Field, ...]
    seconds: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem and bool(self.fields) and all(each.kept for each in self.fields)


def _partitions(mode: str, grace: timedelta = timedelta(0), **more: Any) -> ClusterSpec:
    low = PartitionSpec(name=_LOW, preempt_mode=PartitionPreemption(mode), grace_time=grace)
    return ClusterSpec(partitions=(_TOP, low), **more)


def _qos(mode: str, grace: timedelta = timedelta(0), **more: Any) -> ClusterSpec:
    low = QosSpec(name="scavenge", preempt_mode=PartitionPreemption(mode), grace_time=grace)
    return ClusterSpec(
        partitions=(_TOP,), qos=(low, QosSpec(name="urgent", preempts=("scavenge",))), **more
    )


_BY_QOS: Mapping[str, Any] = {"partition": "normal", "qos": "scavenge"}
_NO_REQUEUE = {"site": {"sbatch_options": ["--no-requeue"]}}
_LONG = {"long_step": 25, "long_seconds": 60}

PROMISES: tuple[Promise, ...] = (
    Promise(name="requeue-grace", spec=_partitions("REQUEUE", _GRACE)),
    Promise(name="requeue-nograce", spec=_partitions("REQUEUE")),
    Promise(name="requeue-nograce-long-step", spec=_partitions("REQUEUE"), training=_LONG),
    Promise(name="cancel-grace", spec=_partitions("CANCEL", _GRACE)),
    Promise(name="cancel-nograce", spec=_partitions("CANCEL")),
    Promise(name="suspend", spec=_partitions("SUSPEND"), hold=20.0),
    Promise(
        name="requeue-grace-jobrequeue-0",
        spec=_partitions("REQUEUE", _GRACE, job_requeue=False),
    ),
    Promise(
        name="requeue-grace-user-signal",
        spec=_partitions("REQUEUE", _GRACE, send_user_signal=True),
    ),
    Promise(
        name="cancel-grace-user-signal",
        spec=_partitions("CANCEL", _GRACE, send_user_signal=True),
    ),
    Promise(
        name="requeue-nograce-user-signal",
        spec=_partitions("REQUEUE", send_user_signal=True),
    ),
    Promise(name="qos-requeue-grace", spec=_qos("REQUEUE", _GRACE), **_BY_QOS),
    Promise(name="qos-cancel-grace", spec=_qos("CANCEL", _GRACE), **_BY_QOS),
    Promise(name="qos-requeue-nograce", spec=_qos("REQUEUE"), **_BY_QOS),
    Promise(
        name="cancel-grace-no-requeue",
        spec=_partitions("CANCEL", _GRACE),
        **_NO_REQUEUE,
    ),
    Promise(name="cancel-nograce-no-requeue", spec=_partitions("CANCEL"), **_NO_REQUEUE),
    Promise(name="requeue-grace-no-requeue", spec=_partitions("REQUEUE", _GRACE), **_NO_REQUEUE),
    Promise(name="requeue-nograce-no-requeue", spec=_partitions("REQUEUE"), **_NO_REQUEUE),
    Promise(
        name="cancel-grace-jobrequeue-0",
        spec=_partitions("CANCEL", _GRACE, job_requeue=False),
    ),
)


def keep(promise: Promise, cluster: SlurmCluster, folder: Path) -> Kept:
    """Ask doctor, preempt, compare.  The cluster is idle and stays so."""
    began = time.monotonic()
    fields: tuple[Field, ...] = ()
    problem = ""
    folder.mkdir(parents=True)
    try:
        with cluster.configured(promise.spec):
            try:
                watched, submitted = _run_of(promise, cluster, folder)
                stubborn = _Stubborn(promise, cluster, folder)
                # While the run trains: what is asked of doctor must not depend on it.
                told = _doctor(promise, cluster, folder)
                came = _preempted(promise, cluster, watched, stubborn)
                fields = (*_compared(told, came), submit_said(submitted, came))
            finally:
                cluster.reset()
    except (ForgeError, AssertionError, KeyError, OSError, ValueError) as error:
        problem, _, story = f"{type(error).__name__}: {error}".partition("\n")
        (folder / "story.txt").write_text(story)
    return Kept(name=promise.name, fields=fields, seconds=time.monotonic() - began, problem=problem)


# --- what is promised -----------------------------------------------------------------------------


def _doctor(promise: Promise, cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    """What a person gets to read of that job, as JSON."""
    job = folder / "job.yaml"
    job.write_text(json.dumps(_job(promise)))  # which is YAML
    with environment(cluster, folder / "nodes"):
        done = cluster.run(
            *VERB,
            *("--quick", "--runs", str(folder / "runs"), *_site_of(promise, folder), str(job)),
            check=False,
            timeout=180,
            cwd=REPOSITORY,
        )
    assert done.returncode in (0, 1), done.stderr + done.stdout
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["seen"]["report"]["complete"], told["seen"]["problem"]
    assert not list((folder / "runs").glob(".doctor-live-*")), "its folder was left behind"
    return told


# --- what happens ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What a real preemption did to a real run, and to a job that would not leave."""

    first_signal: FirstSignal
    back_by: BroughtBack
    same_job: bool | None
    resumes_from: ResumesFrom
    resumed_step: int | None
    repeated: int
    back_after_s: float | None
    status: RunStatus
    attempts: int
    #: Of the one that does not leave: from its first signal to its last sign of life, None where
    #: it lived on; and which signals it saw.
    outlived_s: float | None
    stubborn_saw: tuple[str, ...]


def _preempted(
    promise: Promise, cluster: SlurmCluster, watched: Watched, stubborn: _Stubborn
) -> Happened:
    watched.wait_step(22)
    cluster.preempt(watched.job, hold=promise.hold)
    if promise.hold <= 1.0:
        # What waits for the nodes of the one that does not leave would keep the run waiting, too.
        watched.wait(lambda s: len(s.attempts) > 1 or s.status in _OVER, 180, "the run to be back")
    cluster.preempt(stubborn.job, hold=promise.hold)
    if promise.hold > 1.0:
        cluster.wait_state(watched.job, ["SUSPENDED"], 60)
    state = watched.wait(lambda s: s.status in _OVER, 180, "the end of the run")
    return _what_happened(watched, state, stubborn)


def _job(promise: Promise) -> dict[str, Any]:
    return job_mapping(
        name="run",
        args={"steps": STEPS, "pace": 0.25, "later_pace": 0.01, **promise.training},
        nodes=2,
        partition=promise.partition,
        qos=promise.qos,
        minutes=30,
        memory="1500M",
        sbatch={},
        job=promise.job,
    )


def _site_of(promise: Promise, folder: Path) -> list[str]:
    """The options for a site file of that promise, where it needs one."""
    if not promise.site:
        return []
    file = folder / "truth.yaml"
    file.write_text(json.dumps({"name": "truth", **promise.site}))
    file.chmod(0o600)
    return ["--site", str(file)]


def _run_of(promise: Promise, cluster: SlurmCluster, folder: Path) -> tuple[Watched, str]:
    """The run, submitted as a person does it, and what was promised to them by ``submit``."""
    job = folder / "submitted.yaml"
    job.write_text(json.dumps(_job(promise)))
    with environment(cluster, folder / "nodes"):
        done = cluster.run(
            *(sys.executable, "-m", "slurm_forge.cli.main", "submit", "--json"),
            *("--runs", str(folder / "runs"), *_site_of(promise, folder), str(job)),
            check=False,
            timeout=60,
            cwd=REPOSITORY,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    body = json.loads(done.stdout)
    run = RunDirectory.existing(body["path"])
    return Watched(cluster, run, read_run_file(run.spec_file), body["job"]), " ".join(body["notes"])


_STUBBORN = """\
import os, signal, sys, time
file = open(sys.argv[1], "a", buffering=1)
def saw(number, frame): file.write(f"{signal.Signals(number).name} {time.time()}\\n")
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1): signal.signal(number, saw)
file.write(f"here {time.time()}\\n")
while True:
    time.sleep(0.1)
    file.write(f"alive {time.time()}\\n")
"""


class _Stubborn:
    """A step that notes its signals and leaves only by SIGKILL."""

    def __init__(self, promise: Promise, cluster: SlurmCluster, folder: Path) -> None:
        self._notes = folder / "stubborn.txt"
        program = folder / "stubborn.py"
        program.write_text(_STUBBORN)
        qos = [f"--qos={promise.qos}"] if promise.qos else []
        self._cluster = cluster
        self.job = cluster.sbatch(
            # The shell waits behind the step, whatever it is sent.
            f"trap '' TERM USR2\nsrun {sys.executable} {program} {self._notes}\nwait",
            f"--partition={promise.partition}",
            *qos,
            "--nodes=1",
            "--time=30",
            "--mem=500M",
            "--signal=USR2@120",
            "--no-requeue",
            "--output=/dev/null",
        )
        cluster.wait_for(lambda: "here" in self._text(), 60, "the stubborn step")

    def _text(self) -> str:
        return self._notes.read_text() if self._notes.exists() else ""

    def seen(self) -> tuple[float | None, tuple[str, ...]]:
        """Seconds from the first signal to the last sign of life; None where it lives."""
        self._cluster.wait_for(self._settled, 90, "the stubborn step to end, or to live on")
        rows = [line.split() for line in self._text().splitlines()]
        times = [(name, float(at)) for name, at in (r for r in rows if len(r) == 2)]
        signals = [(name, at) for name, at in times if name.startswith("SIG")]
        names = tuple(dict.fromkeys(name for name, _ in signals))
        if not signals or self._alive():
            return None, names
        return times[-1][1] - signals[0][1], names

    def _alive(self) -> bool:
        return self._cluster.job(self.job).state in ("RUNNING", "SUSPENDED")

    def _settled(self) -> bool:
        if not self._alive():
            return self._cluster.job(self.job).state != "COMPLETING"
        record = self._cluster.job(self.job)
        # One that was only suspended runs again once its nodes are given back.
        return record.state == "RUNNING" and record.field("SuspendTime") is not None


def _what_happened(watched: Watched, state: RunState, stubborn: _Stubborn) -> Happened:
    notices = [e for _, e in watched.events(NoticeSeen) if e.what.startswith("SIG")]
    resumed = [e for _, e in watched.events(Resumed)]
    again = len(state.attempts) > 1
    outlived, saw = stubborn.seen()
    repeated = _repeated(watched)
    return Happened(
        first_signal=_first(notices[0].what if notices else ""),
        back_by=_back_by(watched, state),
        same_job=state.attempts[1].job == state.attempts[0].job if again else None,
        resumes_from=_resumed_from(again, repeated),
        resumed_step=resumed[1].step if len(resumed) > 1 else None,
        repeated=repeated,
        back_after_s=_back_after(watched) if again else None,
        status=state.status,
        attempts=len(state.attempts),
        outlived_s=outlived,
        stubborn_saw=saw,
    )


def _first(name: str) -> FirstSignal:
    if not name:
        return FirstSignal.NONE
    return FirstSignal.SIGTERM if name == "SIGTERM" else FirstSignal.USER


def _back_by(watched: Watched, state: RunState) -> BroughtBack:
    if state.status is RunStatus.HELD:
        return BroughtBack.PERSON
    if len(state.attempts) == 1:
        return BroughtBack.NOBODY
    done = [e for _, e in watched.events(RequeueDone)]
    if any(each.successor for each in done):
        return BroughtBack.SUCCESSOR
    # "found in the queue": somebody else had put it there.
    own = any(each.method == "scontrol requeue" for each in done)
    return BroughtBack.RUN if own else BroughtBack.SLURM


def _resumed_from(again: bool, repeated: int) -> ResumesFrom:
    if not again:
        return ResumesFrom.MEMORY
    return ResumesFrom.LAST_SAVE if repeated == 0 else ResumesFrom.PERIODIC


def _repeated(watched: Watched) -> int:
    """Steps that were computed more than once."""
    rows = [
        line
        for file in (watched.run.path / "samples").glob("*-r0.jsonl")
        for line in file.read_text().splitlines()
    ]
    return len(rows) - len(consumed(watched.run.path))


def _back_after(watched: Watched) -> float:
    """From the end of the first attempt, as far as it was told, to the start of the next."""
    state = watched.state
    first, second = state.attempts[:2]
    notices = [at for at, _ in watched.events(RequeueDone)]
    begun = notices[0] if notices else (first.ended or second.started)
    return second.started - begun


# --- one against the other ------------------------------------------------------------------------


def _compared(told: dict[str, Any], came: Happened) -> tuple[Field, ...]:
    promised = told["prediction"]
    notice, kill_wait = promised["notice_s"], promised["kill_wait_s"]
    fields = [
        _same("first signal", promised["first_signal"], came.first_signal.value),
        _same("back by", promised["back_by"], came.back_by.value),
        _same("same job id", promised["same_job"], came.same_job),
        _at_least("resumes from", promised["resumes_from"], came),
        _within("back after", promised["delay_s"], came.back_after_s),
        _notice(notice, kill_wait, came),
        _same("finished", RunStatus.FINISHED.value, came.status.value),
        *_reached(told, came),
    ]
    return tuple(fields)


#: What ``submit`` says of a preemption, by who then brings the run back.
_SUBMIT_SAYS = {
    BroughtBack.NOBODY: ("not preempted", "are suspended"),
    BroughtBack.RUN: ("the run requeues itself, as the same job", "preempted jobs are requeued"),
    BroughtBack.SLURM: ("preempted jobs are requeued",),
    BroughtBack.SUCCESSOR: ("a successor job is submitted",),
}


def submit_said(text: str, came: Happened) -> Field:
    """Whether what ``submit`` has told, and nothing else, is what happened."""
    said = [words for several in _SUBMIT_SAYS.values() for words in several if words in text]
    expected = _SUBMIT_SAYS.get(came.back_by, ())
    kept = bool(said) and set(said) <= set(expected)
    return Field(
        name="submit says",
        promised=", ".join(dict.fromkeys(said)) or "nothing",
        happened=came.back_by.value,
        kept=kept,
    )


def _same(name: str, promised: object, happened: object) -> Field:
    return Field(
        name=name, promised=str(promised), happened=str(happened), kept=promised == happened
    )


def _at_least(name: str, promised: str, came: Happened) -> Field:
    """A save that comes through although none could be promised is no broken promise."""
    order = [ResumesFrom.PERIODIC, ResumesFrom.LAST_SAVE, ResumesFrom.MEMORY]
    better = order.index(came.resumes_from) >= order.index(ResumesFrom(promised))
    lost = came.attempts > 1 and not came.resumed_step
    text = f"{came.resumes_from.value}"
    text += "" if came.resumed_step is None else f", step {came.resumed_step}"
    text += f", {came.repeated} steps again" if came.repeated else ""
    return Field(name=name, promised=promised, happened=text, kept=better and not lost)


def _within(name: str, promised: float | None, happened: float | None) -> Field:
    said = "-" if promised is None else f"{promised:.0f} s"
    if happened is None:
        return Field(name=name, promised=said, happened="-", kept=promised is None)
    fine = promised is not None and happened <= promised + SLACK_S
    return Field(name=name, promised=said, happened=f"{happened:.0f} s", kept=fine)


def _notice(notice: float | None, kill_wait: float, came: Happened) -> Field:
    """What the one that does not leave had, from its first signal to SIGKILL."""
    if notice is None:
        lived = "lived on" if came.outlived_s is None else f"{came.outlived_s:.0f} s"
        return Field(name="notice", promised="none", happened=lived, kept=came.outlived_s is None)
    said = f"{notice:.0f} s and {kill_wait:.0f} s to SIGKILL"
    if came.outlived_s is None:
        return Field(name="notice", promised=said, happened="lived on", kept=False)
    least, most = notice + kill_wait - 1.5, notice + kill_wait + NOTICE_LATE_S
    kept = least <= came.outlived_s <= most
    return Field(name="notice", promised=said, happened=f"{came.outlived_s:.0f} s", kept=kept)


def _reached(told: dict[str, Any], came: Happened) -> list[Field]:
    """Whether ranks hear of a real preemption what the live look said that they hear."""
    if came.first_signal is FirstSignal.NONE:
        return []
    kinds = {
        FirstSignal.SIGTERM: RoundKind.STEPS_TERM.value,
        FirstSignal.USER: RoundKind.STEPS_USER.value,
    }
    rounds = {each["kind"]: each for each in told["seen"]["report"]["rounds"]}
    sightings = rounds[kinds[came.first_signal]]["sightings"]
    fates = {s["way"]: s["fate"] for s in sightings}
    heard = came.first_signal is _first(came.stubborn_saw[0] if came.stubborn_saw else "")
    return [
        _same(
            f"a task hears {came.first_signal.value}",
            fates[Receiver.TASK.value] == "heard",
            heard,
        )
    ]
