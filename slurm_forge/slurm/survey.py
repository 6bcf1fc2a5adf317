"""Everything that a login node can be told of its cluster, and what could not be asked.

Each command has its own time; one that is missing, forbidden, slow or not understood leaves its
facts unknown (None) and a ``Question`` that says so.  Nothing is guessed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Protocol, TypeVar

from slurm_forge.errors import ConfigError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.slurm.accounts import (
    ASSOCIATION_FIELDS,
    QOS_FIELDS,
    USER_FIELDS,
    AssociationRecord,
    QosRecord,
    parse_associations,
    parse_default_account,
    parse_qos,
)
from slurm_forge.slurm.clock import clock_ahead
from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
from slurm_forge.slurm.text.json_answers import (
    json_associations,
    json_partitions,
    json_qos,
)
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.slurm.text.parsing import (
    parse_config,
    parse_partitions,
)
from slurm_forge.slurm.text.sinfo import (
    SINFO_FORMAT,
    NodeGroup,
    parse_sinfo,
)

#: Per command: somebody waits.
PATIENCE = timedelta(seconds=10)
_ARCHITECTURE = re.compile(r"(?:^|\s)Arch=(\S+)")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_T = TypeVar("_T")


class Asks(Protocol):
    """Runs a command that only asks, and returns what it prints (``SubprocessSlurm.answer``)."""

    def answer(self, *argv: str) -> str:
        """Raises ``SlurmCommandError``, or ``SlurmUnreachableError`` where nobody answers."""
        ...


class Reply(str, Enum):
    """What became of a question."""

    ANSWERED = "answered"
    NO_COMMAND = "the command does not exist here"
    NO_ANSWER = "no answer"
    REFUSED = "refused"
    NOT_UNDERSTOOD = "the answer was not understood"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Question:
    """A command, what became of it, and Slurm's own words where it did not answer."""

    command: str
    reply: Reply
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What Slurm says of itself and of this user; None is "could not be asked".

    ``qos`` and ``associations`` are empty where the accounting database has none.
    """

    user: str
    config: ConfigRecord | None = None
    partitions: tuple[PartitionRecord, ...] | None = None
    nodes: tuple[NodeGroup, ...] | None = None
    qos: tuple[QosRecord, ...] | None = None
    associations: tuple[AssociationRecord, ...] | None = None
    default_account: str | None = None
    #: Of the compute nodes, as ``uname -m`` says it.
    architecture: str | None = None
    questions: tuple[Question, ...] = ()
    #: By how many seconds this machine's clock is at least ahead of the controller's.
    clock_ahead_s: float | None = None

    @property
    def has_database(self) -> bool | None:
        """Whether there is an accounting database; None where Slurm can't be asked."""
        if self.config is None:
            return None
        kind = self.config.accounting_storage_type or ""
        return kind.removeprefix("accounting_storage/") not in ("", "none")


def take_survey(slurm: Asks, user: str, *, wall: Callable[[], float] = time.time) -> Survey:
    """Ask everything, in the order in which it matters; a controller that is gone is asked once."""
    interview = _Interview(slurm)
    before = wall()
    config = interview.of("scontrol", "show", "config", read=parse_config)
    clock_ahead_s = None if config is None else clock_ahead(config, before, wall())
    partitions = interview.of("scontrol", "-a", "show", "partition", read=parse_partitions)
    if partitions is None:
        partitions = interview.again(
            "scontrol", "-a", "show", "partition", "--json", read=json_partitions
        )
    nodes = interview.of("sinfo", "-a", "--noheader", f"--format={SINFO_FORMAT}", read=parse_sinfo)
    architecture = _architecture(interview, partitions or ())
    survey = Survey(
        user=user,
        config=config,
        partitions=partitions,
        nodes=nodes,
        architecture=architecture,
    )
    qos, associations, account = _accounts(interview, survey)
    return Survey(
        user=user,
        config=config,
        partitions=partitions,
        nodes=nodes,
        architecture=architecture,
        qos=qos,
        associations=associations,
        default_account=account,
        questions=tuple(interview.questions),
        clock_ahead_s=clock_ahead_s,
    )


def survey_accounts(slurm: Asks, user: str, config: ConfigRecord) -> Survey:
    """Only QOS and what this user may ask for, where ``config`` is known already."""
    interview = _Interview(slurm)
    qos, associations, account = _accounts(interview, Survey(user=user, config=config))
    return Survey(
        user=user,
        config=config,
        qos=qos,
        associations=associations,
        default_account=account,
        questions=tuple(interview.questions),
    )


