"""What the job requests from Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from slurm_forge.documents import wrong_key
from slurm_forge.spec.types import (
    Count,
    DirectiveText,
    Gpus,
    JobSection,
    Memory,
    TimeLimit,
    check_printable,
    text_of_number,
)

_OPTION = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

#: Options that have a key of their own: said twice, one of the two would win silently.
_OWN_KEYS = {
    "nodes": "resources.nodes", "ntasks": "resources.tasks_per_node",
    "ntasks-per-node": "resources.tasks_per_node", "cpus-per-task": "resources.cpus_per_task",
    "gpus-per-node": "resources.gpus_per_node", "gpus-per-task": "resources.gpus_per_task",
    "mem": "resources.mem", "time": "resources.time", "partition": "resources.partition",
    "account": "resources.account", "qos": "resources.qos",
    "constraint": "resources.constraint", "exclude": "resources.exclude",
    "nodelist": "resources.nodelist", "gres": "resources.gres",
    "reservation": "resources.reservation", "job-name": "name", "export": "env",
    "export-file": "env", "signal": "lead", "wrap": "command",
}  # fmt: skip
#: Options that the recovery of a run rests on, or that make sbatch do something else.
_HETEROGENEOUS = frozenset({"hetjob", "packjob", "het-group", "pack-group"})
_RESERVED = frozenset({
    "array", "chdir", "error", "get-user-env", "gid", "help", "ignore-pbs", "input", "no-requeue",
    "open-mode", "output", "parsable", "quiet", "requeue", "test-only", "uid", "usage", "verbose",
    "version", "wait",
})  # fmt: skip


def key_of_option(option: str) -> tuple[str, ...]:
    """The key of the job file that an sbatch option (its long name) is written by."""
    own = _OWN_KEYS.get(option)
    return tuple(own.split(".")) if own is not None else ("resources", "extra", option)


def _extra(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    options = {}
    for option, raw in value.items():
        if not isinstance(option, str) or not _OPTION.fullmatch(option):
            raise wrong_key(
                str(option),
                "not the long name of an sbatch option "
                "(lower-case letters, digits and dashes, without the leading --)",
            )
        if option in _OWN_KEYS:
            raise wrong_key(option, f'write it as "{_OWN_KEYS[option]}"')
        if option in _HETEROGENEOUS:
            raise wrong_key(
                option, "a heterogeneous job can't be brought back: ask for one kind of node"
            )
        if option == "no-kill":
            raise wrong_key(
                option,
                "slurm_forge sets this option itself where resources.spare_nodes asks for spare "
                "nodes; remove it",
            )
        if option == "array":
            raise wrong_key(
                option,
                'for one run in many tasks, each an attempt, write "template: array" and '
                '"chain: 10"; for many runs submit each of them',
            )
        if option in _RESERVED:
            raise wrong_key(option, "slurm_forge sets this option itself; remove it")
        try:
            options[option] = _option_value(raw)
        except ValueError as error:
            raise wrong_key(option, str(error)) from None
    return options


def _option_value(raw: Any) -> str:
    if raw is True:
        return ""
    if raw is None or raw is False:
        raise ValueError("write true for an option without a value, or remove it")
    text = text_of_number(raw)
    if not isinstance(text, str):
        raise ValueError("expected text, a whole number or true")
    if not text:
        raise ValueError("is empty; write true for an option without a value, or remove it")
    check_printable(text)
    if text.startswith("-"):
        raise ValueError('starts with "-", which Slurm would read as another option')
    if text != text.strip():
        raise ValueError("begins or ends with a space")
    if any(character in text for character in "\"'\\"):
        raise ValueError("quotes and \\ are not allowed here")
    return text


def _written(options: dict[str, str]) -> dict[str, Any]:
    """As it is read: true for an option without a value."""
    return {name: value or True for name, value in options.items()}


class Resources(JobSection):
    """What the job requests from Slurm; what is omitted is left to the site and the partition."""

    known_as: ClassVar[Mapping[str, str]] = {
        "ntasks_per_node": "tasks_per_node", "ntasks": "tasks_per_node",
        "tasks": "tasks_per_node", "cpus": "cpus_per_task", "gpus": "gpus_per_node",
        "memory": "mem", "mem_gb": "mem", "walltime": "time", "timeout": "time",
        "timeout_min": "time", "time_limit": "time", "queue": "partition",
        "num_nodes": "nodes", "nnodes": "nodes", "exclude_nodes": "exclude",
        "exclusive": "extra.exclusive", "additional_parameters": "extra", "sbatch": "extra",
        "spares": "spare_nodes", "spare": "spare_nodes", "hot_spares": "spare_nodes",
        "no_kill": "spare_nodes",
    }  # fmt: skip

    nodes: Count = Field(default=1, description="Number of nodes that ranks run on.")
    spare_nodes: Count | None = Field(
        default=None,
        description="Additional nodes, which wait in the allocation to replace one that is lost: "
        "then the run continues in the same job. Slurm charges for them.",
    )
    tasks_per_node: Count = Field(default=1, description="Processes (ranks) per node, one per GPU.")
    cpus_per_task: Count | None = Field(default=None, description="CPU cores per process.")
    gpus_per_node: Gpus | None = Field(default=None, description='GPUs per node: 8, or "a100:8".')
    gpus_per_task: Gpus | None = Field(
        default=None, description="GPUs per process, instead of per node."
    )
    mem: Memory | None = Field(
        default=None,
        description='Memory per node ("4G"; without a unit, MiB; 0 is all that a node has).',
    )
    time: TimeLimit | None = Field(
        default=None,
        description='Time limit of one attempt ("48:00:00"); the run continues beyond it.',
    )
    partition: DirectiveText | None = Field(
        default=None, description="Partition, or several, separated by commas."
    )
    account: DirectiveText | None = Field(default=None, description="Account that is charged.")
    qos: DirectiveText | None = Field(default=None, description="Quality of service.")
    constraint: DirectiveText | None = Field(
        default=None, description="Node features that are needed."
    )
    exclude: DirectiveText | None = Field(default=None, description="Nodes never to use, n[1-3,7].")
    nodelist: DirectiveText | None = Field(
        default=None, description="Nodes that the job must have."
    )
    gres: DirectiveText | None = Field(
        default=None, description="Other generic resources, per node."
    )
    reservation: DirectiveText | None = Field(default=None, description="Reservation to run in.")
    extra: Annotated[
        dict[str, str], BeforeValidator(_extra), PlainSerializer(_written, return_type=dict)
    ] = Field(
        default_factory=dict,
        description="Any other sbatch option by its long name; true if it takes no value.",
    )

    @model_validator(mode="after")
    def _gpus_once(self) -> Resources:
        if self.gpus_per_node is not None and self.gpus_per_task is not None:
            raise wrong_key(
                "gpus_per_task",
                "gpus_per_node says it already; keep one of the two",
                because="gpus_per_node",
            )
        return self

    @model_validator(mode="after")
    def _spares_have_a_seat_to_take(self) -> Resources:
        if self.spare_nodes is not None and self.nodes < 2:
            raise wrong_key(
                "spare_nodes",
                "a run on one node (resources.nodes) lives on that of its batch script, without "
                "which there is no job; remove it",
                because="nodes",
            )
        return self

    @property
    def tasks(self) -> int:
        """Number of processes in a launch: the world size."""
        return self.nodes * self.tasks_per_node

    @property
    def spares(self) -> int:
        """How many spare nodes the job has."""
        return self.spare_nodes or 0

    @property
    def allocation(self) -> int:
        """Number of nodes that Slurm is asked for: those of the ranks, and the spare ones."""
        return self.nodes + self.spares

    @property
    def gpus_on_node(self) -> int | None:
        """How many GPUs are asked for on each node; None where none are."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node.count
        if self.gpus_per_task is not None:
            return self.gpus_per_task.count * self.tasks_per_node
        numbers = re.findall(
            r"(?:^|,)gpu(?::[A-Za-z_][^:,(]*)?(?::([0-9]+))?(?:\([^)]*\))?(?=,|$)", self.gres or ""
        )
        return sum(int(number or 1) for number in numbers) if numbers else None
