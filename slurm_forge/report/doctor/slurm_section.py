"""What ``doctor`` says of this machine and of the controller's configuration.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.errors import ConfigError
from slurm_forge.report.doctor.sections import (
    Mark,
    Section,
    Told,
    clock_difference,
)
from slurm_forge.report.text import clean
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.survey import Question, Reply, Survey
from slurm_forge.slurm.versions import NEWEST, Release, batch_variables
from slurm_forge.units import words_for_duration as _words

__all__ = ["Machine", "machine_section", "slurm_section"]

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


def machine_section(machine: Machine, *, slurm_answers: bool) -> Section:
    """What is installed here."""
    told = [Told(Mark.OK, f"Python {machine.python}, slurm_forge {machine.slurm_forge}.")]
    if machine.torch is None:
        told.append(
            Told(
                Mark.NOTE,
                "torch is not installed for this interpreter: fine on a login node; the ranks need "
                "one that has it.",
                "Say which by python: in the job file or the site file, or activate it in setup:.",
            )
        )
    else:
        told.append(Told(Mark.OK, f"torch {machine.torch} is installed for this interpreter."))
    if machine.missing_commands:
        there = "" if slurm_answers else " Slurm can't be asked."
        told.append(
            Told(
                Mark.WARNING if slurm_answers else Mark.PROBLEM,
                f"not found on the PATH: {', '.join(machine.missing_commands)}.{there}",
                "Load the cluster's Slurm module, or go to a login node.",
            )
        )
    return Section("this machine", told=tuple(told))


def slurm_section(survey: Survey) -> Section:
    """What of the controller's configuration matters to a run, and what could not be asked."""
    config = survey.config
    about = ""
    if config is not None:
        about = f"{clean(config.cluster_name, 64)}, Slurm {clean(config.version or '?', 32)}"
    clocks = clock_difference(
        survey.clock_ahead_s,
        "the controller's",
        "A run saves before the end of its time limit by the controller's clock, which its first "
        "node asks for; under submitit's own executors by the node's, so too early where that is "
        "ahead.",
    )
    told = (*_questions(survey), *_version(survey), *clocks, *_settings(survey))
    return Section("Slurm", about, told)


def _version(survey: Survey) -> Iterator[Told]:
    """Whether a run would start on a Slurm of this version, and what of it is not known here."""
    config = survey.config
    release = None if config is None else Release.parse(config.version)
    if config is None or release is None:
        return
    try:
        found = SlurmEnvironment.from_environ(batch_variables(release))
    except ConfigError as error:
        yield Told(
            Mark.PROBLEM,
            f"no run starts on Slurm {release}: {clean(error.message, 200)}.",
            "Install a newer slurm_forge, or report it to us.",
        )
        return
    if release > NEWEST:
        yield Told(
            Mark.NOTE,
            f"Slurm {release} is newer than {NEWEST}, the newest that this slurm_forge was tried "
            "on.",
            "slurm-forge doctor --live shows whether a run starts, and comes back.",
        )
    strange = [*config.unrecognized, *(() if found is None else found.unrecognized)]
    strange += [each for place in survey.partitions or () for each in place.unrecognized]
    for told in dict.fromkeys(f"{each}" for each in strange):
        yield Told(
            Mark.WARNING,
            f"not understood, and done without: {clean(told, 160)}.",
            "Please report it to us, with the version of Slurm.",
        )


def _questions(survey: Survey) -> Iterator[Told]:
    answered = sum(each.reply is Reply.ANSWERED for each in survey.questions)
    if answered:
        yield Told(Mark.OK, f"{answered} of {len(survey.questions)} questions were answered.")
    missing = {
        each.command.split(" ")[0] for each in survey.questions if each.reply is Reply.NO_COMMAND
    }
    for each in survey.questions:
        if each.reply in (Reply.ANSWERED, Reply.NOT_ASKED) or each.command.split(" ")[0] in missing:
            continue  # a command that is not there is told of once, as a fact of this machine
        words = clean(each.words, 160).rstrip(".")
        # "no answer within 10 s" and the like say it all.
        said = words if words.startswith(each.reply.value) else each.reply.value
        words = f": {words}" if words and said != words else ""
        vital = each.command == "scontrol show config"
        yield Told(
            Mark.PROBLEM if vital else Mark.WARNING,
            f"`{clean(each.command, 80)}`: {said}{words}.",
            _ask_again(each),
        )

    skipped = [
        each
        for each in survey.questions
        if each.reply is Reply.NOT_ASKED and each.command.split(" ")[0] not in missing
    ]
    if skipped:
        names = ", ".join(f"`{clean(each.command, 60)}`" for each in skipped)
        yield Told(Mark.WARNING, f"not asked after that: {names}.")


