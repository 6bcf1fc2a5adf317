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

from slurm_forge.control import Hub
from slurm_forge.control.hub_events import (
    MessageReceived,
    RankDisconnected,
    RequestAbandoned,
    TargetAgreed,
)
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.links import LinkReport, PortReport
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import PhaseDuration, StackReport
from slurm_forge.control.messages.preflight import PreflightReport, PreflightTried
from slurm_forge.control.messages.probe import ProbeArrived, ProbeBroke, ProbeDone
from slurm_forge.control.messages.rank import (
    FunctionReturned,
    Notice,
    RankFailed,
    RankFinished,
    RankStopped,
    RecoveryNeeded,
    RequestProposal,
    RolledBack,
    SaveCommitted,
    SaveFailed,
    UpdateSkipped,
    heartbeat_every_s,
)
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Event, StopAgreed
from slurm_forge.launch.conductor.hang_watchdog import Watchdog
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.conductor.network_monitor import NetworkMonitor
from slurm_forge.launch.conductor.observations import (
    Launched,
    Observations,
)
from slurm_forge.launch.conductor.preflight_monitor import PreflightMonitor
from slurm_forge.launch.conductor.probe_monitor import ProbeMonitor
from slurm_forge.launch.conductor.rank_views import RankViews
from slurm_forge.launch.conductor.save_timer import SaveTimer
from slurm_forge.launch.conductor.shutdown import (
    Shutdown,
)
from slurm_forge.launch.conductor.skip_consistency import SkipConsistency
from slurm_forge.launch.conductor.stop_monitor import StopMonitor
from slurm_forge.launch.conductor.straggler_monitor import StragglerMonitor
from slurm_forge.launch.render.schedule import Timing
from slurm_forge.recovery.incident.launch_facts import (
    LaunchFacts,
    LostRank,
    RankFailure,
    is_usage_error,
)
from slurm_forge.recovery.monitor.probe_verdict import ProbeRules
from slurm_forge.recovery.monitor.straggler_reports import in_words
from slurm_forge.slurm.kernel import killed_since, read_oom_kills
from slurm_forge.vocabulary.cause import Cause

_TICK_S = 0.05


