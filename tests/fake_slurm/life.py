"""What a job of a fake Slurm goes through, from its start to its end."""

from __future__ import annotations

from datetime import datetime, timedelta

from slurm_forge.slurm.states import JobState
from slurm_forge.testing.cluster.spec import PartitionPreemption
from tests.fake_slurm.job import FakeJob
from tests.fake_slurm.programs import BATCH, STEPS, Runs, Start
from tests.fake_slurm.registry import Registry

#: Whatever KillWait says, slurmd leaves a job this long between SIGTERM and SIGKILL.
_SHORTEST_KILL_WAIT = timedelta(seconds=5)


class JobLife(Registry):
    """Starts, limits, preemption, ends and returns into the queue."""

    # -- starting ----------------------------------------------------------------------------

    def _start(self, job: FakeJob, nodes: tuple[str, ...]) -> None:
        now = self.clock.now
        revoked = job.ended is not None and now - job.ended < self.spec.revoked_for
        job.base, job.reason, job.nodes = JobState.RUNNING, None, nodes
        job.requeue_hold, job.exit_code = False, (0, 0)
        job.eligible = job.begin or job.eligible or now
        job.begin, job.started, job.ended = None, now, None
        job.preempt_time = job.grace_end = None
        job.warned, job.without = False, 0
        for name in nodes:
            self.nodes[name].job = job
        if revoked and job.restarts:
            self._over(job, JobState.FAILED)
            return
        start = Start(
            self.clock,
            job=job.ref,
            restarts=job.restarts,
            nodes=nodes,
            script=job.script,
            ended=lambda start, *how: self._exited(job, start, *how),
            client=self._client,
        )
        job.start = start
        program = self.scripts.get(job.script.name, Runs())(start)
        self._programs[job.number] = program
        self.arm_limit(job)
        start.after(timedelta(0), program.started)

    def arm_limit(self, job: FakeJob) -> None:
        """See to the time limit of a running job, and to the signal before it, anew."""
        for timer in self._limits.pop(job.number, []):
            timer.cancel()
        if not job.runs or job.started is None:
            return
        end = job.started + job.time_limit
        timers = [self.clock.after(self._next_scan(end), lambda: self._time_is_up(job))]
        if job.asked.signal is not None and not job.warned:
            name, batch, early = job.asked.signal
            scan = self._next_scan(end - early - self.spec.limits_every)
            timers.append(self.clock.after(scan, lambda: self._warn(job, name, batch)))
        self._limits[job.number] = timers

    def _next_scan(self, at: datetime) -> timedelta:
        """From now until Slurm looks for the first time at or after ``at``."""
        scans = -(-(max(at, self.clock.now) - self.spec.start) // self.spec.limits_every)
        return self.spec.start + scans * self.spec.limits_every - self.clock.now

    def _warn(self, job: FakeJob, name: str, batch: bool) -> None:
        job.warned = True
        self._signal(job, "SIGCONT", name, to=(BATCH,) if batch else (STEPS,))

    def _time_is_up(self, job: FakeJob) -> None:
        if job.runs:
            job.reason = "TimeLimit"
            self._signal(job, "SIGTERM", to=(STEPS,))
            if job.runs:  # it may have left at once
                self._over(job, JobState.TIMEOUT)

    # -- ending ------------------------------------------------------------------------------

    def _exited(
        self, job: FakeJob, start: Start, status: int, signal: int, out_of_memory: bool
    ) -> None:
        if job.start is not start:
            return  # of a node that Slurm had given up
        if job.base is not JobState.PENDING:  # of a run that was requeued none is kept
            job.exit_code = (0, 125) if out_of_memory else (status, signal)
        if not job.runs:
            self._processes_gone(job)
        elif job.in_grace and self.spec.requeues_exit_in_grace and self._returns(job):
            job.in_grace = False
            job.exits_in_grace += 1
            held = job.exits_in_grace >= self.spec.max_batch_requeue
            self._back(job, JobState.PREEMPTED)
            if held:
                job.held = job.requeue_hold = True
                job.reason = "launch_failure_limit_exceeded_requeued_held"
            self._processes_gone(job)
        else:
            failed = JobState.OUT_OF_MEMORY if out_of_memory else JobState.FAILED
            fine = (status, signal) == (0, 0) and not out_of_memory
            job.in_grace = False
            if not fine:
                job.reason = "OutOfMemory" if out_of_memory else "NonZeroExitCode"
            self._over(job, JobState.COMPLETED if fine else failed)

    def _returns(self, job: FakeJob) -> bool:
        """Whether a preemption puts it back into the queue."""
        partition = self.spec.partition(job.partition)
        requeues = partition is not None and partition.preempt_mode is PartitionPreemption.REQUEUE
        return requeues and job.requeue

    def _over(self, job: FakeJob, state: JobState) -> None:
        """It ends in ``state``; what runs of it is told to."""
        job.base, job.completing, job.ended = state, True, self.clock.now
        self._terminate(job)

    def _back(self, job: FakeJob, told: JobState) -> None:
        """It goes back into the queue; what runs of it still has to end.  sacct keeps ``told``."""
        job.ended = self.clock.now
        job.history.append(job.row(told))
        job.base, job.completing = JobState.PENDING, True
        job.restarts += 1
        job.submitted = job.started = self.clock.now
        job.ended = job.preempt_time = job.grace_end = job.begin = None

    def _terminate(self, job: FakeJob) -> None:
        self._disarm(job)
        start = job.start
        if start is None or not start.alive:
            self._processes_gone(job)
            return
        wait = max(self.spec.kill_wait, _SHORTEST_KILL_WAIT)
        job.kill_timer = self.clock.after(wait, lambda: self._kill(job, start))
        self._signal(job, "SIGCONT", "SIGTERM", to=(STEPS, BATCH))

    def _disarm(self, job: FakeJob) -> None:
        for timer in (job.grace_timer, job.kill_timer, *self._limits.pop(job.number, [])):
            if timer is not None:
                timer.cancel()
        job.grace_timer = job.kill_timer = None

    def _kill(self, job: FakeJob, start: Start) -> None:
        start.vanish()
        if job.start is start:
            if job.base is not JobState.PENDING:
                job.exit_code = (0, 9)
            self._processes_gone(job)

    def _signal(self, job: FakeJob, *names: str, to: tuple[str, ...]) -> None:
        start, program = job.start, self._programs.get(job.number)
        for name in names:
            for whom in to:
                if start is not None and start.alive and program is not None:
                    start.shielded(
                        lambda name=name, whom=whom: program.signalled(name, whom)  # type: ignore[misc]
                    )

    def _processes_gone(self, job: FakeJob) -> None:
        self._disarm(job)
        job.start = None
        self._programs.pop(job.number, None)
        self.clock.after(self.spec.epilog, lambda: self._epilog(job))

    def _epilog(self, job: FakeJob) -> None:
        if not job.completing or job.start is not None:
            return
        now = self.clock.now
        job.completing = False
        for node in self.nodes.values():
            if node.job is job:
                node.job = None
        if job.base is JobState.PENDING:
            self._waits(job)
        else:
            by = self.spec.user_id if job.base is JobState.CANCELLED else None
            job.history.append(job.row(job.base, by=by))
        job.ended = job.ended or now
        self.kick()

    def _waits(self, job: FakeJob) -> None:
        """After a requeue: not before the credential of the last start has expired.

        A begin time that somebody has set and that lies ahead stays.
        """
        now = self.clock.now
        if job.begin is None or job.begin <= now:
            job.begin = now + self.spec.requeue_delay
        job.nodes = ()
        job.started = None  # the reason stays that of the end before, until the queue is looked at
        self.kick()
        self.kick(job.begin - now)

    # -- preemption --------------------------------------------------------------------------

    def preempt(self, job: FakeJob) -> None:
        """A job with more right wants its nodes."""
        if not job.runs or job.grace_timer is not None:
            return
        partition = self.spec.partition(job.partition)
        grace = timedelta(0) if partition is None else partition.grace_time
        if grace <= timedelta(0):
            self._end_preempted(job)
            return
        now = self.clock.now
        job.preempt_time, job.grace_end, job.in_grace = now, now + grace, True
        job.grace_timer = self.clock.after(
            grace + self.spec.grace_slack, lambda: self._end_preempted(job)
        )
        asked = job.asked.signal
        if self.spec.send_user_signal and asked is not None:
            self._signal(job, "SIGCONT", asked[0], to=(BATCH,) if asked[1] else (STEPS,))
        else:
            self._signal(job, "SIGCONT", "SIGTERM", to=(STEPS,))

    def _end_preempted(self, job: FakeJob) -> None:
        if not job.runs:
            return
        job.in_grace = False
        # Also without a grace time, until it is requeued (tried on 22.05.8 and 26.05.3); anew at
        # the end of one (_job_check_grace_internal in Slurm's src/interfaces/preempt.c).
        job.preempt_time = self.clock.now
        if self._returns(job):
            self._back(job, JobState.PREEMPTED)
            self._terminate(job)
        else:
            self._over(job, JobState.PREEMPTED)
