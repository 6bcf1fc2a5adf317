"""What will happen to a job on this site, in words: printed before it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from slurm_forge.launch.render.save_times import SaveNote, lead_time
from slurm_forge.launch.render.sbatch_options import job_request
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    JobConditions,
    brought_back,
)
from slurm_forge.recovery.policy.save_interval import FIRST
from slurm_forge.report.purge import PurgeRule, purge_outlook
from slurm_forge.report.submission.chain_notes import chain_outlook
from slurm_forge.report.submission.save_notes import saves_outlook
from slurm_forge.report.text import clean
from slurm_forge.site.model import Preemption, PreemptionMode, Site, Storage
from slurm_forge.site.rules import RuleFinding, Severity, findings
from slurm_forge.slurm.sbatch_words import asks_for_requeue
from slurm_forge.spec import JobSpec
from slurm_forge.units import words_for_duration


def outlook(
    job: JobSpec,
    site: Site,
    *,
    default_partition: str | None = None,
    storage: Storage | None = None,
    machine: str | None = None,
    options: Sequence[str] = (),
    where: Callable[[str], str] | None = None,
    saves: SaveNote | None = None,
) -> tuple[str, ...]:
    """Sentences about preemption, the time limit and checkpoints; only what is known.

    ``default_partition`` is where Slurm puts a job that names none, ``storage`` what the run lies
    on, ``machine`` what its interpreter is for, ``options`` what sbatch is given.  ``where`` gives
    the place in the job file of an sbatch option, empty where it is not there.  ``saves`` is what
    saves took in an earlier run of the kind.
    """
    wanted = job.resources
    names: list[str | None] = [p for p in (wanted.partition or "").split(",") if p]
    lines: list[str] = []
    preemptions: list[Preemption] = []
    comes_back = True
    for name in names or [default_partition]:
        facts = site.facts(name, wanted.qos)
        place = _place(site, name, wanted.qos)
        back_by = brought_back(
            JobConditions(
                preemption=facts.preemption,
                self_requeue_allowed=facts.self_requeue_allowed,
                requeue=asks_for_requeue(options or ("--requeue", *site.sbatch_options)),
                chained=job.chain is not None,
            )
        )
        lines.append(f"{place}: {_preemption(facts.preemption, job, back_by)}")
        preemptions.append(facts.preemption)
        comes_back = comes_back and facts.self_requeue_allowed is not False
    lines += chain_outlook(job, comes_back=comes_back)
    request = job_request(job, site, options, default_partition=default_partition, machine=machine)
    # Errors are reported where the job is refused.
    lines += [
        _finding_line(each, where)
        for each in findings(request, site)
        if each.severity is not Severity.ERROR
    ]
    if site.requeue_delay:
        lines.append(
            f"a requeued job starts again after {words_for_duration(site.requeue_delay)} at the "
            "earliest."
        )
    if storage is not None and storage.purge_after is not None:
        lines.append(purge_outlook(PurgeRule(storage.purge_after, storage.purge_basis or "")))
    lines.append(f"{_time_limit(job, site, names or [default_partition], saves)}{_saves(job)}.")
    lines += saves_outlook(job, saves, preemptions)
    return tuple(dict.fromkeys(lines))


_BACK = {
    BroughtBack.RUN: "the run requeues itself, as the same job.",
    BroughtBack.SLURM: "the run continues from its last checkpoint.",
    BroughtBack.SUCCESSOR: "a successor job is submitted (afterany): --no-requeue is in force.",
    BroughtBack.CHAIN: "the next task continues.",
    BroughtBack.PERSON: "the run is held until you requeue it (slurm-forge requeue).",
}


def _place(site: Site, partition: str | None, qos: str | None) -> str:
    parts = [clean(site.name, 64)]
    if partition:
        parts.append(f"partition {clean(partition, 64)}")
    if qos:
        parts.append(f"QOS {clean(qos, 64)}")
    return ", ".join(parts)


def _preemption(known: Preemption, job: JobSpec, back_by: BroughtBack) -> str:
    match known.mode:
        case PreemptionMode.OFF:
            return "jobs are not preempted."
        case PreemptionMode.REQUEUE if back_by is not BroughtBack.SUCCESSOR:
            same = back_by is BroughtBack.RUN  # whoever is first
            back = _BACK[BroughtBack.SLURM if same else back_by]
            sentence = f"preempted jobs are requeued {_notice(known, job)}; {back}"
        case PreemptionMode.REQUEUE | PreemptionMode.CANCEL:
            # Slurm cancels what it may not requeue.
            sentence = f"preempted jobs are cancelled {_notice(known, job)}; {_BACK[back_by]}"
        case PreemptionMode.SUSPEND:
            sentence = "preempted jobs are suspended and later resumed on the same nodes."
        case _:
            back = "the run is requeued, or a successor job submitted where Slurm refuses that."
            return "the site file does not say what happens to preempted jobs; " + (
                "the next task continues." if job.chain else back
            )
    if known.exempt:
        sentence += f" Not before a job has run for {words_for_duration(known.exempt)}."
    return sentence


def _notice(known: Preemption, job: JobSpec) -> str:
    if known.grace is None:
        return "after a notice of unknown length"
    if known.grace == timedelta(0):
        return f"without notice (only what was saved survives: {_schedule(job)})"
    return f"after {words_for_duration(known.grace)} of notice"


def _finding_line(finding: RuleFinding, where: Callable[[str], str] | None) -> str:
    """A sentence, and behind it the line of the job file that it is about."""
    text = clean(finding.message, 400)
    line = "" if where is None or finding.option is None else where(finding.option)
    if line:
        text = f"{text.rstrip('.')} ({line})."
    return f"warning: {text}" if finding.severity is Severity.WARNING else text


def _time_limit(job: JobSpec, site: Site, names: list[str | None], saves: SaveNote | None) -> str:
    limit = job.resources.time
    if limit is None:
        known = [site.facts(name, job.resources.qos).max_time for name in names]
        # The partition's DefaultTime may be shorter: only that there is a limit is sure.
        owner = "the partition's" if any(known) else "the partition's, if it has one"
        return f"the time limit is {owner}; beyond it the run continues in another attempt; "
    lead = lead_time(job, limit, timedelta(seconds=0.0 if saves is None else saves.seconds))
    begins = "the program is signalled" if _keeps_its_own(job) else "the last save begins"
    return (
        f"{begins} {words_for_duration(lead)} before the time limit of "
        f"{words_for_duration(limit)}; beyond it the run continues in another attempt; "
    )


def _keeps_its_own(job: JobSpec) -> bool:
    """A command; unless its ranks join us (``attach``), for which alone one would say how."""
    return job.command is not None and "checkpoint" not in job.model_fields_set


def _saves(job: JobSpec) -> str:
    if _keeps_its_own(job):
        own = job.program.checkpoint_glob
        return _schedule(job) + (f": {clean(own, 120)}" if own else "")
    keep = job.checkpoint.keep_last
    return f"{_schedule(job)}, the newest {keep if keep > 1 else 'one'} kept"


def _schedule(job: JobSpec) -> str:
    if _keeps_its_own(job):
        return "checkpoints are the program's own"
    return f"checkpoint {_interval(job)}"


def _interval(job: JobSpec) -> str:
    parts = []
    if job.checkpoint.every is not None:
        parts.append(f"every {words_for_duration(job.checkpoint.every)}")
    if job.checkpoint.automatic:
        parts.append(f"every {words_for_duration(FIRST)} (later as often as it pays)")
    if job.checkpoint.every_steps is not None:
        count = job.checkpoint.every_steps
        parts.append("every step" if count == 1 else f"every {count} steps")
    return " and ".join(parts) or "only when the run stops"
