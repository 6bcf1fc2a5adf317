"""What ``doctor`` says of this machine and of the controller's configuration.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.errors import ConfigError
from slurm_forge.recovery.live_findings import Mark
from slurm_forge.report.doctor.sections import Remark, ReportSection, clock_difference
from slurm_forge.report.text import clean
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.survey import Question, Reply, Survey
from slurm_forge.slurm.versions import NEWEST, SlurmRelease, batch_variables
from slurm_forge.units import words_for_duration as _words

_SHORT_KILL_WAIT = timedelta(seconds=10)
_SHORT_JOB_AGE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This host: versions, and which of Slurm's commands there are."""

    python: str
    slurm_forge: str
    #: None where it is not installed.
    torch: str | None
    missing_commands: tuple[str, ...] = ()


def machine_section(machine: Machine, *, slurm_answers: bool) -> ReportSection:
    """What is installed here."""
    remarks = [Remark(Mark.OK, f"Python {machine.python}, slurm_forge {machine.slurm_forge}.")]
    if machine.torch is None:
        remarks.append(
            Remark(
                Mark.NOTE,
                "torch is not installed for this interpreter: fine on a login node; the ranks need "
                "one that has it.",
                "Name it with python: in the job file or the site file, or activate it in setup:.",
            )
        )
    else:
        remarks.append(Remark(Mark.OK, f"torch {machine.torch} is installed for this interpreter."))
    if machine.missing_commands:
        there = "" if slurm_answers else " Slurm can't be asked."
        remarks.append(
            Remark(
                Mark.WARNING if slurm_answers else Mark.PROBLEM,
                f"not found on the PATH: {', '.join(machine.missing_commands)}.{there}",
                "Load the cluster's Slurm module, or go to a login node.",
            )
        )
    return ReportSection("this machine", told=tuple(remarks))


def slurm_section(survey: Survey) -> ReportSection:
    """What of the controller's configuration matters to a run, and what could not be asked."""
    config = survey.config
    about = ""
    if config is not None:
        about = f"{clean(config.cluster_name, 64)}, Slurm {clean(config.version or '?', 32)}"
    clocks = clock_difference(
        survey.clock_ahead_s,
        "the controller's",
        "A run saves before its time limit ends by the controller's clock, which its first node "
        "asks for; under submitit's own executors by the node's clock, so too early if that one is "
        "ahead.",
    )
    remarks = (*_questions(survey), *_version(survey), *clocks, *_settings(survey))
    return ReportSection("Slurm", about, remarks)


def _version(survey: Survey) -> Iterator[Remark]:
    """Whether a run would start on a Slurm of this version, and what of it is not known here."""
    config = survey.config
    release = None if config is None else SlurmRelease.parse(config.version)
    if config is None or release is None:
        return
    try:
        variables = SlurmEnvironment.from_environ(batch_variables(release))
    except ConfigError as error:
        yield Remark(
            Mark.PROBLEM,
            f"no run starts on Slurm {release}: {clean(error.message, 200)}.",
            "Install a newer slurm_forge, or report it to us.",
        )
        return
    if release > NEWEST:
        yield Remark(
            Mark.NOTE,
            f"Slurm {release} is newer than {NEWEST}, the newest that this slurm_forge was tested "
            "with.",
            "slurm-forge doctor --live shows whether a run starts and comes back.",
        )
    strange = [*config.unrecognized, *(() if variables is None else variables.unrecognized)]
    strange += [each for place in survey.partitions or () for each in place.unrecognized]
    for text in dict.fromkeys(f"{each}" for each in strange):
        yield Remark(
            Mark.WARNING,
            f"not understood, ignored: {clean(text, 160)}.",
            "Please report it to us, with the version of Slurm.",
        )


