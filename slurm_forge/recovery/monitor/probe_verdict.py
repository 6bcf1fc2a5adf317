"""The verdict on a probe, and on ranks that fall silent: pure, from what the hub has received.

``weigh_silence`` evaluates heartbeats and monitors, all the time; ``weigh_probe`` a probe under
way.  Slow is not dead: a rank that sends messages is late at most, and how long it may stay where
it is, is for the watchdog to decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from slurm_forge.recovery.monitor.phase_durations import HangRules
from slurm_forge.recovery.monitor.rank_phrases import (
    FROZEN_WORDS,
    SHOWN,
    some_ranks,
)
from slurm_forge.recovery.monitor.stalls import longest_excuse
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

#: A rank or monitor heard within this time is talking: both send a message every second.
_FRESH_S = 2.5
#: States of a process that can't send messages: stopped, or dead and not reaped.
_STOPPED = frozenset("TZX")
_TRACED = "t"
_IN_KERNEL = "D"
#: A talking rank that does not reach the probe may be in a long step: up to this many deadlines.
_PATIENCE = 10.0
#: If a rank and its monitor are both silent, packets may be lost: this many times as long.
_DARK = 2.0
#: Steps that all ranks must have completed after a probe to show that training continues, and on a
#: device, of which the host is ahead.
_GOES_ON, _GOES_ON_ON_DEVICE = 2, 3
_PLAIN = frozenset({"train", "data"})


@dataclass(frozen=True, slots=True)
class ProbeRules:
    """How long a rank may be silent, and a probe may take; ``hang`` holds the watchdog's rules."""

    silence: timedelta
    deadline: timedelta
    hang: HangRules | None = None

    def patience(self, limit: float) -> float:
        """Seconds for a talking rank, which may compute or compile: never less than the watchdog
        allows, which examines its stacks.
        """
        own = _PATIENCE * self.deadline.total_seconds()
        if self.hang is None:
            return own
        return max(own, longest_excuse(self.hang, timedelta(seconds=limit)).total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """A rank as the hub knows it; times are seconds before now.

    ``silent_s`` counts from the rank's own last message, ``monitor_silent_s`` from its monitor's,
    None if it has none.  ``state`` is the kernel's letter for its process, from the monitor's last
    message.
    A rank heard within ``fresh_s`` is talking.
    ``since``: time in a stretch of this ``kind``, whose learned limit is ``limit``.
    """

    rank: int
    host: str
    silent_s: float
    monitor_silent_s: float | None = None
    state: str = ""
    step: int = 0
    phase: str = "train"
    kind: str = "train"
    since: float = 0.0
    limit: float = 600.0
    fresh_s: float = _FRESH_S

    @property
    def talks(self) -> bool:
        """Whether it was heard just now and has not been stopped since."""
        return self.silent_s < self.fresh_s and not (self.has_monitor and self.state in _STOPPED)

    @property
    def has_monitor(self) -> bool:
        """Whether its monitor was heard just now."""
        return self.monitor_silent_s is not None and self.monitor_silent_s < self.fresh_s

    @property
    def runs(self) -> bool:
        """Whether its monitor sees it alive and not stopped, whatever the rank itself sends."""
        return self.has_monitor and self.state not in _STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A probe under way, as far as ranks have reported.  Times are of the hub's clock.

    ``latency``, ``bandwidth`` (bytes per second, 0 unknown) and ``wrong`` by reporting rank;
    ``broke`` holds the texts of errors.  The receiver of messages adds to them.  ``step`` is the
    furthest step at the last arrival.
    """

    asked_at: float
    arrived: dict[int, float] = field(default_factory=dict)
    latency: dict[int, float] = field(default_factory=dict)
    bandwidth: dict[int, float] = field(default_factory=dict)
    wrong: dict[int, tuple[int, ...]] = field(default_factory=dict)
    broke: dict[int, str] = field(default_factory=dict)
    step: int = 0
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Nothing:
    """No action yet."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """No rank talks: the job is suspended, or we are; all clocks restart."""


NOTHING, SUSPENDED = Nothing(), Suspended()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fine:
    """All ranks answered with the right values.

    ``latency_s`` counts from the last arrival, ``bandwidth`` is in bytes per second (0 unknown).
    """

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailure:
    """The launch has a problem: who is to blame, as far as can be known, and the evidence.

    ``silent``: based on silence, and withdrawn if one of them talks again.  ``wrong``: based on
    values that arrived changed.
    """

    cause: Cause
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    step: int
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    silent: bool = False
    wrong: bool = False
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskNetwork:
    """The state of the links decides; ``otherwise`` is the verdict if none is bad."""

    otherwise: ProbeFailure | Off | Nothing


@dataclass(frozen=True, slots=True)
class Off:
    """The probe itself is broken: no further probes in this launch.

    ``goes_on``: all ranks completed steps after it, so the links can't be that bad.
    """

    why: str
    goes_on: bool = False


def weigh_silence(
    ranks: Sequence[RankSeen], rules: ProbeRules
) -> Nothing | Suspended | ProbeFailure | AskNetwork:
    """Whether silent ranks are stopped or gone, while others talk.

    No rank is judged while a debugger holds one, or while others have just fallen silent, too.
    A silent rank whose monitor sees it run holds the interpreter's lock and is left to the
    watchdog; so is a launch in which all ranks are silent for that reason: it is not suspended.
    """
    limit = rules.silence.total_seconds()
    if ranks and not any(each.talks for each in ranks):
        return NOTHING if any(each.runs for each in ranks) else SUSPENDED
    quiet = [each for each in ranks if each.silent_s >= limit]
    if not quiet or any(each.has_monitor and each.state == _TRACED for each in ranks):
        return NOTHING
    longest = max(each.silent_s for each in quiet)
    if longest < 2 * limit and any(each.fresh_s <= each.silent_s < limit for each in ranks):
        return NOTHING  # another rank is just falling silent, or waking up
    deadline = max(2 * limit, rules.deadline.total_seconds())
    stopped = [
        each
        for each in quiet
        if each.has_monitor
        and (each.state in _STOPPED or (each.state == _IN_KERNEL and each.silent_s >= deadline))
    ]
    if stopped and (_is_minority(stopped, ranks) or longest >= deadline):
        return _silent_found(stopped, ranks, Confidence.LIKELY)
    dark = [
        each
        for each in quiet
        if min(
            each.silent_s if each.monitor_silent_s is None else each.monitor_silent_s, each.silent_s
        )
        >= _DARK * limit
    ]
    if not dark:
        return NOTHING
    # A host that is cut off is recognized by its links; on a host that is overloaded or swaps,
    # processes are silent for a while, too, but its kernel answers.
    if longest < deadline:
        return AskNetwork(NOTHING)
    # Ranks whose monitor was heard a moment longer count, too: one cut may affect them all.
    if _is_minority([each for each in quiet if not each.has_monitor], ranks):
        two = len({each.host for each in ranks}) == 2
        # With two hosts, either may be the one that is cut off.
        confidence = Confidence.GUESS if two else Confidence.LIKELY
        return AskNetwork(_silent_found(dark, ranks, confidence))
    text = (
        f"{some_ranks([each.rank for each in dark])} silent for {longest:.0f} s, most of the launch"
    )
    return AskNetwork(
        ProbeFailure(
            cause=Cause.HANG,
            ranks=(),
            hosts=(),
            step=max(each.step for each in ranks),
            confidence=Confidence.GUESS,
            evidence=(Evidence("heartbeat", text),),
            silent=True,
        )
    )


def weigh_probe(
    flight: Flight, ranks: Sequence[RankSeen], rules: ProbeRules, now: float
) -> Nothing | Fine | ProbeFailure | AskNetwork | Off:
    """The outcome of a probe under way; silence is not judged here."""
    if flight.latency and len(flight.latency) == len(ranks):
        return weigh_complete_probe(flight) or _wrong_values(flight, ranks)
    if flight.broke:
        return _broken(flight, ranks, now)
    deadline = rules.deadline.total_seconds()
    missing = [each for each in ranks if each.rank not in flight.arrived]
    if missing:
        since = now - min(flight.arrived.values(), default=flight.asked_at)
        return _not_come(flight, missing, since, rules, ranks)
    since = now - max(flight.arrived.values())
    if since < deadline:
        return NOTHING
    return _overdue(flight, ranks, since, deadline)


def weigh_complete_probe(flight: Flight) -> Fine | None:
    """The outcome of a probe that all ranks answered; None if values arrived changed."""
    if any(flight.wrong.values()):
        return None
    return Fine(
        # The last rank to arrive waited for nobody.
        latency_s=min(flight.latency.values()),
        bandwidth=min((each for each in flight.bandwidth.values() if each > 0), default=0.0),
    )


def blamed(wrong: Mapping[int, tuple[int, ...]], world: int) -> tuple[tuple[int, ...], bool]:
    """The ranks whose values are wrong, by what each rank read; whether nearly all agree on it.

    A value that is wrong at most ranks was sent wrong; one that is wrong at few was received wrong
    there.
    """
    readers: dict[int, list[int]] = {}
    for reader, sent in wrong.items():
        for sender in sent:
            readers.setdefault(sender, []).append(reader)
    senders = sorted(each for each, by in readers.items() if 2 * len(by) > world)
    if senders:
        agreed = world > 2 and all(len(readers[each]) >= world - 1 for each in senders)
        return tuple(senders), agreed
    return tuple(sorted({reader for by in readers.values() for reader in by})), False


# -- a probe under way -----------------------------------------------------------------------------


def _wrong_values(flight: Flight, ranks: Sequence[RankSeen]) -> ProbeFailure:
    wrong = {reader: sent for reader, sent in flight.wrong.items() if sent}
    culprits, agreed = blamed(wrong, len(ranks))
    evidence = [
        Evidence(
            "probe",
            f"values of {some_ranks(culprits)} arrived changed, "
            f"read by {some_ranks(sorted(wrong))} of {len(ranks)}",
        )
    ]
    few = [each for each in ranks if each.rank in culprits]
    if not _is_minority(few, ranks):
        evidence.append(Evidence("probe", "too many to blame one: suspect what connects them"))
        few = []
    return ProbeFailure(
        cause=Cause.NCCL_ERROR,
        ranks=tuple(each.rank for each in few),
        hosts=tuple(each.host for each in few),
        step=max(each.step for each in ranks),
        confidence=Confidence.CERTAIN if agreed and few else Confidence.LIKELY,
        evidence=tuple(evidence),
        wrong=True,
    )


def _broken(flight: Flight, ranks: Sequence[RankSeen], now: float) -> Nothing | AskNetwork:
    """Its group raised an error: a peer is gone, which is noticed separately, or a link failed."""
    rank, text = min(flight.broke.items())
    if not flight.gpu:
        return AskNetwork(Off(f"rank {rank}: {text}"))
    return AskNetwork(
        ProbeFailure(
            cause=Cause.NCCL_ERROR,
            ranks=(),
            hosts=(),
            step=max(each.step for each in ranks),
            confidence=Confidence.LIKELY,
            evidence=(Evidence(f"probe, rank {rank}", text),),
        )
    )


def _not_come(
    flight: Flight,
    missing: Sequence[RankSeen],
    since: float,
    rules: ProbeRules,
    ranks: Sequence[RankSeen],
) -> Nothing | ProbeFailure | AskNetwork:
    """Ranks that talk but have not arrived: left to the watchdog until patience runs out."""
    deadline = rules.deadline.total_seconds()
    late = [each for each in missing if each.phase in _PLAIN and each.since > each.limit]
    if len(late) < len(missing) or since < max(rules.patience(each.limit) for each in late):
        # With bad links the previous step may never end, while all ranks talk.
        plain = all(each.phase in _PLAIN for each in ranks)
        return AskNetwork(NOTHING) if since >= deadline and plain else NOTHING
    culprits = late if _is_minority(late, ranks) else []
    lines = [
        Evidence("probe", f"late: {_rank_list(late)} for {since:.0f} s, {_came(flight, ranks)}")
    ]
    lines += [Evidence("heartbeat", _pulse(each)) for each in late[:SHOWN]]
    return ProbeFailure(
        cause=Cause.HANG,
        ranks=tuple(each.rank for each in culprits),
        hosts=tuple(each.host for each in culprits),
        step=max(each.step for each in ranks),
        confidence=Confidence.LIKELY,
        evidence=tuple(lines),
    )


def _overdue(
    flight: Flight, ranks: Sequence[RankSeen], since: float, deadline: float
) -> Nothing | AskNetwork:
    """All ranks have issued it, and it does not complete.

    If training continues, the probe itself is broken.  On a GPU it waits for the work before it,
    which may take as long as a step.
    """
    waiting = [each for each in ranks if each.rank not in flight.latency]
    if _goes_on(flight, ranks, since):
        why = f"it did not complete within {since:.0f} s, while training continues"
        return AskNetwork(Off(why, goes_on=True))
    patience = _PATIENCE * deadline
    if flight.gpu:
        patience = max(deadline, *(each.limit for each in ranks))
    if since < patience or any(each.phase not in _PLAIN for each in ranks):
        return AskNetwork(NOTHING)
    culprits = waiting if 2 * len(waiting) < len(ranks) and _is_minority(waiting, ranks) else []
    lines = [
        Evidence(
            "probe",
            f"all arrived, but after {since:.0f} s it had not completed on {_rank_list(waiting)}",
        )
    ]
    lines += [Evidence("heartbeat", _pulse(each)) for each in waiting[:SHOWN]]
    return AskNetwork(
        ProbeFailure(
            cause=Cause.HANG,
            ranks=tuple(each.rank for each in culprits),
            hosts=tuple(each.host for each in culprits),
            step=max(each.step for each in ranks),
            confidence=Confidence.GUESS,
            evidence=tuple(lines),
        )
    )


def _goes_on(flight: Flight, ranks: Sequence[RankSeen], since: float) -> bool:
    """Whether training has passed the probe on every rank, ``since`` seconds after it was issued.

    A program that reads no results may queue several steps for a device that hangs before it gets
    stuck.  While training continues, no rank stays in one step for half as long as the probe takes.
    """
    if flight.gpu and any(each.since > since / 2 for each in ranks):
        return False
    steps = _GOES_ON_ON_DEVICE if flight.gpu else _GOES_ON
    return min(each.step for each in ranks) >= flight.step + steps


# -- words -----------------------------------------------------------------------------------------


def _silent_found(
    late: Sequence[RankSeen], ranks: Sequence[RankSeen], confidence: Confidence
) -> ProbeFailure:
    late = sorted(late, key=lambda each: each.rank)
    talking = sum(each.talks for each in ranks)
    head = f"late: {_rank_list(late)}; {talking} of {len(ranks)} ranks answer"
    lines = [Evidence("probe", head)]
    lines += [Evidence("heartbeat", _pulse(each)) for each in late[:SHOWN]]
    return ProbeFailure(
        cause=Cause.HANG,
        ranks=tuple(each.rank for each in late),
        hosts=tuple(each.host for each in late),
        step=max(each.step for each in ranks),
        confidence=confidence,
        evidence=tuple(lines),
        silent=True,
    )


def _is_minority(few: Collection[RankSeen], ranks: Collection[RankSeen]) -> bool:
    """Whether they may be to blame: at most half of the hosts, or half of one host's ranks."""
    hosts, theirs = {each.host for each in ranks}, {each.host for each in few}
    if len(hosts) > 1 and 2 * len(theirs) <= len(hosts):
        return True
    return 2 * len(few) <= len(ranks)


def _pulse(each: RankSeen) -> str:
    """Whether its process lives, and what it does: frozen, or waiting for something."""
    who = f"rank {each.rank} ({each.host})"
    if each.talks:
        where = f"{each.phase} at step {each.step} for {each.since:.0f} s"
        return f"{who} is alive: {where} (limit {each.limit:.0f} s)"
    head = f"{who} silent for {each.silent_s:.0f} s: "
    if each.has_monitor:
        return head + FROZEN_WORDS.get(each.state, f"its process runs (state {each.state})")
    if each.monitor_silent_s is None:
        return head + "its process is frozen, or its node is gone"
    return head + "so is its monitor: its node is frozen, gone or can't be reached"


def _rank_list(ranks: Sequence[RankSeen]) -> str:
    rank_list = ", ".join(f"rank {each.rank} ({each.host})" for each in ranks[:SHOWN])
    more = len(ranks) - SHOWN
    return f"{rank_list} and {more} more" if more > 0 else rank_list


def _came(flight: Flight, ranks: Sequence[RankSeen]) -> str:
    return f"{len(flight.arrived)} of {len(ranks)} arrived"
