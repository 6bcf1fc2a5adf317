"""The last lines of a program's own output, before those that launchers append.

Formats: ``torch/distributed/elastic`` of torch 2.13, srun and slurmstepd of 22.05 to 26.05.
"""

from __future__ import annotations

import re

_SHOWN = 2
_LONGEST = 300
_LOOKED_AT = 400
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LAUNCHER = re.compile(
    r"(?:(?:srun|slurmstepd|mpirun|mpiexec|prterun|submitit)\b[^:\s]{0,80}:"
    r"|\[[0-9T:.-]{19,30}\] error:"
    # torchrun's logger, with or without level and time as a prefix.
    r"|(?:[EWI][0-9]{4} \S+ \d+ |(?:ERROR|WARNING|INFO):)?torch[./]distributed[./]"
    r"|make(?:\[\d+\])?: \*\*\* )"
)
_TABLE_EDGE = re.compile(r"={20,}$")
_RANK_EXIT = re.compile(r"^\s*rank\s*: (\d{1,9}) \(local_rank: \d+\)", re.M)
_EXIT_CODE = re.compile(r"^\s*exitcode\s*: (-?\d{1,9}) \(pid: \d+\)", re.M)
_CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_TRACEBACK = "Traceback (most recent call last):"


def last_lines(text: str, most: int = _SHOWN) -> tuple[str, ...]:
    """The last lines that a program printed, without those of launchers about its end.

    Args:
        text: The end of its output.
        most: The maximum number of lines.

    Returns:
        Whole lines in their order; for a progress bar, its last state.
    """
    lines = [_shown(line) for line in text.split("\n")[-_LOOKED_AT:]]
    own = [line for line in _without_failure_table(lines) if line and not _LAUNCHER.match(line)]
    return tuple(line[:_LONGEST] for line in own[-most:])


def exit_code_of_worker(text: str) -> str:
    """`` (rank 3: 7)`` if torchrun, which exits with 1, reports its worker's status; else empty."""
    at = text.rfind(_CHILD_FAILED)
    if at < 0:
        return ""
    table = text[at:]
    root = table.rfind("Root Cause")
    table = table[max(root, 0) :]
    code, rank = _EXIT_CODE.search(table), _RANK_EXIT.search(table)
    if code is None:
        return ""
    return f" (torchrun; rank {'?' if rank is None else rank[1]}: {code[1]})"


def _shown(line: str) -> str:
    parts = [part for part in _CONTROL.sub("", line).split("\r") if part.strip()]
    return parts[-1].strip() if parts else ""


def _without_failure_table(lines: list[str]) -> list[str]:
    """Remove torchrun's traceback and its table of failures, up to the line that closes it."""
    kept: list[str] = []
    inside = False
    edges = 0
    for line in lines:
        if line.startswith(_CHILD_FAILED):
            while kept and not kept.pop().endswith(_TRACEBACK):
                pass
            inside, edges = True, 0
        elif inside and _TABLE_EDGE.search(line):
            edges += 1
            inside = edges < 2
        elif not inside:
            kept.append(line)
    return kept
