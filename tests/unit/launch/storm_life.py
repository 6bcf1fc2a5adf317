"""One run on a fake Slurm to which everything happens, with the real claims, journal and ladder."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunState, RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.launch.attempt.attempt import (
    REQUEUEING,
    StartRefusal,
)
from slurm_forge.launch.requeue.reconcile import (
    bring_back,
    reconcile,
)
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory, list_claims
from slurm_forge.site.model import Site
from slurm_forge.slurm.states import ACTIVE, PENDING_LIKE, JobState
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import INSTABILITY, Cause
from slurm_forge.vocabulary.decision import Action
from tests.fake_slurm import (
    Disturbance,
    FakeSlurm,
    FakeSlurmSpec,
    Request,
    Start,
)
from tests.fake_slurm.job import FakeJob
from tests.unit.launch.storm_attempt import Supervised, secs

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
#: A cancel in the grace time of a preemption is taken for the preemption: PreemptTime stays set.
#: And what Slurm has requeued already is requeued once more, although it was cancelled since.
CANCEL_IN_GRACE_IS_SEEN = True
#: ``requeuehold`` of a job that waits already holds nothing, and is taken for done; and a start
#: after one that nobody answered is taken for released, although Slurm itself has requeued the job.
HOLDS_ARE_SURE = True
AT_REST = (RunStatus.FINISHED, RunStatus.HELD, RunStatus.STOPPED, RunStatus.CANCELLED)


@dataclass(frozen=True)
class Weather:
    """How bad it is: shares of requests that go wrong, and how many happenings."""

    happenings: int = 12
    silent: float = 0.03
    lost: float = 0.03
    busy: float = 0.02
    partition: str = "preempt"
    requeue: bool = True
    version: str = "22.05.8"
    #: Whether people and administrators meddle as well.
    people: bool = True


class Broken(AssertionError):
    """A promise that was not kept."""


@dataclass
class Life:
    """A run and what befalls it; ``live`` goes through all of it and checks every promise."""

    run: RunDirectory
    file: RunFile
    seed: int
    weather: Weather
    happenings: Counter[str] = field(default_factory=Counter)
    decided: Counter[Action] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[StartRefusal] = field(default_factory=Counter)
    step: int = 0
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.left = self.weather.happenings
        self.fake = FakeSlurm(
            FakeSlurmSpec(
                nodes=NODES, user=person(), version=self.weather.version,
                job_requeue=self.weather.requeue,
            )
        )  # fmt: skip
        self.fake.network.disturb = self._asked
        self.fake.network.patience = secs(20)
        self.script = self.run.submissions / "job.sbatch"
        self.script.write_text(
            f"#!/bin/bash\n#SBATCH --nodes=2 --time=00:20:00 -p {self.weather.partition}\n"
        )
        self.fake.script(self.script.name, self._program)
        self._supervised: dict[int, Supervised] = {}
        self._starts: list[Start] = []  # keeps them alive, so that no two have one id()
        #: Jobs that somebody has cancelled, and when, until somebody asks for the run to go on.
        self.cancelled: dict[str, float] = {}
        self._twice = False
        self._released: set[str] = set()
        #: Jobs for which a hold has been asked and not been answered.
        self.holding: set[str] = set()

    def _program(self, start: Start) -> Supervised:
        made = Supervised(self, start)
        self._supervised[id(start)] = made
        self._starts.append(start)
        return made

    # -- watched ------------------------------------------------------------------------------

    def _asked(self, request: Request) -> Disturbance:
        self._check(request)
        if request.inside is None:
            return Disturbance.NONE  # a person asks again until there is an answer
        weather, chance = self.weather, self.random.random()
        for share, disturbance in (
            (weather.silent, Disturbance.SILENT),
            (weather.lost, Disturbance.LOST_ANSWER),
            (weather.busy, Disturbance.BUSY),
        ):
            if chance < share:
                self.happened(disturbance.value, free=True)
                return disturbance
            chance -= share
        return Disturbance.NONE

    def _check(self, request: Request) -> None:
        argv = request.argv
        back = argv[0] == "sbatch" or argv[1] in ("requeue", "requeuehold")
        if request.inside is None and argv[1] == "release":
            self._released.add(argv[2])
        if request.inside is None or not back:
            return
        asker = self._supervised[id(request.inside)].attempt
        self.promise(asker is not None, "who has claimed nothing asks for nothing")
        assert asker is not None
        newest = max(list_claims(self.run))
        self.promise(asker.claim.attempt == newest, f"attempt {asker.claim.attempt} was fenced")
        self.promise(not self.run.is_done(), "a finished run asks for nothing")
        asking = self._supervised[id(request.inside)]
        goes_on = asking.decision is not None and asking.decision.action in REQUEUEING
        self.promise(goes_on or argv[1] == "requeuehold", f"a run that is to rest asks for {argv}")
        at = self.cancelled.get(request.inside.job)
        hidden = asking.told is not None and (
            asking.told.preempt_time is not None or asking.told.restarts > request.inside.restarts
        )
        if at is not None and hidden and not CANCEL_IN_GRACE_IS_SEEN:
            self.happened("cancelled in the grace time", free=True)
            del self.cancelled[request.inside.job]
            return
        if at is not None and asking.told_at <= at:
            self.happened("requeued unknowing", free=True)  # Slurm had not answered since
            del self.cancelled[request.inside.job]
            return
        self.promise(at is None, f"job {request.inside.job} was cancelled: {argv}")

    def has_started(self, mine: Supervised, start: Start) -> None:
        others = [
            job.ref
            for job in self.fake.controller.jobs.values()
            if job.start is not start and job.script == self.script and job.runs
        ]
        # Where somebody has submitted it twice, two run, and the younger claim fences the other.
        self.promise(not others or self._twice, f"{others} run beside {start.job}")

    def is_wanted(self, start: Start) -> bool:
        """Whether a start may begin: not of a run at rest that nobody has released."""
        if self.state().status not in AT_REST or start.job in self._released:
            return True
        return start.job in self.holding and not HOLDS_ARE_SURE

    def is_held(self, ref: str) -> None:
        (job,) = self.fake.controller.found(ref)
        if not job.held and not HOLDS_ARE_SURE:
            self.happened("said to be held", free=True)
            self._released.add(ref)
            return
        self.promise(job.held, f"job {ref} is held, it is said")

    def promise(self, kept: bool, what: str) -> None:
        if not kept:
            raise Broken(f"{what}\n{self.story()}")

    def story(self) -> str:
        lines = [f"seed {self.seed}, {self.weather}, {dict(self.happenings)}"]
        records = sorted(read_journal(self.run)[0], key=lambda r: (r.time, r.sequence))
        told = [(r.time, f"{r.attempt}.{r.launch} {r.writer} {r.event}"[:260]) for r in records]
        for each in self.fake.network.asked:
            who = "person" if each.inside is None else f"in {each.inside.job}"
            told.append((each.time.timestamp(), f"    {who}: {' '.join(each.argv)}"[:160]))
        begun = self.fake.spec.start.timestamp()
        lines += [f"{time - begun:9.1f} {text}" for time, text in sorted(told)[-80:]]
        lines += [str(job.record()) for job in self.fake.controller.jobs.values()]
        return "\n".join(lines)

    # -- lived --------------------------------------------------------------------------------

    def happened(self, what: str, *, free: bool = False) -> None:
        self.happenings[what] += 1
        self.left -= 0 if free else 1

    def live(self) -> RunState:
        """From the submission to its rest; what is left of it."""
        site = Site(name="generic")
        self.fake.submit(self.script)
        while self.left > 0 and not self.run.is_done():
            self.fake.advance(secs(self.random.choice([0.3, 1, 2, 5, 30, 130, 400])))
            self._happening(site)
        self._calm(site)
        state = self.state()
        self._check_rest(state)
        self._check_budgets()
        return state

    def state(self) -> RunState:
        return fold(read_journal(self.run, skip_superseded=True)[0])

    def _happening(self, site: Site) -> None:
        draw, fake = self.random, self.fake
        job = self._job()
        names = ["preempt"] * 6 + ["kill_node", "freeze_node", "restore", "outage", "outage"]
        if self.weather.people:
            names += [
                "scancel",
                "admin_requeue",
                "admin_requeue",
                "hold",
                "release",
                "forge_requeue",
            ]
            names += ["reconcile", "twice", "stop_file"]
        what = draw.choice(names)
        if job is None and what not in ("restore", "outage", "forge_requeue", "reconcile"):
            self.left -= 1  # nothing to do it to, and perhaps nobody who brings the run back
            return
        self.happened(what)
        client = fake
        ref = "" if job is None else job.ref
        if what == "preempt" and job is not None and job.runs:
            fake.preempt(ref)
        elif what in ("kill_node", "freeze_node"):
            self._lose(job, frozen=what == "freeze_node")
        elif what == "restore":
            for node in NODES:
                fake.restore_node(node)
        elif what == "outage":
            fake.controller_down(secs(draw.choice([30, 200, 900])))
        elif what == "admin_requeue":
            if client.requeue(ref).in_queue:
                self.cancelled.clear()
        else:
            # Refused, or no answer: they are told so.
            with contextlib.suppress(ForgeError):
                self._person(what, ref, site)

    def _lose(self, job: FakeJob | None, *, frozen: bool) -> None:
        node = self.random.choice(job.nodes) if job is not None and job.nodes else "n1"
        (self.fake.freeze_node if frozen else self.fake.kill_node)(node)

    def _person(self, what: str, ref: str, site: Site) -> None:
        fake = self.fake
        if what == "scancel":
            fake.cancel(ref)
            self.cancelled[ref] = fake.clock.monotonic()
        elif what == "hold":
            fake.hold(ref)
        elif what == "release":
            fake.release(ref)
        elif what == "stop_file":
            self.run.stop_file.touch()
        elif what == "twice":
            fake.submit(self.script)
            self._twice = True
            self.cancelled.clear()
        elif what == "forge_requeue":
            # Somebody may be told that there is nothing to do, because the job is still ending.
            if bring_back(self.run, fake, site=site, file=self.file).changed:
                self.cancelled.clear()
        elif what == "reconcile":
            self.reconcile()

    def reconcile(self) -> None:
        if not self.cancelled:  # whoever has cancelled it would not
            reconcile(self.run, self.fake, sleep=lambda seconds: self.fake.advance(secs(seconds)))

    def _job(self) -> FakeJob | None:
        mine = [
            job
            for job in self.fake.controller.jobs.values()
            if job.script == self.script and not job.over
        ]
        return self.random.choice(mine) if mine else None

    def _calm(self, site: Site) -> None:
        """The storm is over: all nodes are back, and somebody looks after what was left open."""
        fake = self.fake
        fake.network.down_until = None
        fake.network.disturb = lambda request: self._check(request) or Disturbance.NONE
        for node in NODES:
            fake.restore_node(node)
        for _ in range(6):
            self._to_the_end()
            state = self.state()
            if state.status in AT_REST or state.open_intent is None or self.cancelled:
                return
            try:
                self.reconcile()
            except ForgeError as error:
                self.promise(False, f"an intent that can't be carried out: {error}")
        self.promise(False, "an intent that is open for ever")

    def _to_the_end(self) -> None:
        end = self.fake.clock.now + timedelta(days=30)
        while (at := self.fake.clock.next_at()) is not None:
            self.promise(at < end, "it never ends")
            self.fake.advance(at - self.fake.clock.now)

    # -- checked ------------------------------------------------------------------------------

    def _check_rest(self, state: RunState) -> None:
        jobs = [job for job in self.fake.controller.jobs.values() if job.script == self.script]
        active = [j for j in jobs if j.state in ACTIVE or (j.state in PENDING_LIKE and not j.held)]
        held = [job for job in jobs if job.record().held]
        self.promise(not active, f"{[job.ref for job in active]} still go on")
        if self.finished_at is not None:
            self.promise(self.run.is_done(), "finished and no DONE")
            self.promise(state.status is RunStatus.FINISHED, f"finished, but {state.status}")
        if state.status is RunStatus.HELD:
            self.promise(bool(state.reason), "held without a reason")
        if state.status in AT_REST:
            return
        if held or self.cancelled or self.run.stop_file.exists():
            return  # somebody wants it so
        last = jobs[-1]
        silent = state.attempts and state.attempts[-1].ended is None
        never = self.weather.partition == "cancel" or not self.weather.requeue
        died = last.state in (
            JobState.PREEMPTED, JobState.NODE_FAIL, JobState.TIMEOUT, JobState.CANCELLED,
        )  # fmt: skip
        if silent and died and (never or last.state is JobState.TIMEOUT):
            self.happenings["lost without a word"] += 1
            return
        self.promise(False, f"neither at rest nor in the queue: {state.status}, {last.state}")

    def _check_budgets(self) -> None:
        """Counted apart from the fold: never more of a rung than it has, without progress."""
        taken: Counter[tuple[Cause, int]] = Counter()
        marks: dict[tuple[Cause, int], int] = {}
        furthest = 0
        for record in in_order(without_fenced(read_journal(self.run)[0])):
            event = record.event
            if isinstance(event, ev.CheckpointCommitted):
                furthest = max(furthest, event.step)
                for key in [k for k, mark in marks.items() if event.step > mark]:
                    if key[0] not in INSTABILITY:
                        del marks[key], taken[key]
            elif isinstance(event, ev.IncidentSeen):
                furthest = max(furthest, event.incident.step or 0)
            elif isinstance(event, ev.LaunchEnded):
                furthest = max(furthest, event.step or 0)
            elif isinstance(event, ev.DecisionTaken) and event.decision.rung is not None:
                decision = event.decision
                key = (decision.cause, decision.rung)
                rung = self.file.job.recovery.ladder(decision.cause)[decision.rung]
                taken[key] += 1
                marks[key] = furthest
                kept = rung.times is None or taken[key] <= rung.times
                self.promise(kept, f"{key} taken {taken[key]} times, allowed {rung.times}")
