"""Journals made by hand: a scribe with a clock of its own writes what a run would have written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from slurm_forge.cli.observe.run_reading import RunReader
from slurm_forge.journal import JournalWriter, read_journal, read_position
from slurm_forge.journal import events as ev
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust

#: 2026-08-11 09:00:00 UTC, a Tuesday.
TUESDAY = 1786438800.0
RUN_YAML = b"job: {name: tiny-gpt, entry: a.b:f, args: {max_steps: 400}}\n"


class Scribe:
    """Writes events of one run; every verb moves the clock on by as much as it takes."""

    def __init__(self, folder: Path, name: str = "tiny-gpt", spec: bytes = RUN_YAML) -> None:
        self.run = RunDirectory.at(folder / name)
        if not self.run.spec_file.exists():
            self.run.create(spec)
        self.now = TUESDAY
        #: By how much the clock of the node that writes is ahead of the one that ``now`` is of.
        self.ahead = 0.0
        self.attempt = 0
        self.launch = 0
        self._incidents = 0
        self._writers: dict[tuple[str, int, int], JournalWriter] = {}

    def write(self, writer: str, event: ev.Event, *, launch: int | None = None) -> None:
        number = self.launch if launch is None else launch
        key = (writer, self.attempt, number)
        if key not in self._writers:
            self._writers[key] = JournalWriter(
                self.run,
                attempt=self.attempt,
                writer=writer,
                launch=number,
                clock=lambda: self.now + self.ahead,
            )
            self._writers[key].advance_clock(read_journal(self.run)[0])
        journal = self._writers[key]
        journal.write(event, durable=False)
        assert journal._file is not None
        os.utime(journal._file.path, (self.now, self.now))

    def later(self, seconds: float) -> Scribe:
        self.now += seconds
        return self

    def submitted(self, job: str = "8812301") -> None:
        self.write("cli", ev.Submitted(job=job, via="sbatch"), launch=1 << 30)

    def begin(self, *nodes: str, job: str = "8812301", via: str = "sbatch") -> None:
        """An attempt and its first launch; training is up 14 s later (see ``resume``)."""
        claim = claim_attempt(
            self.run,
            job=job,
            restart_count=self.attempt,
            host="n01",
            pid=1,
            nodes=nodes,
            time=self.now + self.ahead,
        )
        os.utime(self.run.attempts / f"{claim.attempt}.json", (self.now, self.now))
        self.attempt, self.launch = claim.attempt, 0
        self.write(
            "supervisor",
            ev.AttemptStarted(
                job=job,
                restart_count=self.attempt - 1,
                nodes=nodes or ("n01", "n02"),
                host="n01",
                via=via,
                read=read_position(read_journal(self.run)[0]),
            ),
        )
        self.relaunch()

    def relaunch(
        self,
        world_size: int = 8,
        nodes: tuple[str, ...] = ("n01", "n02"),
        start: str = "cold",
    ) -> None:
        self.launch += 1
        self.write("supervisor", ev.LaunchStarted(world_size=world_size, nodes=nodes, start=start))

    def resume(self, step: int, *, world_size: int = 8, exact: bool = True) -> None:
        checkpoint = f"step-{step:08d}.a1.l1-00000000" if step else None
        self.later(14).write(
            "rank0",
            ev.Resumed(
                step=step,
                checkpoint=checkpoint,
                world_size=world_size,
                exact=exact,
                interpreter_s=8.0,
                rendezvous_s=2.1,
                load_s=3.1,
            ),
        )

    def train(self, first: int, last: int, *, seconds: float = 10.0) -> None:
        """Progress after every step from ``first`` to ``last``."""
        for step in range(first, last + 1):
            self.later(seconds).write("rank0", ev.Progress(step=step, consumed=step * 32))

    def save(
        self,
        step: int,
        *,
        reason: str = "every_minutes",
        seconds: float = 0.3,
        findings: tuple[str, ...] = (),
    ) -> None:
        self.later(seconds).write(
            "rank0",
            ev.CheckpointCommitted(
                name=f"step-{step:08d}.a{self.attempt}.l{self.launch}-00000000",
                step=step,
                reason=reason,
                seconds=seconds,
                size=10**9,
                findings=findings,
            ),
        )

    def judge(self, step: int, trust: Trust, reason: str = "") -> None:
        """What rank 0 thinks of the checkpoint of this launch at that step."""
        name = f"step-{step:08d}.a{self.attempt}.l{self.launch}-00000000"
        self.write("rank0", ev.CheckpointJudged(name=name, trust=trust, reason=reason))

    def skip(
        self,
        step: int,
        *,
        count: int = 1,
        first: int | None = None,
        evidence: tuple[Evidence, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        """Steps in a row; ``first`` sample where it is not where the step's would be."""
        start = (step - 1) * 32 if first is None else first
        for each in range(count):
            self.later(seconds).write(
                "rank0",
                ev.StepSkipped(
                    step=step + each,
                    first_sample=start + each * 32,
                    samples=32,
                    consecutive=each + 1,
                    evidence=evidence if each == 0 else (),
                ),
            )

    def unstable(
        self,
        step: int,
        decision: Action,
        *,
        cause: Cause = Cause.NON_FINITE,
        onset: int | None = None,
        evidence: tuple[Evidence, ...] = (),
        repeats: bool | None = None,
        hosts: tuple[str, ...] = (),
        micro_batch: int | None = None,
        changes: tuple[Change, ...] = (),
        plan: RecoveryPlan | None = None,
        target: int | None = None,
        reason: str | None = None,
        rung: int | None = 1,
    ) -> str:
        """Rank 0 sees and decides while the launch goes on; the incident's id."""
        self._incidents += 1
        name = f"{self.attempt}.{self.launch}.{self._incidents}"
        incident = Incident(
            id=name,
            cause=cause,
            confidence=Confidence.CERTAIN,
            evidence=evidence,
            step=step,
            hosts=hosts,
            onset=onset,
            repeats=repeats,
            micro_batch=micro_batch,
        )
        self.write("rank0", ev.IncidentSeen(incident=incident))
        to = None if target is None else f"step-{target:08d}.a{self.attempt}.l1-00000000"
        taken = Decision(
            incident_id=name,
            cause=cause,
            action=decision,
            reason=reason or f"{cause.value}: {decision.value}",
            plan=plan or RecoveryPlan(),
            changes=changes,
            rung=rung,
            target=to,
        )
        self.write("rank0", ev.DecisionTaken(decision=taken))
        return name

    def again(self, step: int, *, load: float = 0.4) -> None:
        """Training begins again at ``step`` inside the launch."""
        checkpoint = f"step-{step:08d}.a{self.attempt}.l1-00000000" if step else None
        self.later(load).write(
            "rank0", ev.Resumed(step=step, checkpoint=checkpoint, world_size=8, load_s=load)
        )

    def recovered(self, name: str, steps: int, seconds: float) -> None:
        self.write("rank0", ev.Recovered(incident_id=name, steps=steps, seconds=seconds))

    def incident(
        self,
        cause: Cause,
        action: Action,
        *,
        text: str = "seen",
        source: str = "rank 0 on n01",
        step: int | None = None,
        confidence: Confidence = Confidence.LIKELY,
        changes: tuple[Change, ...] = (),
        plan: RecoveryPlan | None = None,
        reason: str | None = None,
        rung: int | None = 0,
        exact: bool = True,
        evidence: tuple[Evidence, ...] = (),
        wait: float = 0.0,
        rank: int = 0,
    ) -> None:
        """The launch ends, what it was, and what is decided."""
        self.write("supervisor", ev.LaunchEnded(outcome=cause.value, step=step, exact=exact))
        name = f"{self.attempt}.{self.launch}"
        incident = Incident(
            id=name,
            cause=cause,
            confidence=confidence,
            evidence=evidence or (Evidence(source, text),),
            step=step,
            rank=rank,
            hosts=("n01",),
        )
        self.write("supervisor", ev.IncidentSeen(incident=incident))
        decision = Decision(
            incident_id=name,
            cause=cause,
            action=action,
            reason=reason or f"{cause.value}: {action.value}",
            plan=plan or RecoveryPlan(),
            changes=changes,
            rung=rung,
            wait_s=wait,
        )
        self.write("supervisor", ev.DecisionTaken(decision=decision))

    def held(
        self, reason: str, *, job: str = "8812301", refused: str = "", confirmed: bool = True
    ) -> None:
        """The job goes back into the queue, held, or Slurm refuses that, or says nothing."""
        asked = ev.Held(job=job, restart_count=self.attempt - 1, reason=reason)
        self.write("supervisor", asked)
        if confirmed and not refused:
            self.write("supervisor", replace(asked, confirmed=True))
        if refused:
            method = "scontrol requeuehold"
            self.write("supervisor", ev.RequeueFailed(job=job, method=method, reason=refused))
        self.end("hold" if refused else "held")

    def struck(self, *nodes: str, excluded: tuple[str, ...] = (), until: float | None) -> None:
        """What the last launch died of is noted in the node ledger."""
        name = f"{self.attempt}.{self.launch}"
        struck = ev.NodesStruck(
            nodes=nodes, cause="hang", incident_id=name, excluded=excluded, until=until
        )
        self.write("supervisor", struck)

    def found_out(self, cause: Cause, action: Action | None, *, step: int | None = None) -> None:
        """What the next attempt finds out about this one, right before it begins."""
        name = f"{self.attempt}.{self.launch}"
        incident = Incident(
            id=name,
            cause=cause,
            confidence=Confidence.LIKELY,
            evidence=(Evidence("sacct", "State=NODE_FAIL"),),
            step=step,
            hosts=("n01",),
        )
        journal = JournalWriter(
            self.run,
            attempt=self.attempt,
            writer="supervisor",
            launch=self.launch,
            clock=lambda: self.now,
        )
        journal.advance_clock(read_journal(self.run)[0])
        journal.write(ev.IncidentSeen(incident=incident), durable=False)
        if action is not None:
            decision = Decision(
                incident_id=name,
                cause=cause,
                action=action,
                reason=f"{cause.value}: {action.value}",
                plan=RecoveryPlan(),
                rung=0,
            )
            journal.write(ev.DecisionTaken(decision=decision), durable=False)
        journal.close()

    def preempted(self, step: int, *, saves: bool = True) -> None:
        """Notice, agreement, save, requeue: the ordinary end of an attempt."""
        self.write("supervisor", ev.NoticeSeen(what="SIGTERM", source="rank 3"))
        self.later(0.003).write("supervisor", ev.StopAgreed(step=step, seconds=0.003))
        if saves:
            self.later(2.0)
            self.save(step, reason="stop", seconds=4.1)
        self.incident(
            Cause.PREEMPTED,
            Action.REQUEUE,
            source="scontrol",
            text="PreemptTime=11:02:10 EndTime=11:04:10",
            step=step,
            confidence=Confidence.CERTAIN,
        )
        self.requeued()

    def requeued(self, job: str = "8812301") -> None:
        method = "scontrol requeue"
        self.write("supervisor", ev.RequeueIntended(job=job, method=method, reason="preempted"))
        self.write("supervisor", ev.RequeueDone(job=job, method=method))
        self.end("requeued")

    def end(self, outcome: str) -> None:
        self.later(1).write("supervisor", ev.AttemptEnded(outcome=outcome))

    def finish(self, step: int) -> None:
        self.write("supervisor", ev.LaunchEnded(outcome="finished", step=step, exact=True))
        self.run.mark_done(step, self.attempt)
        self.write("supervisor", ev.Finished(step=step))
        self.end("finished")

    def looked(self, *, after: float = 0.0) -> RunFacts:
        """As ``facts``, with the times of the files, as the command line finds them."""
        gathering = RunReader(self.run, clock=lambda: self.now + after)
        gathering.poll()
        return replace(gathering.facts(), reference=self.run.name)

    def facts(self, *, after: float = 0.0, total: int | None = 400) -> RunFacts:
        """What a reader finds ``after`` seconds."""
        records, damage = read_journal(self.run)
        return RunFacts(
            name=self.run.name,
            path=str(self.run.path),
            reference=self.run.name,
            now=self.now + after,
            records=tuple(records),
            damage=tuple(damage),
            total_steps=total,
            done=self.run.is_done(),
            stop_asked=self.run.stop_file.exists(),
            save_asked=self.run.save_file.exists(),
        )
