"""Conducts one launch: hears what ranks and Slurm say, asks for stops, saves and probes.

Used by the supervisor in the batch step and, on a thread, by rank 0 where there is no supervisor.
It only watches and asks; what the launch's end means is classified and decided afterwards.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from slurm_forge.control import Hub, RequestKind
from slurm_forge.control.hub import Agreed, Gone, Said, Withdrawn
from slurm_forge.control.messages import protocol as p
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Event, NoticeSeen, StopAgreed
from slurm_forge.launch.conductor.final_query import Questions
from slurm_forge.launch.conductor.hang_watchdog import Watchdog
from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.conductor.network_monitor import NetworkWatch
from slurm_forge.launch.conductor.observations import (
    Launched,
    Seen,
)
from slurm_forge.launch.conductor.preflight_monitor import PreflightJudge
from slurm_forge.launch.conductor.probe_monitor import ProbeJudge
from slurm_forge.launch.conductor.rank_views import Sight
from slurm_forge.launch.conductor.save_schedule import SavePace
from slurm_forge.launch.conductor.shutdown import (
    Deadline,
    Ending,
)
from slurm_forge.launch.conductor.skip_consistency import LeftOutSteps
from slurm_forge.launch.conductor.straggler_monitor import Trends
from slurm_forge.launch.conductor.warning_signals import WarningSignals
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.recovery.incident.classify import (
    LaunchFacts,
    LostRank,
    RankFailure,
)
from slurm_forge.recovery.incident.launch_facts import is_usage_error
from slurm_forge.recovery.monitor.probe_verdict import ProbeRules
from slurm_forge.recovery.monitor.straggler_reports import in_words
from slurm_forge.slurm.kernel import killed_since, read_oom_kills
from slurm_forge.vocabulary.cause import Cause

__all__ = ["Conductor"]

_TICK_S = 0.05
_FILES_EVERY_S = 1.0
_BATCH = "batch step"


class Conductor:
    """Watches one launch until it is over.

    ``signal`` and ``stop`` may be called from any thread.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        journal: JournalWriter,
        watch: JobWatch,
        timing: Timing,
        stop_file: Path,
        save_file: Path,
        launched: Launched | None,
        stays: bool = False,
        only_warns: Callable[[LaunchFacts], bool] = lambda _: False,
        expected_bandwidth: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._hub = hub
        self._journal = journal
        self._watch = watch
        self._timing = timing
        self._stop_file = stop_file
        self._save_file = save_file
        self._launched = launched
        self._only_warns = only_warns
        self._clock = clock
        self._now = now
        self._signals: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._stops: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seen = Seen()
        self._next_files = 0.0
        self._ending = Ending(hub, self._seen, launched, clock(), stays=stays)
        self._pace = SavePace(timing, clock())
        self._deadline = Deadline(hub, watch, timing, self._seen, clock(), now)
        self._questions = Questions(watch, self._seen, clock)
        #: Who has told of a signal.
        self._signalled_by: set[str] = set()
        self._warnings = WarningSignals(
            watch,
            timing,
            note=self._note,
            clock=clock,
            now=lambda: self._deadline.slurm_time(clock()),
        )
        self._left_out = LeftOutSteps(hub.world_size)
        self._kills = read_oom_kills()
        self._trends = Trends(
            hub.members,
            factor=timing.straggler,
            every=timing.pace_every,
            clock=clock,
            wall=lambda: now().timestamp(),
            baselines=timing.baselines,
        )
        sight = Sight(hub, clock)
        self._preflight = PreflightJudge(
            hub, timing.preflight, clock, expected=expected_bandwidth, sight=sight
        )
        self._network = NetworkWatch(hub, clock, timing.probe_deadline)
        self._watchdog = Watchdog(
            hub,
            timing.hang,
            clock,
            attempt=journal.attempt,
            launch=journal.launch,
            learned=dict(timing.stretches),
            network=self._network,
            sight=sight,
        )
        self._judge = ProbeJudge(
            hub,
            timing.probe_every,
            ProbeRules(timing.probe_silence, timing.probe_deadline, timing.hang),
            clock,
            limit=self._watchdog.limit,
            attempt=journal.attempt,
            launch=journal.launch,
            bandwidth_every=timing.bandwidth_every,
            sight=sight,
            network=self._network,
            observer=self._trends,
        )

    def signal(self, name: str) -> None:
        """The batch step itself got a signal."""
        self._signals.put(name)

    def unheard(self) -> tuple[str, ...]:
        """Signals for the batch step that nobody has acted on; whoever asks has to."""
        names = []
        with contextlib.suppress(queue.Empty):
            while True:
                names.append(self._signals.get_nowait())
        return tuple(names)

    def hear(self, name: str, source: str) -> None:
        """Tasks of the job got a signal, as somebody beside the ranks says."""
        self._heard.put((name, source))

    def stop(self, why: str) -> None:
        """Whoever started the run wants it to save and stop, or is gone."""
        self._stops.put(why)

    def watch(self) -> LaunchFacts:
        """Conduct until the launch is over; what was seen."""
        self._watch.ask()
        while not self._over():
            self._hear()
            self._look()
        for name, source in self._warnings.close():
            self._signalled(name, source)
        self._questions.last(self._take_signals)
        self._seen.killed_for_memory = killed_since(self._kills, read_oom_kills()) or ""
        return self._facts()

    def _facts(self) -> LaunchFacts:
        return self._seen.facts(
            self._hub.members(),
            now=self._now(),
            clock_ahead=self._deadline.clock_ahead(self._clock()),
            lead=self._timing.lead,
            planned_end=self._timing.planned_end,
            probe=self._judge.failed,
            watch=self._watch,
            launched=self._launched,
            clock=self._clock(),
            witnesses={rank: view.heard for rank, view in self._hub.witnesses().items()},
        )

    # -- hearing -----------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            event = self._hub.events.get(timeout=_TICK_S)
        except queue.Empty:
            return
        while True:
            match event:
                case Said():
                    self._said(event.rank, event.message)
                case Gone():
                    self._gone(event.rank)
                case Agreed() if event.request.kind is RequestKind.STOP:
                    self._note(StopAgreed(step=event.target.step, seconds=event.seconds))
                case Withdrawn():
                    self._judge.withdrawn(event.request.id)
                case Agreed() if event.request.id == self._seen.save_request:
                    self._seen.save_request = None
                    self._seen.save_step = event.target.step
                case _:
                    pass
            try:
                event = self._hub.events.get_nowait()
            except queue.Empty:
                return

    def _said(self, rank: int, message: p.Message) -> None:
        seen = self._seen
        match message:
            case p.Notice():
                # A rank that is being ended by its launcher gets signals too: those mean nothing.
                if seen.ending_since is None:
                    self._signalled(message.what, f"rank {rank}")
            case p.Stopped():
                seen.said_goodbye.add(rank)
                seen.stopped = message if rank == 0 or seen.stopped is None else seen.stopped
            case p.Committed():
                self._watchdog.saved(message.seconds)
                self._pace.committed(
                    self._clock(),
                    blocked=timedelta(seconds=message.blocked_s),
                    durable=timedelta(seconds=message.seconds),
                )
            case p.NotCommitted():
                self._not_committed(message)
            case p.Through():
                seen.through[rank] = message.step
            case p.Finished():
                seen.said_goodbye.add(rank)
                seen.finished[rank] = message
            case p.Failed():
                seen.said_goodbye.add(rank)
                self._fail(
                    rank,
                    message.cause,
                    message.step,
                    message.text,
                    micro_batch=message.micro_batch,
                    usage_error=is_usage_error(message.error),
                )
            case p.Recover():
                seen.said_goodbye.add(rank)
                seen.decided = seen.decided or message.decided
                if not seen.given_up:
                    seen.given_up = True
                    self._fail(rank, message.cause, message.step, message.text, everybody=True)
            case p.Propose() if rank == 0 or message.kind is RequestKind.RECOVER:
                if self._undisturbed():
                    self._hub.request(message.kind, message.reason)
            case p.Cured():
                seen.save_step = 0  # the steps come again
                self._watch.comment(message.text)
            case p.LeftOut():
                self._left_out.said(rank, message.step, self._clock())
            case p.ProbeArrived() | p.ProbeDone() | p.ProbeBroke():
                self._judge.hear(rank, message)
            case p.Paced():
                self._trends.hear(rank, message)
            case p.PreflightReport() | p.PreflightTried():
                self._preflight.hear(rank, message)
            case p.Lasted() | p.Stacks():
                self._watchdog.hear(rank, message)
                self._judge.hear(rank, message)
            case p.Links() | p.PortsSeen():
                self._network.hear(rank, message)
            case _:
                pass

    def _fail(
        self,
        rank: int,
        cause: str,
        step: int,
        text: str,
        *,
        micro_batch: int = 0,
        everybody: bool = False,
        usage_error: bool = False,
    ) -> None:
        member = self._hub.members().get(rank)
        known = cause in {each.value for each in Cause}
        self._seen.failures.append(
            RankFailure(
                rank=rank,
                host="?" if member is None else member.host,
                cause=Cause(cause) if known else Cause.UNKNOWN,
                step=step,
                text=text,
                micro_batch=micro_batch or None,
                after_loss=bool(self._seen.lost),
                everybody=everybody,
                usage_error=usage_error,
            )
        )
        self._end()

    def _gone(self, rank: int) -> None:
        # Ranks that we told to leave go without a word: that is no evidence of anything.
        if rank in self._seen.said_goodbye or self._seen.aborted:
            return
        member = self._hub.members().get(rank)
        self._seen.lost.append(LostRank(rank, "?" if member is None else member.host))
        self._end()

    # -- looking -----------------------------------------------------------------------------

    def _look(self) -> None:
        now = self._clock()
        self._take_signals()
        with contextlib.suppress(queue.Empty):
            name, source = self._heard.get_nowait()
            if self._seen.ending_since is None:
                self._signalled(name, source)
        with contextlib.suppress(queue.Empty):
            self._seen.stopped_by = self._stops.get_nowait()
            self._note(NoticeSeen(what=self._seen.stopped_by, source="starter"))
            self._ask_stop(self._seen.stopped_by)
        self._questions.look(now)
        for name, source in self._warnings.due():
            self._act_on_signal(name, source)
        self._check_files(now)
        if self._deadline.time_is_up(now):
            self._seen.due_time_limit = True
            self._note(NoticeSeen(what="end of the time limit", source="clock"))
            self._ask_stop("time limit")
        self._deadline.look(now)
        self._check_parting()
        self._check_left_out(now)
        if self._may_save() and self._pace.due(now):
            self._ask_save("every_minutes")
        self._look_at_trends(now)
        self._look_at_nodes(now)
        self._watch_for_stalls(now)
        self._probe(now)
        self._ending.look(now)

    def _take_signals(self) -> bool:
        """Whether the batch step got any since the last time."""
        names = self.unheard()
        for name in names:
            self._signalled(name, _BATCH)
        return bool(names)

    def _signalled(self, name: str, source: str) -> None:
        """Somebody got a signal: a stop is asked for, unless it may be no more than a warning."""
        if not self._warnings.keep(name, source):
            self._act_on_signal(name, source)

    def _act_on_signal(self, name: str, source: str) -> None:
        seen = self._seen
        heard = seen.batch_signals if source == _BATCH else seen.rank_signals
        # The batch step may get the same one again and again.
        if source != _BATCH or not heard or heard[-1] != name:
            self._note(NoticeSeen(what=name, source=source))
        of_batch = source == _BATCH or self._is_of_whole_job(name, source)
        stopping = of_batch and seen.stop_asked is not None
        if of_batch:
            seen.note_batch_signal(name, self._watch, self._clock())
        else:
            heard.append(name)
            self._signalled_by.add(source)
        self._ask_stop(name)
        if stopping:
            self._questions.batch_signalled()

    def _is_of_whole_job(self, name: str, source: str) -> bool:
        """Whether a rank's signal came with one for the batch step, where nobody listens there.

        At the start of a preemption's grace time Slurm signals the tasks of steps once; a SIGTERM
        after that, a scancel's or the end of the grace time, the batch step gets, too.
        """
        return self._launched is None and name == "SIGTERM" and source in self._signalled_by

    def _look_at_trends(self, now: float) -> None:
        """A slow node is told of; where the job file says so, the launch is stopped for it."""
        for event in self._trends.look(now):
            self._note(event)
        slow = self._trends.newly_slow()
        if slow is None or not self._undisturbed():
            return
        self._watch.comment(in_words(slow))
        if not self._timing.acts_on_stragglers or not slow.why.of_node:
            return
        self._seen.straggler = slow
        if self._only_warns(self._facts()):
            self._seen.straggler = None
        else:  # nothing is wrong with the ranks: they save first
            self._ask_stop(f"{slow.host} is slow")

    def _look_at_nodes(self, now: float) -> None:
        """Before training begins: what ranks found, and which of them try a collective next."""
        if self._seen.ending_since is not None:
            return
        measured = self._preflight.look(now)
        if measured is not None:
            self._note(measured)
        if self._preflight.refused is not None:
            self._seen.refused = self._preflight.refused
            self._end()

    def _watch_for_stalls(self, now: float) -> None:
        """Not once the launch is ending: a stop that does not come has its own deadline."""
        seen = self._seen
        if seen.stop_asked is not None or seen.ending_since is not None:
            return
        told = self._watchdog.look(now, seen.said_goodbye)
        if told is not None:
            self._note(told)
        if self._watchdog.stalled is None:
            return
        seen.stalled = self._watchdog.stalled
        if self._only_warns(self._facts()):
            seen.stalled = None
            self._watchdog.forgive()
        else:
            self._end()

    def _probe(self, now: float) -> None:
        if not self._undisturbed():
            return
        told = self._judge.look(now, self._seen.said_goodbye)
        if told is not None:
            self._note(told)
        if self._judge.failed is None:
            return
        if self._only_warns(self._facts()):
            self._judge.forgive()
        else:
            self._end()

    def _undisturbed(self) -> bool:
        """Whether the launch goes on and nobody has left it: else nothing new is asked for."""
        seen = self._seen
        return seen.stop_asked is None and seen.ending_since is None and not seen.said_goodbye

    def _may_save(self) -> bool:
        """Not before anything was computed, nor while the last one waits for a long phase to end:
        that would be a second save of the same step.
        """
        members = self._hub.members().values()
        if self._seen.save_request is not None or not self._undisturbed():
            return False
        return any(member.started for member in members) and all(
            member.step >= self._seen.save_step for member in members
        )

    def _ask_save(self, why: str) -> None:
        self._seen.save_request = self._hub.request(RequestKind.SAVE, why)

    def _note(self, event: Event) -> None:
        """Journal what was seen.  A full disk must not end the launch that it is about."""
        with contextlib.suppress(OSError):
            self._journal.write(event)

    def _check_files(self, now: float) -> None:
        if now < self._next_files or self._seen.stop_asked is not None:
            return
        self._next_files = now + _FILES_EVERY_S
        # A storage that does not answer is no reason to end the launch: it is looked at again.
        with contextlib.suppress(OSError):
            if self._stop_file.exists():
                self._seen.stop_file = True
                self._note(NoticeSeen(what="STOP", source="file"))
                self._ask_stop("STOP file")
            elif self._may_save() and self._save_file.exists():
                self._save_file.unlink(missing_ok=True)
                self._note(NoticeSeen(what="SAVE", source="file"))
                self._ask_save("SAVE file")

    def _check_parting(self) -> None:
        seen = self._seen
        if not seen.through or seen.ending_since is not None:
            return
        parted = seen.parted(self._hub.members())
        if parted is not None:
            rank, other = parted
            step = seen.through[rank]
            text = (
                f"the training function of rank {rank} returned after step {step}, that of rank "
                f"{other} went on. All ranks must take the same steps: return on all or on none."
            )
            self._fail(rank, Cause.APP_ERROR.value, step, text)

    def _check_left_out(self, now: float) -> None:
        parted = self._left_out.parted(self._hub.members(), now)
        if parted is not None and self._seen.ending_since is None:
            step, ranks = parted
            text = (
                f"the update of step {step} was left out on some ranks and applied on rank "
                f"{ranks[0]}: their gradient norms differ, and so do their weights from there on"
            )
            self._fail(0, Cause.LOSS_SPIKE.value, step, text, everybody=True)

    def _not_committed(self, said: p.NotCommitted) -> None:
        failed = self._pace.not_committed(self._clock())
        if failed is not None:
            text = f"{failed} saves in a row came to nothing; the last: {said.reason}"
            self._fail(0, Cause.STORAGE.value, said.step, text, everybody=True)

    def _ask_stop(self, why: str) -> None:
        if self._seen.stop_asked is not None:
            return
        self._seen.stop_asked = self._clock()
        self._questions.stop_asked(self._seen.stop_asked)
        started = [member.started for member in self._hub.members().values()]
        if self._seen.finished:
            pass  # who is through can't save together with the others: they come to their end, too
        elif any(started):
            self._hub.request(RequestKind.STOP, why)
        else:
            self._end()  # nothing has been computed yet: what is on disk is as new as can be

    def _end(self) -> None:
        self._ending.begin(self._clock())

    # -- the end -----------------------------------------------------------------------------

    def _over(self) -> bool:
        if not self._ending.is_over(self._clock()):
            return False
        if self._launched is not None and not self._seen.deadline_passed:
            self._drain()
        return True

    def _drain(self) -> None:
        """What ranks said right before they ended may still be on its way."""
        until = self._clock() + 1.0
        while self._clock() < until:
            self._hear()
            if all(not member.connected for member in self._hub.members().values()):
                self._hear()
                return
