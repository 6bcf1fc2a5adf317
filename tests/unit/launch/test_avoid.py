"""What an attempt takes from the node ledger and adds to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.documents import build, load
from slurm_forge.errors import SlurmUnreachableError
from slurm_forge.journal import Record, fold
from slurm_forge.journal import events as ev
from slurm_forge.knobs import Knobs
from slurm_forge.launch.nodes.excluded_nodes import (
    NodeExcluder,
    exclusion_at_submission,
    exclusion_now,
    job_exclusion,
    nodes_of,
    open_ledger,
    partition_of,
)
from slurm_forge.node_ledger import LedgerReading, NodeLedger
from slurm_forge.recovery.nodes.statements import BY_HAND, Ledger, NodeRelease, Strike
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

NOW = 1_800_000_000.0
DAY = 86_400.0
PARTITION = frozenset(f"n{number:02d}" for number in range(20))
ALLOCATED = ("n05", "n06", "n07", "n08")


def job(resources: str = "{nodes: 4}", inject: str = "[]") -> JobSpec:
    text = f"name: tiny\nentry: tiny:train\nresources: {resources}\ninject: {inject}\n"
    return build(JobSpec, load(text, "job.yaml"))


def lost(node: str = "n06", number: int = 1) -> Incident:
    return Incident(
        id=f"1.{number}", cause=Cause.NODE_FAIL, confidence=Confidence.CERTAIN, hosts=(node,)
    )


@dataclass
class Bench:
    """An attempt on four nodes, with a clock of its own."""

    folder: Path
    now: float = NOW
    told: list[str] = field(default_factory=list)

    def ledger(self) -> NodeLedger:
        return NodeLedger(
            folder=self.folder / "nodes", cluster="hill", host="n05", clock=lambda: self.now
        )

    def avoider(
        self,
        *,
        run: str = "a",
        ledger: NodeLedger | None = None,
        resources: str = "{nodes: 4}",
        inject: str = "[]",
        partition: frozenset[str] | None = PARTITION,
        patience: timedelta = timedelta(seconds=20),
    ) -> NodeExcluder:
        return NodeExcluder(
            self.ledger() if ledger is None else ledger,
            RunDirectory.at(self.folder / "runs" / run),
            job=job(resources, inject),
            nodes=ALLOCATED,
            partition=partition,
            tell=self.told.append,
            clock=lambda: self.now,
            patience=patience,
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_one_run_saw_every_other_run_leaves_out(bench: Bench) -> None:
    event = bench.avoider().strike(lost())
    assert event is not None
    assert (event.nodes, event.cause, event.incident_id) == (("n06",), "node_fail", "1.1")
    assert event.excluded == ("n06",)
    assert event.until is not None
    assert 2 * DAY < event.until - NOW < 3 * DAY
    other = bench.avoider(run="b")
    assert other.nodes_to_exclude() == ("n06",)
    assert other.exclusion().exclude == ("n06",)
    bench.now = event.until + 60
    assert other.nodes_to_exclude() == ()


def test_a_first_strike_is_written_down_and_leaves_nothing_out(bench: Bench) -> None:
    avoider = bench.avoider()
    hang = replace(lost(), cause=Cause.HANG, confidence=Confidence.LIKELY)
    event = avoider.strike(hang)
    assert event is not None
    assert (event.nodes, event.excluded, event.until) == (("n06",), (), None)
    again = avoider.strike(replace(hang, id="1.2"))
    assert again is not None
    assert again.excluded == (), "of one run it counts once in some hours"
    bench.now += 7 * 3600
    again = avoider.strike(replace(hang, id="1.3"))
    assert again is not None
    assert again.excluded == ("n06",)


def test_a_rehearsal_convicts_no_node(bench: Bench) -> None:
    crash = replace(lost(), cause=Cause.CRASH)
    assert bench.avoider().strike(crash) is not None
    rehearsed = bench.avoider(run="b", inject="[kill@3]")
    assert rehearsed.strike(crash) is None
    assert rehearsed.strike(lost()) is not None, "nobody makes Slurm lose a node on purpose"


def test_the_same_incident_told_twice_counts_once(bench: Bench) -> None:
    avoider = bench.avoider()
    hang = replace(lost(), cause=Cause.HANG, confidence=Confidence.LIKELY)
    avoider.strike(hang)
    event = avoider.strike(hang)
    assert event is not None
    assert event.excluded == ()


def test_until_is_when_the_first_of_them_may_be_used_again(bench: Bench) -> None:
    earlier = Strike(node="n06", time=NOW, weight=0.75, cause="hang", by="bob")
    pinned = Strike(node="n07", time=NOW, weight=1.0, cause=BY_HAND, until=NOW + 30 * DAY)
    bench.ledger().add([earlier, pinned])
    event = bench.avoider().strike(replace(lost(), hosts=("n06", "n07")))
    assert event is not None
    assert event.excluded == ("n06", "n07")
    assert event.until is not None
    assert event.until < NOW + 5 * DAY


@pytest.mark.parametrize(
    "incident",
    [
        replace(lost(), cause=Cause.PREEMPTED),
        replace(lost(), cause=Cause.APP_ERROR),
        replace(lost(), hosts=()),
        replace(lost(), hosts=("login1",)),
    ],
    ids=["preempted", "exception", "no host", "not a node of the job"],
)
def test_what_says_nothing_of_a_node_writes_nothing(bench: Bench, incident: Incident) -> None:
    assert bench.avoider().strike(incident) is None
    assert not (bench.folder / "nodes").exists()


def test_a_host_that_knows_itself_by_a_longer_name(bench: Bench) -> None:
    event = bench.avoider().strike(replace(lost(), hosts=("n06.cluster.example.org",)))
    assert event is not None
    assert event.nodes == ("n06",)


def test_a_release_from_elsewhere_is_heard_by_a_run_that_struck(bench: Bench) -> None:
    avoider = bench.avoider()
    avoider.strike(lost())
    bench.now += 60
    bench.ledger().add([NodeRelease(node="n06", time=bench.now, by="ann")])
    assert avoider.nodes_to_exclude() == ()


def test_the_complete_list_holds_the_jobs_own_and_the_plans(bench: Bench) -> None:
    bench.avoider().strike(lost())
    avoider = bench.avoider(resources='{nodes: 4, exclude: "n[01-02]"}')
    left = avoider.exclusion(also=("n11", "n02"))
    assert left.exclude == ("n01", "n02", "n11", "n06")
    assert [each.node for each in left.nodes] == ["n06"]
    # What the plan leaves out is not said twice, and takes nothing of the ledger's share.
    left = avoider.exclusion(also=("n06",))
    assert (left.exclude, left.nodes) == (("n01", "n02", "n06"), ())


def test_the_ledger_never_takes_what_the_job_needs(bench: Bench) -> None:
    bench.avoider().strike(lost())
    small = frozenset(("n05", "n06", "n07", "n08"))
    assert bench.avoider(partition=small).nodes_to_exclude() == ()
    assert bench.avoider(partition=small).nodes_to_exclude(needed=3) == ("n06",)
    assert bench.avoider(partition=None).nodes_to_exclude() == ("n06",)
    assert bench.avoider(resources="{nodes: 4, nodelist: n06}").nodes_to_exclude() == ()


def test_without_the_partitions_nodes_none_is_named_that_may_be_gone(bench: Bench) -> None:
    bench.ledger().add([Strike(node="old", time=NOW, weight=1.0, cause=BY_HAND)])
    bench.avoider().strike(lost())
    left = bench.avoider(partition=None).exclusion(also=("n11",))
    assert left.exclude == ("n11", "n06")


def test_a_list_that_is_a_file_is_left_alone() -> None:
    struck = Ledger((Strike(node="n06", time=NOW, weight=1.0, cause=BY_HAND),))
    for text in ("{exclude: /home/ann/bad}", "{nodelist: /home/ann/good}"):
        left = job_exclusion(struck, job(text), PARTITION, NOW, also=("n11",))
        assert left.nodes == ()
    assert not job_exclusion(struck, job("{exclude: /home/ann/bad}"), PARTITION, NOW).readable


def test_a_relaunch_leaves_only_for_what_this_attempt_saw(bench: Bench) -> None:
    bench.avoider(run="b").strike(lost("n07"))
    avoider = bench.avoider()
    assert avoider.nodes_to_exclude() == ("n07",)
    assert avoider.struck_here() == ()
    bench.now += DAY
    avoider.strike(lost("n06"))
    assert avoider.struck_here() == ("n06",)


def test_the_list_of_a_waiting_job_follows_the_ledger(bench: Bench) -> None:
    avoider = bench.avoider()
    # What somebody has put there, in the queue or on the command line, stays.
    assert avoider.excluded("n[01-02]") is None
    assert avoider.excluded(None) is None
    avoider.strike(lost())
    assert avoider.excluded("n[01-02]") == ("n01", "n02", "n06")
    assert avoider.excluded("n[01-02,06]") is None
    assert avoider.excluded("n01", also=("n11",)) == ("n01", "n11", "n06")
    # The job needs four, and somebody else takes sixteen of twenty.
    rest = ",".join(sorted(PARTITION - set(ALLOCATED)))
    assert avoider.excluded(rest) is None
    bench.now += 60
    bench.ledger().add([NodeRelease(node="n06", time=bench.now, by="ann")])
    assert avoider.excluded("n[01-02,06]", own=("n06",)) == ("n01", "n02")
    assert avoider.excluded("n06", own=("n06",)) == ()
    assert avoider.excluded("/home/ann/bad", own=("n06",)) is None
    own = bench.avoider(resources="{nodes: 4, exclude: n06}")
    assert own.excluded("n06", own=("n06",)) is None


def test_what_a_person_left_out_stays_whatever_the_ledger_says_of_it(bench: Bench) -> None:
    bench.ledger().add(
        [
            NodeRelease(node="n03", time=NOW - 40 * DAY),
            Strike(node="n04", time=NOW - 30 * DAY, weight=0.4, cause="crash", run="/b"),
        ]
    )
    avoider = bench.avoider()
    assert avoider.excluded("n[03-04,09]") is None
    assert avoider.excluded("n[03-04,09]", own=("n04",)) == ("n03", "n09")
    # What is ours is used again only once nothing speaks against it.
    avoider.strike(lost())
    assert avoider.excluded("n[03,06]", own=("n06",)) is None
    bench.now += 9 * DAY
    assert avoider.excluded("n[03,06]", own=("n06",)) == ("n03",)


def test_the_journal_says_what_a_run_added_itself() -> None:
    plan = RecoveryPlan(exclude_nodes=("n11",))
    taken = Decision(
        incident_id="1.1", cause=Cause.CRASH, action=Action.REQUEUE, reason="x", plan=plan
    )
    events = (
        ev.NodesStruck(nodes=("n06", "n07"), cause="hang", excluded=("n06",)),
        ev.DecisionTaken(decision=taken),
        ev.Note(text="n12"),
    )
    records = [
        Record(attempt=1, launch=1, sequence=i, time=NOW, writer="supervisor", event=event)
        for i, event in enumerate(events)
    ]
    assert fold(records).excluded == {"n06", "n11"}


# When the file system is not there


class Broken(NodeLedger):
    """Fails at everything."""

    __slots__ = ()

    def read(self) -> LedgerReading:
        return LedgerReading(
            ledger=Ledger(), problems=("nodes: Stale file handle",), of_others=("4242: a link",)
        )

    def add(self, entries: object) -> None:
        raise OSError(116, "Stale file handle", "nodes")


def test_a_broken_ledger_is_told_once_and_stops_nothing(bench: Bench) -> None:
    avoider = bench.avoider(ledger=Broken(folder=bench.folder, cluster="hill"))
    event = avoider.strike(lost())
    assert event is not None
    # The run itself leaves the node out all the same.
    assert event.excluded == ("n06",)
    assert avoider.nodes_to_exclude() == ("n06",)
    avoider.strike(lost("n07", 2))
    reading = [told for told in bench.told if told == "the node ledger: nodes: Stale file handle"]
    assert len(reading) == 1
    assert len(bench.told) == 2, "and nothing of what others have put there"


@dataclass(frozen=True, kw_only=True)
class Hung(NodeLedger):
    """A file system that has stopped answering."""

    wait: Callable[[], object]

    first: list[LedgerReading] = field(default_factory=list)

    def read(self) -> LedgerReading:
        if not self.first:
            self.wait()
        return self.first.pop()

    def add(self, entries: object) -> None:
        self.wait()


def test_a_hung_file_system_holds_up_no_requeue(bench: Bench) -> None:
    free = threading.Event()
    hung = Hung(folder=bench.folder, cluster="hill", wait=free.wait)
    begun = time.monotonic()
    try:
        avoider = bench.avoider(ledger=hung, patience=timedelta(milliseconds=50))
        event = avoider.strike(lost())
        assert event is not None
        assert avoider.nodes_to_exclude() == ("n06",)
    finally:
        free.set()
    assert time.monotonic() - begun < 60
    assert bench.told == ["the node ledger: no answer within 0.025 s"]


def test_what_was_read_before_it_hung_counts(bench: Bench) -> None:
    free = threading.Event()
    lost_once = Strike(node="n08", time=NOW, weight=1.9, cause="node_fail")
    hung = Hung(
        folder=bench.folder,
        cluster="hill",
        wait=free.wait,
        first=[LedgerReading(ledger=Ledger((lost_once,)))],
    )
    try:
        excluder = bench.avoider(ledger=hung, patience=timedelta(milliseconds=100))
        assert excluder.nodes_to_exclude() == ("n08",)
    finally:
        free.set()
    assert len(bench.told) == 1


def test_a_hung_file_system_holds_up_no_submission(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def hang(self: NodeLedger) -> LedgerReading:
        free.wait()
        return LedgerReading(ledger=Ledger())

    monkeypatch.setattr(NodeLedger, "read", hang)
    try:
        left = exclusion_at_submission(
            job(),
            Site(name="hill"),
            knobs=Knobs(nodes=str(bench.folder / "nodes")),
            cluster="hill",
            partitions=(),
            patience=timedelta(milliseconds=50),
        )
    finally:
        free.set()
    assert left.exclude == ()
    assert left.problems == ("the node ledger: no answer within 0.025 s",)


# Which nodes a job could have


def test_the_nodes_of_a_partition() -> None:
    records = (
        PartitionRecord(name="a", nodes="n[1-3]", is_default=True),
        PartitionRecord(name="b", nodes="n[3-5]"),
        PartitionRecord(name="empty", nodes=None),
        PartitionRecord(name="odd", nodes="n[1-"),
    )
    assert nodes_of(records, "a") == {"n1", "n2", "n3"}
    assert nodes_of(records, None) == {"n1", "n2", "n3"}
    assert nodes_of(records, "a,b") == {"n1", "n2", "n3", "n4", "n5"}
    assert nodes_of(records, "a,absent") is None
    assert nodes_of(records, "empty") is None
    assert nodes_of(records, "odd") is None
    assert nodes_of((), None) is None


@dataclass
class Answers:
    """A Slurm that knows one partition, or nothing."""

    record: PartitionRecord | None = None
    silent: bool = False

    def show_partition(self, name: str) -> PartitionRecord | None:
        if self.silent:
            raise SlurmUnreachableError(("scontrol",), 1, "no controller")
        return self.record


def test_a_slurm_that_does_not_answer_knows_no_partition() -> None:
    known = Answers(PartitionRecord(name="a", nodes="n[1-3]"))
    assert partition_of(known, "a") == {"n1", "n2", "n3"}  # type: ignore[arg-type]
    assert partition_of(known, None) is None  # type: ignore[arg-type]
    assert partition_of(Answers(), "a") is None  # type: ignore[arg-type]
    assert partition_of(Answers(silent=True), "a") is None  # type: ignore[arg-type]


@dataclass
class Cluster:
    """A Slurm that answers what a submission asks, or nothing."""

    silent: bool = False

    def show_config(self) -> ConfigRecord:
        if self.silent:
            raise SlurmUnreachableError(("scontrol",), 1, "no controller")
        return ConfigRecord(cluster_name="hill")

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        return (PartitionRecord(name="a", nodes="n[00-19]", is_default=True),)


def test_a_submission_from_python_asks_slurm_and_does_without(bench: Bench) -> None:
    bench.now = time.time()
    bench.avoider().strike(lost())
    knobs = Knobs(nodes=str(bench.folder / "nodes"))
    site = Site(name="hill")
    left = exclusion_now(Cluster(), job(), site, knobs)  # type: ignore[arg-type]
    assert left.exclude == ("n06",)
    silent = exclusion_now(Cluster(silent=True), job(), site, knobs)  # type: ignore[arg-type]
    assert silent.exclude == ()
    of_group = Site(name="hill", node_ledger=str(bench.folder / "nodes"))
    left = exclusion_now(Cluster(), job(), of_group, Knobs())  # type: ignore[arg-type]
    assert left.exclude == ("n06",)


def test_a_ledger_for_a_cluster_without_a_name(tmp_path: Path) -> None:
    ledger = open_ledger(Knobs(nodes=str(tmp_path / "nodes")), cluster=None)
    ledger.add([Strike(node="n06", time=time.time(), weight=1.0, cause=BY_HAND)])
    assert [each.node for each in ledger.read().ledger.strikes] == ["n06"]
