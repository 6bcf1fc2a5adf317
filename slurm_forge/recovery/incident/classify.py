"""Turn the observations of a launch into one incident: cause, confidence, evidence.

In the order of authority: a person's request, Slurm's records, a rank's own last words, the probe,
the messages of Slurm and the kernel about ranks that left none, and finally what was printed.
"""

from __future__ import annotations

from slurm_forge.recovery.incident.launch_facts import (
    STARTER,
    LaunchFacts,
    RankFailure,
)
from slurm_forge.recovery.incident.lost_nodes import vanished
from slurm_forge.recovery.incident.rank_exits import (
    first_lost,
    judge_silent_end,
    launcher_killed,
)
from slurm_forge.recovery.incident.slurm_evidence import (
    Judged,
    by_srun_alone,
    failed_nodes,
    is_ending,
    judge_stop,
    killed_for_memory,
    node_lost,
    step_daemon_names_reason,
)
from slurm_forge.recovery.monitor.straggler_reports import in_words
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Incident

#: What a rank may report when a process of the launch, such as its loader worker, was killed.
_MAY_BE_MEMORY = frozenset({Cause.NCCL_ERROR, Cause.CRASH, Cause.UNKNOWN, Cause.HOST_OOM})
#: Causes that originate at the node, or in the process, of the rank that failed first.
_OF_A_RANK = frozenset({Cause.NODE_FAIL, Cause.CRASH, Cause.HOST_OOM, Cause.GPU_ERROR})
_SHOWN_FOLLOWERS = 8


def classify(facts: LaunchFacts, incident_id: str) -> Incident:
    """The incident behind a launch that did not finish."""
    cause, confidence, evidence = _judge(facts)
    first = _first_failure(facts)
    rank, hosts = _where(facts, cause, first)
    return Incident(
        id=incident_id,
        cause=cause,
        confidence=confidence,
        evidence=(*evidence, *_followers(facts, rank)),
        step=facts.stopped_at if facts.stopped_at is not None else _step(facts),
        onset=None if cause is not Cause.NON_FINITE else _onset(facts),
        rank=rank,
        hosts=hosts,
        micro_batch=None if first is None else first.micro_batch,
        usage_error=first is not None and first.usage_error and cause is first.cause,
    )


def _where(
    facts: LaunchFacts, cause: Cause, first: RankFailure | None
) -> tuple[int | None, tuple[str, ...]]:
    """The rank and the hosts where the incident began, if known."""
    nodes, named = failed_nodes(facts), _suspected_hosts(facts)
    # The host named during the launch is, or is one of, those that are gone.
    agree = not named or bool(named & set(nodes))
    if cause is Cause.NODE_FAIL and nodes and facts.refused is None and agree:
        on_it = [lost.rank for lost in (*facts.lost, *facts.unresponsive) if lost.host == nodes[0]]
        return (on_it[0] if on_it else None), nodes
    refused = facts.refused
    if refused is not None and cause is refused.cause:
        return refused.rank, refused.hosts
    stall = facts.stalled
    if stall is not None and cause is stall.cause:
        return (stall.late_ranks[0] if stall.late_ranks else None), _each_once(stall.late_hosts)
    probe = facts.probe
    if stall is None and probe is not None and cause is probe.cause:
        return (probe.ranks[0] if probe.ranks else None), _each_once(probe.hosts)
    if first is not None and cause is first.cause:
        return (None, ()) if first.all_ranks else (first.rank, (first.host,))
    if facts.straggler is not None and cause is Cause.STRAGGLER:
        return facts.straggler.ranks[0], (facts.straggler.host,)
    if first is not None and cause is Cause.HOST_OOM and first.cause is Cause.CRASH:
        return first.rank, (first.host,)
    if facts.launcher_signal and _only_follows(first):
        return None, ()
    lost = first_lost(facts)
    # A rank that gave up waiting for another is no evidence against its own node.
    if lost is not None and cause in _OF_A_RANK:
        return lost.rank, (lost.host,)
    return None, ()


def _onset(facts: LaunchFacts) -> int | None:
    return None if facts.non_finite is None else facts.non_finite.onset


