"""Lines that stand too far in or out: YAML's own words for that name something else."""

from __future__ import annotations

#: What YAML's parser says where a line begins in a column in which nothing may begin.
_OUT_OF_LINE = ("found '<block mapping start>'", "found '<block sequence start>'")
_TWO_VALUES = "mapping values are not allowed"


def misplaced(problem: str, text: str, line: int, column: int) -> str | None:
    """What is wrong with the indentation of ``line`` (from 0), or None if that is not the mistake.

    ``problem`` are the parser's words and ``column`` is where it stopped.
    """
    lines = text.splitlines()
    if line >= len(lines):
        return None
    two_values = _TWO_VALUES in problem
    # A second ": " on the line is a value that needs quotes, however the line is indented.
    if two_values and ": " in lines[line][:column]:
        return None
    if not two_values and not problem.endswith(_OUT_OF_LINE):
        return None
    own = _indent(lines[line])
    before = [n for n in range(line) if lines[n].strip() and not lines[n].lstrip().startswith("#")]
    if not before:
        return None
    outer = next((n for n in reversed(before) if _indent(lines[n]) < own), None)
    deeper = _indent(lines[before[-1]]) < own
    if outer is not None and (two_values or deeper):
        return (
            f"this line is indented further than line {outer + 1}, which has a value already; "
            "indent keys that belong together alike"
        )
    if two_values:
        return None
    return (
        "the indentation of this line fits none of the lines above; "
        "indent keys that belong together alike"
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