def _questions(survey: Survey) -> Iterator[Remark]:
    answered = sum(each.reply is Reply.ANSWERED for each in survey.questions)
    if answered:
        yield Remark(Mark.OK, f"{answered} of {len(survey.questions)} questions were answered.")
    missing = {
        each.command.split(" ")[0] for each in survey.questions if each.reply is Reply.NO_COMMAND
    }
    for each in survey.questions:
        if each.reply in (Reply.ANSWERED, Reply.NOT_ASKED) or each.command.split(" ")[0] in missing:
            continue  # a missing command is reported once, as a fact about this machine
        words = clean(each.words, 160).rstrip(".")
        # "no answer within 10 s" and the like say it all.
        reply = words if words.startswith(each.reply.value) else each.reply.value
        words = f": {words}" if words and reply != words else ""
        vital = each.command == "scontrol show config"
        yield Remark(
            Mark.PROBLEM if vital else Mark.WARNING,
            f"`{clean(each.command, 80)}`: {reply}{words}.",
            _ask_again(each),
        )

    skipped = [
        each
        for each in survey.questions
        if each.reply is Reply.NOT_ASKED and each.command.split(" ")[0] not in missing
    ]
    if skipped:
        names = ", ".join(f"`{clean(each.command, 60)}`" for each in skipped)
        yield Remark(Mark.WARNING, f"not asked after that: {names}.")


def _ask_again(question: Question) -> str:
    reply = question.reply
    if reply is Reply.NO_ANSWER:
        if "configuration source" in question.words:
            return (
                "Slurm is installed, but no cluster is configured: load its module, or go to a "
                "login node."
            )
        return "Check whether `scontrol ping` answers, and try again when it does."
    if reply is Reply.REFUSED:
        return "Its answer is taken from the site file, or unknown."
    return "Run it by hand; if its answer looks right, please report it to us."


def _settings(survey: Survey) -> Iterator[Remark]:
    config = survey.config
    if config is None:
        return
    kind = clean(config.preempt_type or "unknown", 40)
    sent = "the signal of --signal" if config.sends_user_signal else "SIGTERM"
    if kind not in ("preempt/none", "unknown"):
        yield Remark(
            Mark.OK, f"PreemptType={kind}: ranks get {sent} where a preemption has a notice."
        )
    elif kind == "preempt/none":
        yield Remark(Mark.OK, "PreemptType=preempt/none: jobs are not preempted.")
    if config.job_requeue is False:
        yield Remark(
            Mark.NOTE,
            "JobRequeue=0: Slurm requeues only jobs that ask for it; slurm-forge's scripts do "
            "(--requeue), and your own scripts have to.",
        )
    yield Remark(Mark.OK, f"a requeued job can start again after {_words(config.requeue_delay)}.")
    if config.kill_wait is not None and config.kill_wait < _SHORT_KILL_WAIT:
        yield Remark(
            Mark.NOTE,
            f"KillWait is {_words(config.kill_wait)}: Slurm kills that soon after SIGTERM.",
        )
    if config.min_job_age is not None and config.min_job_age < _SHORT_JOB_AGE:
        yield Remark(
            Mark.WARNING,
            f"MinJobAge is {_words(config.min_job_age)}: a job that has ended can't be requeued "
            "after that, and only accounting knows how it ended.",
        )
    if survey.has_database is False:
        yield Remark(
            Mark.NOTE,
            "no accounting (AccountingStorageType): sacct cannot say how jobs ended, and there "
            "are no QOS.",
        )
    if config.constrain_ram is False:
        yield Remark(
            Mark.NOTE,
            "ConstrainRAMSpace=no: jobs are not limited to the memory that they requested; a node "
            "that runs out of memory may kill any process.",
        )
    if (config.proctrack_type or "").endswith("/pgid"):
        yield Remark(
            Mark.WARNING,
            "ProctrackType=proctrack/pgid: processes that leave their group outlive the job.",
        )
    if config.job_submit_plugins:
        names = ", ".join(clean(each, 40) for each in config.job_submit_plugins)
        yield Remark(
            Mark.NOTE,
            f"JobSubmitPlugins={names}: rules that cannot be read from here may change or refuse "
            "a job.",
        )
    if config.requeue_exit:
        yield Remark(
            Mark.NOTE,
            f"RequeueExit={clean(config.requeue_exit, 60)}: Slurm itself requeues jobs that end "
            "with these codes.",
        )
    if config.requeue_exit_hold:
        yield Remark(
            Mark.NOTE,
            f"RequeueExitHold={clean(config.requeue_exit_hold, 60)}: Slurm requeues jobs that end "
            "with these codes and holds them until scontrol release.",
        )
    if config.slurmd_timeout:
        yield Remark(
            Mark.OK,
            f"a lost node is noticed after {_words(config.slurmd_timeout)} (SlurmdTimeout).",
        )
