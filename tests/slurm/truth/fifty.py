"""``python -m tests.slurm.truth.fifty``: one run that is preempted again and again, for real.

Right is: it finishes, with the bits of a run that nothing happened to, without a step computed
twice; Slurm started it once more than it was preempted (from 24.05 on there may be one start more,
of the finished run), never held it, and nobody requeued it twice; the journal has every
interruption as what it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunState, RunStatus
from slurm_forge.journal.events import Held
from slurm_forge.journal.state import AttemptState
from slurm_forge.slurm.versions import has
from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster, Tracking
from slurm_forge.testing.cluster.machine import why_not_here
from slurm_forge.vocabulary.cause import Cause
from tests.jobs import consumed
from tests.slurm.harness import Watched, Way, submit

_NODES = 2
_PARTITION = "preempt"
_EVERY = 20
#: Seconds per step, and steps that an attempt may do until it is struck: the run must not end
#: before the last preemption.
_PACE = 0.25
_STEPS_EACH = 6
#: Not how long it takes: a busy machine is not what is judged.
_BACK_S = 300.0
_LOOK_S = 1.0


class Kind(str, Enum):
    """Who takes the nodes away, and with how much notice."""

    GRACE = "grace"
    NO_GRACE = "no grace"
    ADMIN = "scontrol requeue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One interruption as the journal tells of it; None where it does not.

    ``commit_s`` is from the notice to the checkpoint of the stop, ``back_s`` from there until
    ranks have loaded it.  ``step`` is where they went on.
    """

    number: int
    kind: Kind
    cause: str
    confidence: str
    step: int | None
    commit_s: float | None
    back_s: float | None


@dataclass
class _Struck:
    """The run under fire, and what was seen that should not have been."""

    watched: Watched
    kinds: list[Kind] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    _look: float = 0.0

    def strike(self, kind: Kind) -> None:
        """Interrupt the present attempt, and wait until the next one trains."""
        cluster, job = self.watched.cluster, self.watched.job
        attempt = len(self.kinds) + 1
        self._wait_training(attempt)
        self.kinds.append(kind)
        if kind is Kind.ADMIN:
            cluster.run("scontrol", "requeue", job)
        elif kind is Kind.NO_GRACE:
            with _no_grace(cluster):
                preemptor = cluster.preempt(job)
                cluster.wait_state(preemptor, ("RUNNING", "COMPLETED"), 60)
        else:
            cluster.preempt(job)
        self._wait_training(attempt + 1)

    def _wait_training(self, attempt: int) -> None:
        """Until an attempt has done a step: by the samples, as the journal tells of it later."""
        folder = self.watched.run.path / "samples"

        def trains() -> bool:
            self._look_for_a_hold()
            return any(file.stat().st_size for file in folder.glob(f"a{attempt:03d}-*-r0.jsonl"))

        self.watched.cluster.wait_for(trains, _BACK_S, f"attempt {attempt} to train")

    def _look_for_a_hold(self) -> None:
        if time.monotonic() < self._look:
            return
        self._look = time.monotonic() + _LOOK_S
        record = self.watched.cluster.job(self.watched.job)
        if "held" in record.reason.lower() or record.reason == "JobHoldMaxRequeue":
            self.complaints.append(f"held before attempt {len(self.kinds) + 1}: {record.reason}")


@contextlib.contextmanager
def _no_grace(cluster: SlurmCluster) -> Iterator[None]:
    """The partition gives no notice inside the block."""
    spec = next(p for p in cluster.spec.partitions if p.name == _PARTITION)
    change = ("scontrol", "update", f"PartitionName={_PARTITION}")
    cluster.run(*change, "GraceTime=0")
    try:
        yield
    finally:
        cluster.run(*change, f"GraceTime={int(spec.grace_time.total_seconds())}")


# --- the judgement ------------------------------------------------------------------------------


def blows_of(state: RunState, kinds: Sequence[Kind]) -> list[Blow]:
    """What the journal tells of each interruption, in order."""
    following: list[AttemptState | None] = [*state.attempts[1:], None]
    pairs = list(zip(state.attempts, following, strict=True))[: len(kinds)]
    return [
        _blow(number, kind, attempt, later)
        for number, (kind, (attempt, later)) in enumerate(zip(kinds, pairs, strict=False), 1)
    ]


