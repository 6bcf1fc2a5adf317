"""The fake slurmctld: what jobs go through, without a process and without waiting."""

from __future__ import annotations

from slurm_forge.slurm.states import JobState
from tests.fake_slurm.arguments import Refused
from tests.fake_slurm.job import FakeJob
from tests.fake_slurm.life import JobLife
from tests.fake_slurm.programs import BATCH, STEPS
from tests.fake_slurm.registry import FakeNode


class Controller(JobLife):
    """The scheduler, what can be asked for, and what becomes of nodes."""

    # -- the queue ---------------------------------------------------------------------------

    def _schedule(self) -> None:
        self._pass = None
        waiting = [j for j in self.jobs.values() if j.base is JobState.PENDING and not j.completing]
        blocked = False
        for job in sorted(waiting, key=lambda j: (-self._tier(j), j.number)):
            why = self._why_not(job)
            if why is None:
                nodes = self._place(job)
                if nodes is not None:
                    self._start(job, nodes)
                    continue
                why = "Priority" if blocked else "Resources"
                blocked = True
            if not job.held:
                job.reason = why

    def _why_not(self, job: FakeJob) -> str | None:
        if job.held:
            return job.reason
        if job.begin is not None and job.begin > self.clock.now:
            return "BeginTime"
        if self._throttled(job):
            return "JobArrayTaskLimit"
        if not all(self._fulfilled(job, *each) for each in job.asked.dependencies):
            never = any(self._never(*each) for each in job.asked.dependencies)
            return "DependencyNeverSatisfied" if never else "Dependency"
        return None

    def _throttled(self, job: FakeJob) -> bool:
        """Whether as many tasks of its array have nodes as may at a time."""
        if job.asked.throttle is None:
            return False
        others = [
            each
            for each in self.jobs.values()
            if each.array == job.array and each is not job and (each.runs or each.completing)
        ]
        return len(others) >= job.asked.throttle

    def _fulfilled(self, job: FakeJob, kind: str, ref: str) -> bool:
        others = self.found(ref)  # one that is unknown, or forgotten, counts as over
        if kind == "after":
            return all(other.base is not JobState.PENDING for other in others)
        over = all(other.over and not other.completing for other in others)
        if kind == "afterok":
            return over and all(other.base is JobState.COMPLETED for other in others)
        if kind == "afternotok":
            return over and any(other.base is not JobState.COMPLETED for other in others)
        return over

    def _never(self, kind: str, ref: str) -> bool:
        return kind in ("afterok", "afternotok") and all(each.over for each in self.found(ref))

    def _tier(self, job: FakeJob) -> int:
        partition = self.spec.partition(job.partition)
        return 0 if partition is None else partition.priority_tier

    def _place(self, job: FakeJob) -> tuple[str, ...] | None:
        """Nodes that are free for it; where others must make room, that is asked of them."""
        wanted = job.asked.nodelist or self.spec.nodes
        allowed = [self.nodes[name] for name in wanted if name not in job.excluded]
        free = [node.name for node in allowed if node.usable]
        if len(free) >= job.num_nodes:
            return tuple(free[: job.num_nodes])
        tier = self._tier(job)
        room = len(free)
        victims: list[FakeJob] = []
        for node in allowed:
            other = node.job
            if other is None or room >= job.num_nodes:
                continue
            if self.spec.preemptable(other.partition) and self._tier(other) < tier:
                room += 1
                if other not in victims:
                    victims.append(other)
        if room >= job.num_nodes:
            for victim in victims:
                self.preempt(victim)
        return None

    # -- what is asked of it -------------------------------------------------------------------

    def requeue(self, job: FakeJob, *, hold: bool) -> None:
        """``scontrol requeue`` and ``requeuehold`` of one job; ``Refused`` in Slurm's words."""
        if not job.requeue:
            raise Refused("Requested operation is presently disabled")
        if job.base is JobState.PENDING:
            raise Refused("Job is pending execution")
        ran, ending = job.runs, job.completing
        if ran:
            # From 24.05 on the mark of the preemption outlives this.
            job.in_grace = job.in_grace and self.spec.requeues_exit_in_grace
            self._back(job, JobState.REQUEUED)
        else:
            rows = len(job.history)
            self._back(job, JobState.REQUEUED)
            if not ending:
                del job.history[rows:]  # its end is on record already
        if hold:
            job.held, job.reason = True, "job_requeued_in_held_state"
        if ran:
            self._terminate(job)
        elif not ending:
            job.completing = False
            self._waits(job)
            job.ended = self.clock.now

    def cancel(self, job: FakeJob) -> None:
        """Plain ``scancel``."""
        if job.over:
            return
        if job.base is JobState.PENDING:
            ending = job.completing
            job.base, job.requeue_hold = JobState.CANCELLED, False
            job.started = job.started or self.clock.now
            job.ended = self.clock.now
            if not ending:
                job.history.append(job.row(JobState.CANCELLED, by=self.spec.user_id))
                self.kick()
            return
        self._over(job, JobState.CANCELLED)

    def send(self, job: FakeJob, signal: str, *, batch: bool) -> None:
        """``scancel --signal``."""
        if job.runs:
            self._signal(job, signal, to=(BATCH,) if batch else (STEPS,))

    def hold(self, job: FakeJob) -> None:
        """``scontrol hold``, also of a running job: it is held once it is back in the queue."""
        by_admin = self.spec.user_id == 0
        job.held, job.reason = True, "JobHeldAdmin" if by_admin else "JobHeldUser"

    def release(self, job: FakeJob) -> None:
        """``scontrol release``."""
        job.held = job.requeue_hold = False
        job.exits_in_grace = 0
        if job.base is JobState.PENDING:
            job.reason = None
        self.kick()

    # -- nodes -------------------------------------------------------------------------------

    def lose_node(self, name: str, *, frozen: bool) -> None:
        """The node does not answer any more; with ``frozen`` its processes live on."""
        node = self.nodes[name]
        node.responds = False
        job = node.job
        if job is not None and job.nodes[:1] == (name,) and job.start is not None:
            if frozen:
                node.lost.append(job.start)
            else:
                job.start.vanish()
        self.clock.after(self.spec.slurmd_timeout, lambda: self._give_up(node))

    def _give_up(self, node: FakeNode) -> None:
        if node.responds:
            return
        node.down, node.reason = True, "Not responding"
        self._without_node(node)

    def _without_node(self, node: FakeNode) -> None:
        """Whatever ran there is gone, or as good as that."""
        job, node.job = node.job, None
        if job is None:
            return
        on_it = job.nodes[:1] == (node.name,)
        if on_it:
            # Nobody can end these: to Slurm they are gone with the node.
            job.start = None
            self._programs.pop(job.number, None)
        if not job.runs:
            if on_it and job.completing:
                self._processes_gone(job)
            return
        if job.asked.no_kill and not on_it:
            # It goes on without it, and neither FailedNode nor the reason say so (22.05.8).
            job.nodes = tuple(name for name in job.nodes if name != node.name)
            job.without += 1
            return
        job.failed_node, job.reason = node.name, "NodeDown"
        job.in_grace = False
        if job.requeue:
            self._back(job, JobState.NODE_FAIL)
            self._terminate(job)
        else:
            self._over(job, JobState.NODE_FAIL)

    def restore_node(self, name: str) -> None:
        """The node is back; what had lived on there is killed, as slurmd does."""
        node = self.nodes[name]
        node.responds, node.down, node.drained, node.reason = True, False, False, None
        for start in node.lost:
            if node.job is None or node.job.start is not start:
                start.vanish()
        node.lost.clear()
        job = node.job
        if job is not None and job.nodes[:1] == (name,) and not job.lives:
            self._without_node(node)  # slurmd registers without the job that it should have
        self.kick()
