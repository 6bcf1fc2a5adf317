"""The meaning of a live check for a run: each finding, fine, odd or wrong, and what to do.

Pure: from observations, predictions, and the site file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from slurm_forge.control.interfaces import interface_of
from slurm_forge.open_files import ranks_possible
from slurm_forge.recovery.live_observations import (
    Fate,
    JobSeen,
    LiveSeen,
    Meeting,
    NodeSeen,
    Receiver,
    RoundKind,
    Sighting,
    SignalRound,
)
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    Prediction,
)
from slurm_forge.site.model import Site

_GIB = 1 << 30
_CLOCK_S = 2.0
_FILES_LATE_S = 5.0
_SHM_LEAST = 1 * _GIB
_LOCKED_LEAST = 64 << 20
#: Below this number of ranks no limit of the cluster matters.
_RANKS_LEAST = 1024
#: Tolerance beyond the prediction before it is reported: the scheduler's own intervals.
_BACK_LATE = timedelta(seconds=60)
#: Slurm may send it a minute early (sbatch, --signal), and never late.
_EARLY_S = 65.0
_LATE_S = 2.0


class Mark(str, Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class LiveFinding:
    """One sentence, and what to do about it if anything."""

    mark: Mark
    about: str
    text: str
    advice: str = ""


def findings(
    observed: LiveSeen, prediction: Prediction | None, site: Site
) -> tuple[LiveFinding, ...]:
    """All findings in the order of display; empty without a report."""
    report = observed.report
    if report is None:
        return ()
    results = [*_signals(report), *_storage(report, observed.meeting)]
    for node in report.nodes[:1]:
        results += _commands(node, prediction)
        results += _machine(node, site, report)
    results += _network(observed, site)
    results += _requeued(observed, prediction)
    return tuple(results)


# --- signals --------------------------------------------------------------------------------------


def _signals(report: JobSeen) -> Iterator[LiveFinding]:
    for each in report.rounds:
        if each.problem and each.kind is not RoundKind.WARNING:
            yield LiveFinding(Mark.WARNING, "signals", f"{each.kind.value}: {each.problem}.")
            continue
        match each.kind:
            case RoundKind.WARNING:
                yield from _warning(each)
            case RoundKind.STEPS_USER | RoundKind.STEPS_TERM:
                yield from _steps(each)
            case RoundKind.BATCH_USER:
                all_heard = _all(each.of(Receiver.BATCH), Fate.HEARD)
                text = "the batch step receives signals that are sent to it alone"
                if not all_heard:
                    text = "a signal that was sent to the batch step did not arrive there"
                yield LiveFinding(Mark.OK if all_heard else Mark.WARNING, "signals", f"{text}.")


def _warning(each: SignalRound) -> Iterator[LiveFinding]:
    advice = "A run reads its end from Slurm and stops in time by its own clock."
    all_heard = _all(each.of(Receiver.TASK), Fate.HEARD)
    if each.before_end_s is None or each.asked_s is None or not all_heard:
        text = f"Slurm's own warning: {each.problem or 'the task did not receive it'}."
        yield LiveFinding(Mark.WARNING, "signals", text, advice)
        return
    early = each.before_end_s - each.asked_s
    came = f"Slurm's own warning came {each.before_end_s:.0f} s before the end of the limit"
    requested = f"requested: {each.asked_s:.0f} s"
    fine = -_LATE_S <= early <= _EARLY_S
    yield LiveFinding(
        Mark.OK if fine else Mark.WARNING,
        "signals",
        f"{came} ({requested}).",
        "" if fine else advice,
    )


def _steps(each: SignalRound) -> Iterator[LiveFinding]:
    tasks, plain = each.of(Receiver.TASK), each.of(Receiver.TASK_PLAIN)
    if _all(tasks, Fate.HEARD):
        latest = max(t.after_s or 0.0 for t in tasks)
        without = "; without a handler it would have died of it" if _all(plain, Fate.DIED) else ""
        yield LiveFinding(
            Mark.OK,
            "signals",
            f"a rank receives {each.signal} {latest:.2f} s after it is sent{without}.",
        )
    else:
        yield LiveFinding(
            Mark.PROBLEM,
            "signals",
            f"{each.signal} does not reach the tasks of a step ({_fates(tasks)}): no save can be "
            "made at a preemption.",
            "Show this to the administrators; until then rely on checkpoint.every_minutes.",
        )
    yield from _below(each)
    yield from _workers(each)


def _below(each: SignalRound) -> Iterator[LiveFinding]:
    """Ranks that are not direct children of slurmstepd."""
    for way, what, advice in (
        (
            Receiver.SHELL,
            "a shell",
            "Start ranks by exec, or leave their start to slurm-forge.",
        ),
        (
            Receiver.TORCHRUN,
            "torchrun",
            "Leave signals to slurm-forge: it receives them in place of torchrun, and informs its "
            "ranks over the control channel.",
        ),
    ):
        for sighting in each.of(way):
            if sighting.fate is Fate.CARRIED_OFF:
                when = "" if sighting.after_s is None else f" {sighting.after_s:.1f} s later"
                text = (
                    f"{each.signal} ends {what} and{when} the rank below it, which does not "
                    "receive it."
                )
                yield LiveFinding(Mark.NOTE, "signals", text, advice)
            elif sighting.fate is Fate.NOTHING:
                text = f"below {what} a rank does not receive {each.signal}."
                yield LiveFinding(Mark.NOTE, "signals", text, advice)


def _workers(each: SignalRound) -> Iterator[LiveFinding]:
    if any(s.fate is Fate.DIED for s in each.of(Receiver.WORKER)):
        yield LiveFinding(
            Mark.PROBLEM,
            "signals",
            f"{each.signal} kills a loader worker although it is shielded.",
            "Please report this; num_workers: 0 avoids it.",
        )
    if any(s.fate is Fate.DIED for s in each.of(Receiver.WORKER_PLAIN)):
        yield LiveFinding(
            Mark.NOTE,
            "signals",
            f"{each.signal} reaches every process of a step here, and kills loader workers that "
            "are not shielded.",
            "run.batches shields them; give a DataLoader of your own worker_init_fn=shield_worker.",
        )


def _all(sightings: tuple[Sighting, ...], fate: Fate) -> bool:
    return bool(sightings) and all(each.fate is fate for each in sightings)


def _fates(sightings: tuple[Sighting, ...]) -> str:
    return ", ".join(dict.fromkeys(each.fate.value for each in sightings)) or "none was there"


# --- storage --------------------------------------------------------------------------------------


def _storage(report: JobSeen, meeting: Meeting) -> Iterator[LiveFinding]:
    where = "storage"
    bad = [node for node in report.nodes if not (node.storage.visible and node.storage.writable)]
    for node in bad:
        yield LiveFinding(
            Mark.PROBLEM,
            where,
            f"{node.host} can't use the folder of runs: {node.storage.problem or 'not writable'}.",
            "Choose a folder that all nodes share: --runs DIR, SLURM_FORGE_RUNS.",
        )
    if report.nodes and not bad:
        slowest = max(node.storage.synced_s or 0.0 for node in report.nodes)
        text = f"every node has the folder of runs; a small file is durable in {_short(slowest)}."
        yield LiveFinding(Mark.OK, where, text)
    if any(n.storage.exclusive is False for n in report.nodes) or meeting.exclusive is False:
        yield LiveFinding(
            Mark.PROBLEM,
            where,
            "two nodes could create the same file exclusively: claims can't be relied on here.",
            "Choose another file system for --runs.",
        )
    if meeting.content_right is False:
        text = "a file that a node synced and renamed was incomplete on the login node."
        yield LiveFinding(Mark.PROBLEM, where, text, "Choose another file system for --runs.")
    yield from _locks(report, meeting)
    yield from _together(meeting)


def _locks(report: JobSeen, meeting: Meeting) -> Iterator[LiveFinding]:
    answers = [node.storage.lock_refused for node in report.nodes] + [meeting.lock_refused]
    if any(node.storage.no_locks for node in report.nodes):
        text = "this file system has no file locks; runs do not depend on them."
        yield LiveFinding(Mark.NOTE, "storage", text)
    elif False in answers:
        yield LiveFinding(
            Mark.NOTE,
            "storage",
            "file locks do not hold between nodes here; no run depends on them, but two commands "
            "on two nodes may do the same work twice.",
        )
    elif True in answers:
        yield LiveFinding(
            Mark.OK, "storage", "file locks hold between the login node and compute nodes."
        )


def _together(meeting: Meeting) -> Iterator[LiveFinding]:
    late = meeting.seen_after_s
    if late is not None:
        slow = late > _FILES_LATE_S
        text = f"a file written on one side is answered from the other side within {late:.1f} s."
        advice = "STOP and SAVE files take that long; slurm-forge stop takes effect at once."
        yield LiveFinding(
            Mark.WARNING if slow else Mark.OK, "storage", text, advice if slow else ""
        )
    ahead, give = meeting.clock_ahead_s, meeting.clock_give_s or 0.0
    if ahead is None:
        return
    off = abs(ahead) - give > _CLOCK_S
    which = "ahead of" if ahead > 0 else "behind"
    clocks = f"the node's clock is {abs(ahead):.1f} s {which} the login node's"
    text = f"{clocks} (give or take {give:.1f} s)."
    advice = "explain shows the nodes' times; ask the administrators for synchronised clocks."
    yield LiveFinding(Mark.WARNING if off else Mark.OK, "clock", text, advice if off else "")


# --- the node -------------------------------------------------------------------------------------


def _commands(node: NodeSeen, prediction: Prediction | None) -> Iterator[LiveFinding]:
    where = "slurm"
    back = set() if prediction is None else {prediction.back_by, prediction.limit_back_by}
    lost = set(node.missing) | set(node.silent)
    if node.commands and not lost:
        text = f"{', '.join(node.commands)} answer on compute nodes."
        yield LiveFinding(Mark.OK, where, text)
    if "scontrol" in lost:
        needed = BroughtBack.RUN in back
        yield LiveFinding(
            Mark.PROBLEM if needed else Mark.WARNING,
            where,
            "scontrol does not work on compute nodes: a run can't requeue itself there, nor ask "
            "whether it is being preempted.",
            "Its request stays in its journal: run slurm-forge watch on a login node, which "
            "carries it out (or slurm-forge reconcile RUN).",
        )
    if "sacct" in lost:
        text = "sacct does not answer on compute nodes: some causes will be less certain."
        yield LiveFinding(Mark.NOTE, where, text)
    if node.may_submit is not True:
        needed = BroughtBack.SUCCESSOR in back
        problem = "sbatch is missing" if "sbatch" in node.missing else "Slurm takes no job"
        yield LiveFinding(
            Mark.PROBLEM if needed else Mark.NOTE,
            where,
            f"{problem} on compute nodes: no successor can be submitted from there.",
            "slurm-forge watch on a login node submits it." if needed else "",
        )


def _machine(node: NodeSeen, site: Site, report: JobSeen) -> Iterator[LiveFinding]:
    if node.torch is None:
        yield LiveFinding(
            Mark.WARNING,
            "python",
            f"{node.python} can't import torch on {node.host}.",
            "Is this the environment that ranks use? Set it up in setup: or the site's modules.",
        )
    else:
        yield LiveFinding(
            Mark.OK, "python", f"torch {node.torch} is imported in {node.torch_s or 0:.1f} s."
        )
    claimed = site.internet_on_compute_nodes
    if claimed is not None and node.internet is not None and claimed != node.internet:
        claim, is_so = ("has", "has none") if claimed else ("has no", "has some")
        yield LiveFinding(
            Mark.WARNING,
            "network",
            f"the site file {site.name} says that nodes {claim} internet; {node.host} {is_so}.",
            "Correct internet_on_compute_nodes.",
        )
    elif node.internet is not None:
        without = "" if node.internet or not node.proxy else " but by a proxy"
        text = f"internet on {node.host}: {'yes' if node.internet else 'no'}{without}."
        yield LiveFinding(Mark.OK, "network", text)
    if node.shm_free is not None and node.shm_free < _SHM_LEAST:
        yield LiveFinding(
            Mark.WARNING,
            "memory",
            f"shared memory has {node.shm_free / _GIB:.1f} GiB left, which loader workers need.",
            "Use fewer workers, or a smaller prefetch_factor.",
        )
    if node.memory_asked is not None:
        limit = node.memory_limit
        text = (
            "memory limits are not enforced here: a job that takes too much harms its neighbours."
            if limit is None
            else f"memory is limited to {limit / _GIB:.1f} GiB, and processes beyond it are killed."
        )
        yield LiveFinding(Mark.NOTE if limit is None else Mark.OK, "memory", text)
    if node.locked_memory is not None and node.locked_memory < _LOCKED_LEAST:
        yield LiveFinding(
            Mark.NOTE,
            "memory",
            f"a process may lock {node.locked_memory >> 20} MiB of memory: InfiniBand needs more.",
            "ulimit -l on compute nodes (the administrators, or PropagateResourceLimits).",
        )
    if node.open_files is not None and (most := ranks_possible(node.open_files)) < _RANKS_LEAST:
        yield LiveFinding(
            Mark.NOTE,
            "open files",
            f"a process may open {node.open_files} files: enough for a launch of {most} ranks.",
            "ulimit -Hn on compute nodes (the administrators, or PropagateResourceLimits).",
        )


def _network(observed: LiveSeen, site: Site) -> Iterator[LiveFinding]:
    report = observed.report
    if report is None:
        return
    wanted = site.socket_interface
    if wanted is not None and any(
        interface_of(wanted, node.interfaces) is None for node in report.nodes
    ):
        yield LiveFinding(
            Mark.WARNING,
            "network",
            f"no interface of the nodes is called {wanted}, which the site file "
            f"{site.name} says (there are {', '.join(report.nodes[0].interfaces)}).",
            "Correct socket_interface.",
        )
    others = [node for node in report.nodes if node.reaches]
    for node in others:
        ways = [reach for reach in node.reaches if reach.connected_s is not None]
        if not ways:
            tried = "; ".join(f"{r.address}: {r.problem}" for r in node.reaches)
            text = f"{node.host} can't connect to {report.host} ({tried})."
            advice = "Ports between nodes of a job must be open; ask the administrators."
            yield LiveFinding(Mark.PROBLEM, "network", text, advice)
        else:
            names = ", ".join(f"{r.address} ({1000 * (r.connected_s or 0):.1f} ms)" for r in ways)
            yield LiveFinding(Mark.OK, "network", f"{node.host} reaches {report.host} by {names}.")
    if observed.nodes > 1 and len(report.nodes) < observed.nodes:
        text = f"only {len(report.nodes)} of {observed.nodes} nodes have answered."
        yield LiveFinding(
            Mark.PROBLEM, "network", text, "Try again; then slurm-forge probe --nodes 2."
        )


def _requeued(observed: LiveSeen, prediction: Prediction | None) -> Iterator[LiveFinding]:
    if not observed.requeue_tried:
        return
    if observed.requeued_s is None:
        yield LiveFinding(
            Mark.PROBLEM,
            "requeue",
            "the job requested its requeue and did not start again while the check waited.",
            "squeue --me shows why it waits; a busy cluster is not a fault.",
        )
        return
    text = f"the job requeued itself and ran again {observed.requeued_s:.0f} s later."
    expected = None if prediction is None else prediction.delay
    if expected is not None and timedelta(seconds=observed.requeued_s) > expected + _BACK_LATE:
        forecast = f" Predicted: {expected.total_seconds():.0f} s."
        advice = "The rest is waiting for nodes: what a run pays for each requeue now."
        yield LiveFinding(Mark.NOTE, "requeue", text + forecast, advice)
    else:
        yield LiveFinding(Mark.OK, "requeue", text)


def _short(seconds: float) -> str:
    """A duration for a small file: in milliseconds as long as that reads well."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{max(1, round(seconds * 1000))} ms"
