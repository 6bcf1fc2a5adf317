"""Versions of what outlives a process: a later minor one is read, a later major one is refused.

A minor version adds keys, kinds and words that an older slurm_forge may ignore, a major one what
must not be ignored.  What is written carries the version of its format, and that of slurm_forge.

Entry: ``refuse_later``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module

from slurm_forge.errors import FormatError

#: By its name, since the package itself names all of its interface: no layer is imported by this.
PACKAGE_VERSION: str = import_module("slurm_forge").__version__

_TEXT = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_PACKAGE = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,39}")


@dataclass(frozen=True, slots=True, order=True)
class FormatVersion:
    """``1.2`` in a file; a number alone, as first versions wrote it, is a major one."""

    major: int
    minor: int = 0

    @classmethod
    def parse(cls, value: object) -> FormatVersion:
        """Read a version; ``ValueError`` for anything that is none."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**6:
            return cls(value)
        match = _TEXT.fullmatch(value) if isinstance(value, str) else None
        if match is None or not int(match[1]):
            raise ValueError(f"not the version of a format: {str(value)[:40]!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def refuse_later(what: str, found: FormatVersion, known: FormatVersion, by: object = "") -> None:
    """Refuse what a later major version wrote.

    Args:
        what: The file, or the message, in words.
        found: The version that it has.
        known: The newest one that this slurm_forge writes.
        by: The version of slurm_forge that wrote it, where that is known.

    Raises:
        FormatError: ``found`` is of a later major version.
    """
    if found.major > known.major:
        raise FormatError(
            f"{what} has format {found}, and slurm_forge {PACKAGE_VERSION} reads formats up to "
            f"{known.major}.x",
            next_step=f"Install what wrote it, here and for the run: {to_install(by)}",
        )


def to_install(by: object) -> str:
    """The command that installs the version which wrote something, or a later one."""
    known = isinstance(by, str) and _PACKAGE.fullmatch(by)
    return f'pip install "slurm-forge>={by}"' if known else "pip install --upgrade slurm-forge"