def _blow(number: int, kind: Kind, attempt: AttemptState, later: AttemptState | None) -> Blow:
    notice = min((at for at, _ in attempt.notices), default=None)
    committed = max((at for at, _ in attempt.checkpoints), default=None)
    again = later.launches[0] if later is not None and later.launches else None
    back = again.resumed_at if again is not None else None
    incident = attempt.incidents[-1][1] if attempt.incidents else None
    return Blow(
        number=number,
        kind=kind,
        cause="-" if incident is None else incident.cause.value,
        confidence="-" if incident is None else incident.confidence.value,
        step=again.resumed.step if again is not None and again.resumed is not None else None,
        commit_s=_between(notice, committed),
        back_s=_between(committed, back),
    )


def _between(first: float | None, second: float | None) -> float | None:
    if first is None or second is None or second < first:
        return None
    return round(second - first, 2)


def _complaints(struck: _Struck, reference: Watched) -> Iterator[str]:
    """Everything that is not as it should be."""
    watched, count = struck.watched, len(struck.kinds)
    state, cluster = watched.state, watched.cluster
    yield from struck.complaints
    if state.status is not RunStatus.FINISHED:
        yield f"the run is {state.status.value}: {state.reason}"
    if len(state.attempts) != count + 1:
        yield f"{len(state.attempts)} attempts, right is {count + 1}"
    restarts = cluster.job(watched.job).restarts
    starts = [r for r in cluster.sacct(watched.job) if r.job_id == watched.job]
    # Newer Slurm takes the normal end of a job that was requeued in its grace time for one in the
    # grace time, too, and starts it once more: DONE ends that start at once.
    more = int(has(cluster.state.platform.version, "requeues a job that exits in its grace time"))
    if not count <= restarts <= count + more or len(starts) != restarts + 1:
        yield f"Slurm counts {restarts} restarts and {len(starts)} starts for {count} interruptions"
    for attempt in state.attempts:
        if len(attempt.requeues) > 1:
            yield f"attempt {attempt.number} was requeued {len(attempt.requeues)} times"
        if any(done.successor for _, done in attempt.requeues):
            yield f"attempt {attempt.number} has a successor beside the requeued job"
    for _, event in watched.events(Held):
        yield f"held by ourselves: {event}"
    for blow in blows_of(state, struck.kinds):
        right = Cause.ADMIN_REQUEUE if blow.kind is Kind.ADMIN else Cause.PREEMPTED
        if blow.cause != right.value:
            yield f"interruption {blow.number} ({blow.kind.value}) is {blow.cause} in the journal"
    twice, hurried = repeated_steps(watched), sum(k is not Kind.GRACE for k in struck.kinds)
    if twice > _EVERY * hurried:
        yield f"{twice} steps were computed twice"
    if state.status is RunStatus.FINISHED:
        if consumed(watched.run.path) != consumed(reference.run.path):
            yield "other samples than those of the uninterrupted run"
        if watched.digest() != reference.digest():
            yield "another result than that of the uninterrupted run"


def repeated_steps(watched: Watched) -> int:
    """Steps that were computed more than once, on rank 0."""
    files = (watched.run.path / "samples").glob("*-r0.jsonl")
    rows = sum(len(file.read_text().splitlines()) for file in files)
    return rows - len(consumed(watched.run.path))


