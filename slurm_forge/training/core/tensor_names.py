"""Names of tensors: combine many that differ in one number, and guess renames.  Pure.

A model of 48 equal layers has some twelve kinds of tensors; ``layers.0-47.attention.weight`` is
shorter in a manifest than 48 names, and readable in a message.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from slurm_forge.vocabulary.json_value import Json

#: In Python's notation, so that it is restored unchanged.
_NUMBER = re.compile(r"(?:(?<=\.)|^)(?:0|[1-9][0-9]{0,8})(?=\.|$)")
_MOST = 1_000_000
_MOST_RULES = 5
_TRIED_OLD = 4
_TRIED_NEW = 20

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Folded:
    """Names that differ in one number only: the first one in each; or a single name."""

    before: str
    numbers: tuple[int, ...] = ()
    after: str = ""

    def names(self) -> list[str]:
        """All the names expanded."""
        if not self.numbers:
            return [self.before]
        return [f"{self.before}{number}{self.after}" for number in self.numbers]

    def __str__(self) -> str:
        return f"{self.before}{_ranges(self.numbers)}{self.after}"

    def to_json(self) -> Json:
        """A text for one name, else what is before the numbers, the numbers, and what is after."""
        if len(self.numbers) < 2:
            return self.names()[0]
        return [self.before, _ranges(self.numbers), self.after]

    @classmethod
    def from_json(cls, value: object) -> Folded:
        """Undo ``to_json``; ValueError for anything else."""
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, list) or len(value) != 3 or set(map(type, value)) != {str}:
            raise ValueError("neither a name nor a range of names")
        numbers: list[int] = []
        for part in value[1].split(","):
            first, _, last = part.partition("-")
            more = range(int(first), int(last or first) + 1)
            if len(more) + len(numbers) > _MOST:
                raise ValueError("more names than any model has")
            numbers += more
        return cls(value[0], tuple(numbers), value[2])


def fold(items: Iterable[tuple[str, _T]]) -> list[tuple[Folded, _T]]:
    """Combine names with the same value that differ in their first number only.

    In the order of the first name of each; numbers ascending.
    """
    groups: dict[tuple[str, str | None, _T], list[int]] = {}
    for name, value in items:
        match = _NUMBER.search(name)
        if match is None:
            groups[name, None, value] = []
        else:
            key = (name[: match.start()], name[match.end() :], value)
            groups.setdefault(key, []).append(int(match[0]))
    return [
        (Folded(before, tuple(sorted(set(numbers))), after or ""), value)
        for (before, after, value), numbers in groups.items()
    ]


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-3,7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


@dataclass(frozen=True, slots=True)
class Rename:
    """Components of names that were replaced; ``anchored`` if they are at the beginning."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    anchored: bool

    def apply(self, name: str) -> str | None:
        """The new name of ``name``, or None if the rule does not apply to it."""
        parts, size = tuple(name.split(".")), len(self.old)
        for at in (0,) if self.anchored else range(len(parts) - size + 1):
            if parts[at : at + size] == self.old:
                return ".".join((*parts[:at], *self.new, *parts[at + size :]))
        return None

    def __str__(self) -> str:
        if not self.old:
            return f'names begin with "{".".join(self.new)}." now'
        if not self.new:
            return f'names have lost "{".".join(self.old)}."'
        return f'"{".".join(self.old)}" is called "{".".join(self.new)}" now'


def guess_renames(
    removed: Mapping[str, Hashable], new: Mapping[str, Hashable]
) -> list[tuple[Rename, dict[str, str]]]:
    """Rules that turn removed names into new ones of the same value, best first.

    Each comes with the names that it explains, old to new.  A guess: equal shapes prove nothing.
    """
    removed, new = dict(removed), dict(new)
    rules: list[tuple[Rename, dict[str, str]]] = []
    while removed and new and len(rules) < _MOST_RULES:
        best: tuple[Rename, dict[str, str]] | None = None
        for rule in _candidates(removed, new):
            explained = _explained(rule, removed, new)
            if explained and (best is None or len(explained) > len(best[1])):
                best = rule, explained
        if best is None:
            break
        rules.append(best)
        for old, now in best[1].items():
            del removed[old], new[now]
    return rules


def _candidates(removed: Mapping[str, Hashable], new: Mapping[str, Hashable]) -> Collection[Rename]:
    rules: dict[Rename, None] = {}
    # Distant names first: one that was really removed must not hide the rest.
    listed = list(removed)
    for old in listed[:: max(1, len(listed) // _TRIED_OLD)]:
        alike = [name for name, value in new.items() if value == removed[old]]
        # The same ending first: of 400 equal layers the one with the same number.
        alike.sort(key=lambda name: -_common_end(old, name))
        for name in alike[:_TRIED_NEW]:
            rule = _rule(old.split("."), name.split("."))
            if rule is not None:
                rules[rule] = None
    return rules


def _rule(old: list[str], new: list[str]) -> Rename | None:
    least = min(len(old), len(new))
    end = 0
    while end < least and old[-1 - end] == new[-1 - end]:
        end += 1
    begin = 0
    while begin < least - end and old[begin] == new[begin]:
        begin += 1
    if begin + end == 0:
        return None  # nothing in common: another tensor, not another name
    was, now = tuple(old[begin : len(old) - end]), tuple(new[begin : len(new) - end])
    if not was and begin:  # something was inserted: report it with what precedes it
        was, now = (old[begin - 1],), (old[begin - 1], *now)
        begin -= 1
    return Rename(was, now, begin == 0)


def _common_end(old: str, new: str) -> int:
    count = 0
    for a, b in zip(reversed(old.split(".")), reversed(new.split(".")), strict=False):
        if a != b:
            break
        count += 1
    return count


def _explained(
    rule: Rename, removed: Mapping[str, Hashable], new: Mapping[str, Hashable]
) -> dict[str, str]:
    explained: dict[str, str] = {}
    for old, value in removed.items():
        now = rule.apply(old)
        if now is not None and now in new and new[now] == value:
            explained[old] = now
    return explained
