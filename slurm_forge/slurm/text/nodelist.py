"""Slurm's node list expressions, such as ``n[01-03,5],gpu-a[1-2]b[3-4],x``, and tuples of names.

Pure, and bounded: a text of a few bytes can ask for billions of names, so the number of names is
computed before any of them is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product

from slurm_forge.errors import ConfigError

#: Slurm's own bound on one range is 64 k (MAX_RANGE in src/common/hostlist.c); ours is on the sum.
MAX_NODES = 65_536
_MAX_TEXT = 1 << 20

# [0-9] and not \d, which also takes digits of other scripts.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PIECE = re.compile(r"(?P<text>[A-Za-z0-9_.-]+)|\[(?P<ranges>[0-9,-]+)\]")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>[0-9]{1,18})")
_NEXT_STEP = "Write node names like n1, n[01-04,7] or n1,n2 (Slurm's node list expressions)."


def expand_nodes(expression: str) -> tuple[str, ...]:
    """Names in a node list expression, in its order; an empty text is no names.

    Leading zeros count (``[08-11]`` is 08, 09, 10, 11) and of several brackets the last one runs
    fastest, both as in ``scontrol show hostnames``.  Raises ``ConfigError`` for anything that is
    not such an expression or that means more than ``MAX_NODES`` names.
    """
    if len(expression) > _MAX_TEXT:
        raise _refused(expression, f"is longer than {_MAX_TEXT} characters")
    if not expression:
        return ()
    names: list[str] = []
    for item in _split(expression):
        columns = _columns(expression, item)
        count = 1
        for column in columns:
            count *= len(column)
        if len(names) + count > MAX_NODES:
            raise _refused(expression, f"means more than {MAX_NODES} nodes")
        for parts in product(*columns):
            names.append(_checked(expression, "".join(parts)))
    return tuple(names)


def fold_nodes(names: Iterable[str]) -> str:
    """Compact expression of ``names``, whose expansion is exactly ``names`` in the same order.

    Neighbours that count upwards become a range.  Raises ``ConfigError`` for what is no node name.
    """
    items: list[str] = []
    stem: str | None = None
    runs: list[tuple[str, str]] = []

    def close() -> None:
        if stem is not None:
            items.append(_bracket(stem, runs))

    for name in names:
        check_node_name(name)
        match = _NUMBERED.fullmatch(name)
        if match is None:
            close()
            stem, runs = None, []
            items.append(name)
            continue
        number = match["number"]
        if match["stem"] != stem:
            close()
            stem, runs = match["stem"], [(number, number)]
        elif _follows(*runs[-1], number):
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    close()
    return ",".join(items)


def check_node_name(name: str) -> str:
    """``name`` itself if it is a plain node name; ``ConfigError`` otherwise."""
    return _checked(name, name)


def _split(expression: str) -> list[str]:
    items: list[str] = []
    depth = start = 0
    for index, character in enumerate(expression):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            items.append(expression[start:index])
            start = index + 1
    items.append(expression[start:])
    return items


def _columns(expression: str, item: str) -> list[Sequence[str]]:
    columns: list[Sequence[str]] = []
    position = 0
    while position < len(item):
        match = _PIECE.match(item, position)
        if match is None:
            raise _refused(expression, f"can't be read at {item[position : position + 20]!r}")
        columns.append((match["text"],) if match["ranges"] is None else _numbers(expression, match))
        position = match.end()
    if not columns:
        raise _refused(expression, "has an empty name between two commas")
    return columns


def _numbers(expression: str, match: re.Match[str]) -> list[str]:
    numbers: list[str] = []
    for text in match["ranges"].split(","):
        span = _RANGE.fullmatch(text)
        if span is None:
            raise _refused(expression, f"has the range {text!r}, which can't be read")
        low, high = int(span["low"]), int(span["high"] or span["low"])
        if high < low:
            raise _refused(expression, f"has the range {text!r}, which counts downwards")
        if len(numbers) + high - low + 1 > MAX_NODES:
            raise _refused(expression, f"means more than {MAX_NODES} nodes")
        numbers += [f"{number:0{len(span['low'])}d}" for number in range(low, high + 1)]
    return numbers


def _follows(first: str, last: str, number: str) -> bool:
    """Whether ``number`` extends the range ``first``-``last`` and expands to the same text."""
    following = int(last) + 1
    return number == f"{following:0{len(first)}d}"


def _bracket(stem: str, runs: Sequence[tuple[str, str]]) -> str:
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return stem + runs[0][0]
    spans = (first if first == last else f"{first}-{last}" for first, last in runs)
    return f"{stem}[{','.join(spans)}]"


def _checked(expression: str, name: str) -> str:
    # A leading dash would turn into an option on a command line.
    if len(name) > 255 or not _NAME.fullmatch(name):
        raise _refused(expression, f"has {name[:40]!r}, which is not a node name")
    return name


def _refused(expression: str, why: str) -> ConfigError:
    shown = expression if len(expression) <= 60 else expression[:57] + "…"
    return ConfigError(f"node list {shown!r} {why}", next_step=_NEXT_STEP)
