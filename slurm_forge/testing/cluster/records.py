"""What scontrol and sacct print, as values.  Independent of the parsers that are tested with it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Keys such as CPUs/Task, AllocNode:Sid, NtasksPerN:B:S:C; values may hold '=' and even blanks.
_KEY = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9/:_&]*)=")
_NOTHING = frozenset({"(null)", "None", "N/A", "Unknown", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScontrolJob:
    """One line of ``scontrol show job -o``.  ``nodes`` is Slurm's own notation, maybe empty."""

    job_id: str
    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: str
    fields: tuple[tuple[str, str], ...]

    def field(self, name: str) -> str | None:
        """Any field by Slurm's name for it; None where Slurm says that there is nothing."""
        for key, value in self.fields:
            if key == name:
                return None if value in _NOTHING else value
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SacctRow:
    """One line of ``sacct -D``: a job or a step, once for each time it was started."""

    job_id: str
    state: str
    exit_code: str
    nodes: str
    start: str
    end: str


SACCT_FORMAT = "JobID,State,ExitCode,NodeList,Start,End"


def parse_job(line: str) -> ScontrolJob:
    """One line of ``scontrol show job -o``; ValueError where it is none."""
    keys = list(_KEY.finditer(line))
    ends = [key.start() for key in keys[1:]] + [len(line)]
    fields = tuple(
        (key[1], line[key.end() : end].strip()) for key, end in zip(keys, ends, strict=True)
    )
    values = dict(reversed(fields))  # the first of equals wins: a job's name comes late enough
    if "JobId" not in values or "JobState" not in values:
        raise ValueError(f"not a line of scontrol show job -o: {line[:200]!r}")
    nodes = values.get("NodeList", "")
    return ScontrolJob(
        job_id=values["JobId"],
        state=values["JobState"],
        reason=values.get("Reason", ""),
        nodes="" if nodes in _NOTHING else nodes,
        restarts=int(values.get("Restarts", "0")),
        exit_code=values.get("ExitCode", ""),
        fields=fields,
    )


def parse_accounting(text: str) -> tuple[SacctRow, ...]:
    """The output of ``sacct -nP -o SACCT_FORMAT``.  ``CANCELLED by 0`` becomes ``CANCELLED``."""
    records = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == len(SACCT_FORMAT.split(",")):
            job_id, state, exit_code, nodes, start, end = parts
            records.append(
                SacctRow(
                    job_id=job_id,
                    state=state.partition(" ")[0],
                    exit_code=exit_code,
                    nodes=nodes,
                    start=start,
                    end=end,
                )
            )
    return tuple(records)