def _ask_again(question: Question) -> str:
    reply = question.reply
    if reply is Reply.NO_ANSWER:
        if "configuration source" in question.words:
            return "Its commands are here, and no cluster: load its module, or go to a login node."
        return "See whether `scontrol ping` answers, and try again when it does."
    if reply is Reply.REFUSED:
        return "What it would have told is taken from the site file, or unknown."
    return "Run it by hand; if its answer looks right, please report it to us."


def _settings(survey: Survey) -> Iterator[Told]:
    config = survey.config
    if config is None:
        return
    kind = clean(config.preempt_type or "unknown", 40)
    sent = "the signal of --signal" if config.sends_user_signal else "SIGTERM"
    if kind not in ("preempt/none", "unknown"):
        yield Told(
            Mark.OK, f"PreemptType={kind}: ranks get {sent} where a preemption has a notice."
        )
    elif kind == "preempt/none":
        yield Told(Mark.OK, "PreemptType=preempt/none: nobody is preempted.")
    if config.job_requeue is False:
        yield Told(
            Mark.NOTE,
            "JobRequeue=0: Slurm requeues no job that does not ask for it; scripts of slurm-forge "
            "ask (--requeue), and a script of your own has to.",
        )
    yield Told(Mark.OK, f"a requeued job can start again after {_words(config.requeue_delay)}.")
    if config.kill_wait is not None and config.kill_wait < _SHORT_KILL_WAIT:
        yield Told(
            Mark.NOTE,
            f"KillWait is {_words(config.kill_wait)}: Slurm kills so soon after SIGTERM.",
        )
    if config.min_job_age is not None and config.min_job_age < _SHORT_JOB_AGE:
        yield Told(
            Mark.WARNING,
            f"MinJobAge is {_words(config.min_job_age)}: a job that has ended can't be requeued "
            "after that, and how it ended is only known to accounting.",
        )
    if survey.has_database is False:
        yield Told(
            Mark.NOTE,
            "no accounting (AccountingStorageType): sacct tells nothing of how jobs ended, and "
            "there are no QOS.",
        )
    if config.constrain_ram is False:
        yield Told(
            Mark.NOTE,
            "ConstrainRAMSpace=no: jobs are not held to the memory that they asked for; a node "
            "that runs out of it may kill anybody.",
        )
    if (config.proctrack_type or "").endswith("/pgid"):
        yield Told(
            Mark.WARNING,
            "ProctrackType=proctrack/pgid: processes that leave their group outlive the job.",
        )
    if config.job_submit_plugins:
        names = ", ".join(clean(each, 40) for each in config.job_submit_plugins)
        yield Told(
            Mark.NOTE,
            f"JobSubmitPlugins={names}: rules that nobody can read from here may change or refuse "
            "a job.",
        )
    if config.requeue_exit:
        yield Told(
            Mark.NOTE,
            f"RequeueExit={clean(config.requeue_exit, 60)}: Slurm itself requeues jobs that end "
            "with these codes.",
        )
    if config.requeue_exit_hold:
        yield Told(
            Mark.NOTE,
            f"RequeueExitHold={clean(config.requeue_exit_hold, 60)}: Slurm requeues jobs that end "
            "with these codes and holds them; scontrol release lets them go on.",
        )
    if config.slurmd_timeout:
        yield Told(
            Mark.OK,
            f"a lost node is noticed after {_words(config.slurmd_timeout)} (SlurmdTimeout).",
        )