class _Interview:
    """Asks, and notes what became of it."""

    def __init__(self, slurm: Asks) -> None:
        self._slurm = slurm
        self._unreachable: dict[str, str] = {}
        self.questions: list[Question] = []

    def of(self, *argv: str, read: Callable[[str], _T]) -> _T | None:
        shown, program = _shown(argv), argv[0]
        # Whoever waits for a controller that is gone need not wait for each question.
        server = "database" if program == "sacctmgr" else "controller"
        why = self._unreachable.get(program) or self._unreachable.get(server)
        if why is not None:
            self.questions.append(Question(shown, Reply.NOT_ASKED, why))
            return None
        try:
            value = read(self._slurm.answer(*argv))
        except SlurmUnreachableError as error:
            missing = error.returncode == 127
            reply = Reply.NO_COMMAND if missing else Reply.NO_ANSWER
            self._unreachable[program if missing else server] = f"{program}: {reply.value}"
            self.questions.append(Question(shown, reply, _why(error)))
            return None
        except SlurmCommandError as error:
            refused = error.returncode != 0
            reply = Reply.REFUSED if refused else Reply.NOT_UNDERSTOOD
            self.questions.append(Question(shown, reply, _why(error)))
            return None
        self.questions.append(Question(shown, Reply.ANSWERED))
        return value

    def again(self, *argv: str, read: Callable[[str], _T]) -> _T | None:
        """In another form, where the first was not understood or refused."""
        if self.questions[-1].reply not in (Reply.NOT_UNDERSTOOD, Reply.REFUSED):
            return None
        value = self.of(*argv, read=read)
        if value is None:
            self.questions.pop()  # one that no old version has: what was said first counts
        else:
            self.questions.pop(-2)
        return value


def _accounts(
    interview: _Interview, survey: Survey
) -> tuple[tuple[QosRecord, ...] | None, tuple[AssociationRecord, ...] | None, str | None]:
    if survey.has_database is False:
        return (), (), None
    qos = interview.of(*_SACCTMGR, "show", "qos", f"format={QOS_FIELDS}", read=parse_qos)
    if qos is None:
        qos = interview.again("sacctmgr", "--json", "show", "qos", read=json_qos)
    if not _NAME.fullmatch(survey.user):
        interview.questions.append(
            Question("sacctmgr show assoc", Reply.NOT_ASKED, "the user's name is not known")
        )
        return qos, None, None
    where = ["where", f"user={survey.user}"]
    cluster = survey.config.cluster_name if survey.config else None
    # One database may serve several clusters.
    where += [f"cluster={cluster}"] if cluster and _NAME.fullmatch(cluster) else []
    associations = interview.of(
        *_SACCTMGR, "show", "assoc", *where, f"format={ASSOCIATION_FIELDS}", read=parse_associations
    )
    if associations is None:
        associations = interview.again(
            "sacctmgr", "--json", "show", "assoc", *where, read=json_associations
        )
    account = interview.of(
        *_SACCTMGR, "show", "user", survey.user, f"format={USER_FIELDS}", read=parse_default_account
    )
    return qos, associations, account


_SACCTMGR = ("sacctmgr", "--noheader", "--parsable2")


def _architecture(interview: _Interview, partitions: tuple[PartitionRecord, ...]) -> str | None:
    """Of one node of the default partition, else of the first: a cluster of several is rare."""
    ordered = sorted(partitions, key=lambda each: not each.is_default)
    names = next((each.nodes for each in ordered if each.nodes), None)
    try:
        first = expand_nodes(names)[0] if names else None
    except (ConfigError, IndexError):
        first = None
    if first is None or not _NAME.fullmatch(first):
        return None
    return interview.of("scontrol", "show", "node", first, read=_arch_in)


def _arch_in(text: str) -> str | None:
    match = _ARCHITECTURE.search(text)
    return None if match is None else match[1]


def _shown(argv: tuple[str, ...]) -> str:
    words = [word for word in argv if not word.startswith(("-", "format="))]
    return " ".join([*words, "--json"] if "--json" in argv else words)


def _why(error: SlurmCommandError) -> str:
    """In one line; an error that has to tell of several tells the one that says why."""
    text = error.message.partition(f"exit status {error.returncode}: ")[2] or error.message
    return " ".join(text.split())[:200]