# --- the command --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 where all is as it should be."""
    given = _parser().parse_args(argv)
    reason = why_not_here(os.environ.get("PATH", os.defpath))
    if reason is not None:
        print(f"no Slurm can be started here: {reason}", file=sys.stderr)
        return 2
    kinds = list(_kinds(given.count, mixed=given.mixed))
    place = Path(tempfile.mkdtemp(prefix="fifty-", dir="/tmp"))
    place.chmod(0o755)
    spec = ClusterSpec(nodes=_NODES, tracking=Tracking(given.tracking))
    try:
        with SlurmCluster(place / "slurm", spec) as cluster:
            print(
                f"{given.count} interruptions of one run of {_NODES} ranks, started by the "
                f"{given.way} way; processes tracked by {cluster.tracking.value}",
                flush=True,
            )
            struck, complaints, seconds = _under_fire(cluster, place, Way(given.way), kinds)
            blows = blows_of(struck.watched.state, struck.kinds)
            verdict = _verdict(struck, complaints, seconds)
            print(_table(blows))
            print(verdict)
            if complaints:
                (place / "story.txt").write_text(struck.watched.story())
    finally:
        if given.keep:
            print(f"the run is in {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)
    if given.json is not None:
        told = {"verdict": verdict, "complaints": complaints, "blows": [asdict(b) for b in blows]}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if complaints else 0


def _kinds(count: int, *, mixed: bool) -> Iterator[Kind]:
    for number in range(1, count + 1):
        if mixed and number == count // 2 + 1:
            yield Kind.ADMIN
        else:
            yield Kind.NO_GRACE if mixed and number % 3 == 0 else Kind.GRACE


def _under_fire(
    cluster: SlurmCluster, place: Path, way: Way, kinds: Sequence[Kind]
) -> tuple[_Struck, list[str], float]:
    steps = _STEPS_EACH * len(kinds) + _EVERY
    common = {"nodes": _NODES, "checkpoint": {"every_steps": _EVERY, "every_minutes": None}}
    reference = submit(
        cluster, place, name="reference", partition="normal", args={"steps": steps}, **common
    )
    reference.wait_finished()
    began = time.monotonic()
    args = {"steps": steps, "pace": _PACE}
    watched = submit(
        cluster,
        place,
        name="struck",
        way=way,
        partition=_PARTITION,
        minutes=60,
        args=args,
        **common,
    )
    struck = _Struck(watched)
    try:
        for kind in kinds:
            struck.strike(kind)
            _progress(len(struck.kinds), len(kinds), began)
        watched.wait_finished(60 + steps * _PACE)
        cluster.wait_state(watched.job, "COMPLETED", 30)
    except (ForgeError, pytest.fail.Exception) as error:
        struck.complaints.append(str(error).partition("\n")[0])
        if not struck.kinds:
            return struck, list(struck.complaints), time.monotonic() - began
    return struck, list(_complaints(struck, reference)), time.monotonic() - began


def _progress(done: int, of: int, began: float) -> None:
    if done % 10 == 0 or done == of:
        seconds = time.monotonic() - began
        print(f"{done} of {of} after {seconds:.0f} s", file=sys.stderr, flush=True)


def _table(blows: Sequence[Blow]) -> str:
    lines = [f"{'':>4} {'kind':<17} {'cause':<14} {'step':>5} {'to commit':>10} {'to running':>11}"]
    for blow in blows:
        lines.append(
            f"{blow.number:>4} {blow.kind.value:<17} {blow.cause:<14} "
            f"{'-' if blow.step is None else blow.step:>5} "
            f"{_seconds(blow.commit_s):>10} {_seconds(blow.back_s):>11}"
        )
    for kind in Kind:
        mine = [blow for blow in blows if blow.kind is kind]
        if mine:
            lines.append(
                f"{kind.value}, {len(mine)} times, median (least-most): notice to committed "
                f"{_spread([b.commit_s for b in mine])}, committed to running again "
                f"{_spread([b.back_s for b in mine])}"
            )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = statistics.median(known)
    return f"{middle:.2f} s ({min(known):.2f}-{max(known):.2f}, {len(known)} known)"


def _verdict(struck: _Struck, complaints: Sequence[str], seconds: float) -> str:
    if complaints:
        return "\n".join(["WRONG", *(f"  ! {complaint}" for complaint in complaints)])
    return (
        f"right: {len(struck.kinds)} interruptions in {seconds:.0f} s, finished with the digest of "
        f"the uninterrupted run, {len(struck.watched.state.attempts)} attempts, "
        f"{repeated_steps(struck.watched)} steps computed twice, never held, nothing requeued twice"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/fifty-preemptions", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="how often (default: %(default)s)")
    parser.add_argument("--way", choices=["template", "forge"], default="template")
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="every third without grace, and one by an administrator's scontrol requeue",
    )
    parser.add_argument(
        "--tracking",
        choices=[tracking.value for tracking in Tracking],
        default=Tracking.AUTO.value,
        help="how Slurm finds the processes of a job (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the table for programs, too")
    parser.add_argument("--keep", action="store_true", help="leave the run where it is")
    return parser


if __name__ == "__main__":
    sys.exit(main())