class Conductor:
    """Watches one launch until it is over.

    ``stops`` hears who wants it to stop, from any thread.  Where it is given, the launch is that of
    a program which has more to do than train, and which ranks have joined.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        journal: JournalWriter,
        job_poller: JobPoller,
        timing: Timing,
        stop_file: Path,
        save_file: Path,
        launched: Launched | None,
        stops: StopMonitor | None = None,
        only_warns: Callable[[LaunchFacts], bool] = lambda _: False,
        expected_bandwidth: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._hub = hub
        self._journal = journal
        self._job_poller = job_poller
        self._timing = timing
        self._launched = launched
        self._only_warns = only_warns
        self._clock = clock
        self._now = now
        self._tick_s = _TICK_S * heartbeat_every_s(hub.world_size)
        stays = stops is not None
        self.stops = stops or StopMonitor(
            hub,
            job_poller,
            timing,
            Observations(),
            note=self._note,
            stop_file=stop_file,
            save_file=save_file,
            clock=clock,
            now=now,
            batch_step=launched is not None,
        )
        self._observations = self.stops.observations
        self._shutdown = Shutdown(hub, self._observations, launched, clock(), stays=stays)
        self._pace = SaveTimer(timing, clock())
        self._skips = SkipConsistency(hub.world_size)
        self._kills = read_oom_kills()
        self._stragglers = StragglerMonitor(
            hub.members,
            factor=timing.straggler,
            every=timing.pace_every,
            clock=clock,
        )
        views = RankViews(hub, clock)
        self._preflight = PreflightMonitor(
            hub, timing.preflight, clock, expected=expected_bandwidth, views=views
        )
        self._network = NetworkMonitor(hub, clock, timing.probe_deadline)
        self._watchdog = Watchdog(
            hub,
            timing.hang,
            clock,
            attempt=journal.attempt,
            launch=journal.launch,
            learned=dict(timing.stretches),
            network=self._network,
            views=views,
        )
        self._probes = ProbeMonitor(
            hub,
            timing.probe_every,
            ProbeRules(timing.probe_silence, timing.probe_deadline, timing.hang),
            clock,
            limit=self._watchdog.limit,
            attempt=journal.attempt,
            launch=journal.launch,
            bandwidth_every=timing.bandwidth_every,
            views=views,
            network=self._network,
        )

    def watch(self) -> LaunchFacts:
        """Conduct until the launch is over; what was seen."""
        self._job_poller.ask()
        self.stops.watch_for(self)
        while not self._over():
            self._receive()
            self._poll()
        self.stops.close()
        self.stops.questions.last(self.stops.take_signals)
        self._observations.killed_for_memory = killed_since(self._kills, read_oom_kills()) or ""
        return self._facts()

    def _facts(self) -> LaunchFacts:
        return self._observations.facts(
            self._hub.members(),
            now=self._now(),
            clock_ahead=self.stops.deadline.clock_ahead(self._clock()),
            lead=self._timing.lead,
            planned_end=self._timing.planned_end,
            probe=self._probes.failed,
            job_poller=self._job_poller,
            launched=self._launched,
            clock=self._clock(),
            monitors={rank: view.last_message_at for rank, view in self._hub.monitors().items()},
        )

    # -- hearing -----------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            event = self._hub.events.get(timeout=self._tick_s)
        except queue.Empty:
            return
        while True:
            match event:
                case MessageReceived():
                    self._on_message(event.ranks, event.message)
                case RankDisconnected():
                    self._on_lost(event.rank)
                case TargetAgreed() if event.request.kind is RequestKind.STOP:
                    self._note(StopAgreed(step=event.target.step, seconds=event.seconds))
                case RequestAbandoned():
                    self._probes.withdrawn(event.request.id)
                case TargetAgreed() if event.request.id == self._observations.save_request:
                    self._observations.save_request = None
                    self._observations.save_step = event.target.step
                case _:
                    pass
            try:
                event = self._hub.events.get_nowait()
            except queue.Empty:
                return

    def _on_message(self, ranks: tuple[int, ...], message: Message) -> None:
        if isinstance(message, ProbeArrived | ProbeDone | ProbeBroke):
            self._probes.on_message(ranks, message)
            return
        if isinstance(message, StepTiming):
            self._stragglers.add(ranks, message)
            return
        for rank in ranks:
            self._on_message_of(rank, message)

    def _on_message_of(self, rank: int, message: Message) -> None:
        observations = self._observations
        match message:
            case Notice():
                self.stops.signalled(message.what, f"rank {rank}")
            case RankStopped():
                observations.left_ranks.add(rank)
                self._shutdown.stopped(rank, message.stays_s, self._clock())
                observations.stopped = (
                    message if rank == 0 or observations.stopped is None else observations.stopped
                )
            case SaveCommitted():
                self._watchdog.note_save(message.seconds)
                self._pace.committed(
                    self._clock(),
                    blocked=timedelta(seconds=message.blocked_s),
                    durable=timedelta(seconds=message.seconds),
                )
            case SaveFailed():
                self._on_save_failed(message)
            case FunctionReturned():
                observations.returned_at[rank] = message.step
            case RankFinished():
                observations.left_ranks.add(rank)
                observations.finished[rank] = message
            case RankFailed():
                observations.left_ranks.add(rank)
                self._fail(
                    rank,
                    message.cause,
                    message.step,
                    message.text,
                    micro_batch=message.micro_batch,
                    usage_error=is_usage_error(message.error),
                )
            case RecoveryNeeded():
                observations.left_ranks.add(rank)
                observations.decided = observations.decided or message.decided
                if not observations.given_up:
                    observations.given_up = True
                    self._fail(rank, message.cause, message.step, message.text, all_ranks=True)
            case RequestProposal() if rank == 0 or message.kind is RequestKind.RECOVER:
                if self._undisturbed():
                    self._hub.request(message.kind, message.reason)
            case RolledBack():
                observations.save_step = 0  # the steps come again
                self._job_poller.comment(message.text)
            case UpdateSkipped():
                self._skips.add(rank, message.step, self._clock())
            case PreflightReport() | PreflightTried():
                self._preflight.on_message(rank, message)
            case PhaseDuration() | StackReport():
                self._watchdog.on_message(rank, message)
                self._probes.on_message((rank,), message)
            case LinkReport() | PortReport():
                self._network.on_message(rank, message)
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
        all_ranks: bool = False,
        usage_error: bool = False,
    ) -> None:
        is_known = cause in {each.value for each in Cause}
        self._observations.failures.append(
            RankFailure(
                rank=rank,
                host=self._hub.host_of(rank) or "?",
                cause=Cause(cause) if is_known else Cause.UNKNOWN,
                step=step,
                text=text,
                micro_batch=micro_batch or None,
                after_loss=bool(self._observations.lost),
                all_ranks=all_ranks,
                usage_error=usage_error,
            )
        )
        self._end()

    def _on_lost(self, rank: int) -> None:
        # Ranks that we told to leave go without a word: that is no evidence of anything.
        if rank in self._observations.left_ranks or self._observations.aborted:
            return
        self._observations.lost.append(LostRank(rank, self._hub.host_of(rank) or "?"))
        self._end()

    # -- looking -----------------------------------------------------------------------------

    def _poll(self) -> None:
        now = self._clock()
        self.stops.poll(now)
        self._check_returns()
        self._check_skips(now)
        if self._pace.is_due(now) and self.may_save():
            self._pace.restart(now)
            self._ask_save("every_minutes")
        self._poll_stragglers(now)
        self._poll_preflight(now)
        self._poll_watchdog(now)
        self._poll_probe(now)
        self._shutdown.poll(now)

    def _poll_stragglers(self, now: float) -> None:
        """A slow node is reported; where the job file says so, the launch is stopped for it."""
        for event in self._stragglers.poll(now):
            self._note(event)
        slow = self._stragglers.take_newest()
        if slow is None or not self._undisturbed():
            return
        self._job_poller.comment(in_words(slow))
        if not self._timing.acts_on_stragglers or not slow.why.of_node:
            return
        self._observations.straggler = slow
        if self._only_warns(self._facts()):
            self._observations.straggler = None
        else:  # nothing is wrong with the ranks: they save first
            self.stops.ask_stop(f"{slow.host} is slow", "stragglers")

    def _poll_preflight(self, now: float) -> None:
        """Before training begins: what ranks found, and which of them try a collective next."""
        if self._observations.ending_since is not None:
            return
        measured = self._preflight.poll(now)
        if measured is not None:
            self._note(measured)
            self._preflight.reports.clear()  # of thousands of ranks
        if self._preflight.refused is not None:
            self._observations.refused = self._preflight.refused
            self._end()

    def _poll_watchdog(self, now: float) -> None:
        """Not once the launch is ending: a stop that does not come has its own deadline."""
        observations = self._observations
        if observations.stop_asked is not None or observations.ending_since is not None:
            return
        event = self._watchdog.poll(now, observations.left_ranks)
        if event is not None:
            self._note(event)
        if self._watchdog.stalled is None:
            return
        observations.stalled = self._watchdog.stalled
        if self._only_warns(self._facts()):
            observations.stalled = None
            self._watchdog.acknowledge()
        else:
            self._end()

    def _poll_probe(self, now: float) -> None:
        if not self._undisturbed():
            return
        event = self._probes.poll(now, self._observations.left_ranks)
        if event is not None:
            self._note(event)
        if self._probes.failed is None:
            return
        if self._only_warns(self._facts()):
            self._probes.acknowledge()
        else:
            self._end()

    def _undisturbed(self) -> bool:
        """Whether the launch goes on and nobody has left it: else nothing new is asked for."""
        observations = self._observations
        return (
            observations.stop_asked is None
            and observations.ending_since is None
            and not observations.left_ranks
        )

    def may_save(self) -> bool:
        """Whether a save can be asked for now.

        Not before anything was computed, nor while the last one waits for a long phase to end: that
        would be a second save of the same step.
        """
        if self._observations.save_request is not None or not self._undisturbed():
            return False
        beats = self._hub.heartbeats()
        return any(beat.started for beat in beats) and all(
            beat.step >= self._observations.save_step for beat in beats
        )

    def _ask_save(self, why: str) -> None:
        self._observations.save_request = self._hub.request(RequestKind.SAVE, why)

    def _note(self, event: Event) -> None:
        """Journal what was seen.  A full disk must not end the launch that it is about."""
        with contextlib.suppress(OSError):
            self._journal.write(event)

    def _check_returns(self) -> None:
        observations = self._observations
        if not observations.returned_at or observations.ending_since is not None:
            return
        parted = observations.diverged_ranks(self._hub.members())
        if parted is not None:
            rank, other = parted
            step = observations.returned_at[rank]
            text = (
                f"the training function of rank {rank} returned after step {step}, that of rank "
                f"{other} continued. All ranks must take the same steps: return on all or on none."
            )
            self._fail(rank, Cause.APP_ERROR.value, step, text)

    def _check_skips(self, now: float) -> None:
        parted = self._skips.divergence(self._hub.members, now)
        if parted is not None and self._observations.ending_since is None:
            step, ranks = parted
            text = (
                f"the update of step {step} was skipped on some ranks and applied on rank "
                f"{ranks[0]}: their gradient norms differ, and so do their weights from there on"
            )
            self._fail(0, Cause.LOSS_SPIKE.value, step, text, all_ranks=True)

    def _on_save_failed(self, message: SaveFailed) -> None:
        failed = self._pace.not_committed(self._clock())
        if failed is not None:
            text = f"{failed} saves in a row failed; the last: {message.reason}"
            self._fail(0, Cause.STORAGE.value, message.step, text, all_ranks=True)

    # -- what somebody wants -----------------------------------------------------------------

    def stop(self, what: str, source: str) -> None:
        """Have the ranks save and stop, together."""
        if self._observations.finished:
            return  # who is through can't save together with the others: they come to their end
        if any(beat.started for beat in self._hub.heartbeats()):
            self._hub.request(RequestKind.STOP, what)
        else:
            self._end()  # nothing has been computed yet: what is on disk is as new as can be

    def insist(self) -> None:
        """Ranks that save are not stopped in the middle of it; those that have saved are."""
        self._shutdown.hurry(self._clock())

    def save(self) -> None:
        """Have the ranks save and go on."""
        self._ask_save("SAVE file")

    def may_wait(self, source: str) -> bool:
        """Ranks only tell of a signal."""
        return True

    def _end(self) -> None:
        self._shutdown.begin(self._clock())

    # -- the end -----------------------------------------------------------------------------

    def _over(self) -> bool:
        if not self._shutdown.is_over(self._clock()):
            return False
        if self._launched is not None and not self._observations.deadline_passed:
            self._drain()
        return True

    def _drain(self) -> None:
        """What ranks said right before they ended may still be on its way."""
        until = self._clock() + 1.0
        while self._clock() < until:
            self._receive()
            if all(not member.connected for member in self._hub.members().values()):
                self._receive()
                return