def _each_once(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Remove duplicates: several ranks may share a host."""
    return tuple(dict.fromkeys(hosts))


def _step(facts: LaunchFacts) -> int | None:
    if facts.stalled is not None:
        return facts.stalled.step
    if facts.probe is not None:
        return facts.probe.step
    if facts.non_finite is not None and facts.non_finite.step is not None:
        return facts.non_finite.step
    first = _first_failure(facts)
    return facts.furthest if first is None else first.step


def _suspected_hosts(facts: LaunchFacts) -> set[str]:
    """The hosts that were named during the launch."""
    late_hosts = set() if facts.stalled is None else set(facts.stalled.late_hosts)
    return late_hosts if facts.probe is None else late_hosts | set(facts.probe.hosts)


def _first_failure(facts: LaunchFacts) -> RankFailure | None:
    """The last words that count: not those of a rank whose peer had failed before."""
    own = [each for each in facts.failures if each.cause is not Cause.NCCL_ERROR]
    if facts.lost:
        own = [each for each in own if not each.after_loss]
        return own[0] if own else None
    return next(iter(own or facts.failures), None)


def _followers(facts: LaunchFacts, rank: int | None) -> tuple[Evidence, ...]:
    """Ranks that only lost a peer, as distinct from the rank where it began."""
    if rank is None:
        return ()
    followed = sorted(
        {
            each.rank
            for each in facts.failures
            if each.rank != rank and (each.cause is Cause.NCCL_ERROR or each.after_loss)
        }
    )
    if not followed:
        return ()
    rank_list = ", ".join(map(str, followed[:_SHOWN_FOLLOWERS]))
    more = len(followed) - _SHOWN_FOLLOWERS
    ranks = f"{rank_list} and {more} more" if more > 0 else rank_list
    return (Evidence("followers", f"{'rank' if len(followed) == 1 else 'ranks'} {ranks}"),)


def _judge(facts: LaunchFacts) -> Judged:
    if facts.stop_file:
        return Cause.STOP_REQUESTED, Confidence.CERTAIN, (Evidence("STOP", "the file exists"),)
    if facts.stopped_by:
        words = Evidence(STARTER, facts.stopped_by)
        return Cause.STOP_REQUESTED, Confidence.CERTAIN, (words,)
    if facts.non_finite is not None:  # before any stop: later events are consequences of ours
        words = Evidence(facts.launcher, facts.non_finite.text)
        return Cause.NON_FINITE, Confidence.LIKELY, (words,)
    signalled = bool(facts.rank_signals or facts.batch_signals or facts.due_time_limit)
    stop_requested = signalled or is_ending(facts)
    explained = not facts.signalled_since or step_daemon_names_reason(facts)
    if stop_requested:
        from_slurm = judge_stop(facts)
        # A job that was already preempted may have been cancelled.
        cancelled = from_slurm is not None and from_slurm[0] is Cause.USER_CANCELLED
        if from_slurm is not None and (cancelled or explained):
            return from_slurm
    if facts.batch_signals and (
        not explained or (facts.job_at_notice is None and facts.job_at_end is None)
    ):
        return _not_known_yet(facts)  # whatever ranks report from here on is a consequence
    first = _first_failure(facts)
    # A rank that only lost a peer gives no reason: a node that fails as a whole leaves no message.
    silent = vanished(facts)
    lost = silent and not killed_for_memory(facts) and not facts.lost
    # A host that can't reach the others does not hear them: then it is not they that are gone.
    named = _suspected_hosts(facts)
    if named and not named & set(silent):
        lost = ()
    if lost and (first is None or first.cause is Cause.NCCL_ERROR):
        without = node_lost(facts)
        if without is not None:
            return without
    if facts.refused is not None:
        return facts.refused.cause, facts.refused.confidence, facts.refused.evidence
    if facts.stalled is not None:  # what ranks report once they are ended follows from it
        return facts.stalled.cause, facts.stalled.confidence, facts.stalled.evidence
    if facts.probe is not None:
        return facts.probe.cause, facts.probe.confidence, facts.probe.evidence
    if facts.launcher_signal and _only_follows(first):
        killed = launcher_killed(facts)
        if killed is not None:
            return killed
    if first is not None:
        return _by_last_words(facts, first)
    if facts.restart_requested:
        words = Evidence("exit status", f"{facts.exit_status}: it requests a restart")
        return Cause.ADMIN_REQUEUE, Confidence.CERTAIN, (words,)
    if facts.straggler is not None:
        sure = Confidence.LIKELY if facts.straggler.why.of_node else Confidence.GUESS
        return Cause.STRAGGLER, sure, (Evidence("pace", in_words(facts.straggler)),)
    memory_or_node = killed_for_memory(facts) or node_lost(facts)
    unexplained = facts.stopped_at is not None or not (memory_or_node or facts.failures)
    if signalled and unexplained and not by_srun_alone(facts):
        return _not_known_yet(facts)
    return judge_silent_end(facts)


def _not_known_yet(facts: LaunchFacts) -> Judged:
    """A stop without an explanation so far: treated as a preemption until Slurm provides one."""
    signals = ", ".join((*facts.rank_signals, *facts.batch_signals)) or "the end of the time"
    if not facts.by_slurm:
        text = f"{signals}, of unknown origin"
    elif facts.signalled_since or (facts.job_at_notice is None and facts.job_at_end is None):
        text = f"{signals}; Slurm has not answered since, so the cause is not known yet"
    else:
        text = f"{signals}, unexplained by Slurm's records"
    return Cause.PREEMPTED, Confidence.GUESS, (Evidence("signals", text),)


def is_unexplained(incident: Incident) -> bool:
    """Whether the launch was stopped and no evidence says by whom and why."""
    return incident.cause is Cause.PREEMPTED and incident.confidence is Confidence.GUESS


def _only_follows(first: RankFailure | None) -> bool:
    """Whether no rank reported more than the loss of another one."""
    return first is None or first.cause is Cause.NCCL_ERROR


def _by_last_words(facts: LaunchFacts, first: RankFailure) -> Judged:
    if first.all_ranks:
        return first.cause, Confidence.CERTAIN, (Evidence("all ranks", first.text),)
    words = Evidence(f"rank {first.rank} on {first.host}", first.text)
    killed = killed_for_memory(facts)
    if killed and first.cause in _MAY_BE_MEMORY:
        return Cause.HOST_OOM, Confidence.LIKELY, (words, *killed)
    sure = Confidence.CERTAIN if first.usage_error else Confidence.LIKELY
    return first.cause, sure, (words,)
