"""Plain values and YAML: what a scalar without quotes means, and text that every reader reads back.

YAML 1.1 reads ``48:00:00`` as 172800 and ``off`` as false, YAML 1.2 as text; ``1e-3`` is text to
PyYAML and a number to everybody who writes it.  Where readers differ it is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Quotes what some reader of YAML would not take for text; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes write line breaks of other scripts (U+0085, U+2028) so that they come back.
    is_plain = text.isprintable() and is_plain_text(text) and not _CLOCK.fullmatch(text)
    style = None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


#: Quoted although 08:00:00 need not be: 12:00:00 has to be.
_CLOCK = re.compile(r"[0-9]+(:[0-9]+)+")
_Dumper.add_representer(str, _represent_text)


def dump(data: Mapping[str, Any]) -> str:
    """YAML text of plain values, keys in the given order; ``load`` reads back equal values."""
    return str(
        yaml.dump(
            dict(data),
            Dumper=_Dumper,
            sort_keys=False,
            width=100,
            default_flow_style=None,
            allow_unicode=True,
        )
    )


def flow(value: Any) -> str:
    """A value as YAML in one line of printable text; ``load_value`` reads back an equal one."""

    def text(*, allow_unicode: bool) -> str:
        written = yaml.dump(
            [value],
            Dumper=_Dumper,
            sort_keys=False,
            width=float("inf"),
            default_flow_style=True,
            allow_unicode=allow_unicode,
        )
        return str(written).rstrip("\n")[1:-1]

    document = text(allow_unicode=True)
    return document if document.isprintable() else text(allow_unicode=False)


_MAX_DIGITS = 300
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
#: As YAML 1.1 has them.  08:00:00 is none but text to every reader: PyYAML writes it unquoted.
_SEXAGESIMAL = re.compile(
    r"[-+]?([1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)"
)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
#: Based numbers (0x1F, 0b1, 0o17) and anything else of digits and underscores.
_DIGITS = re.compile(r"[-+]?(0[xob][0-9a-fA-F_]+|\.?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?)")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_RESOLVER = yaml.resolver.Resolver()


def plain_value(text: str) -> str | int | float | bool | None:
    """Value of a scalar without quotes; ``ValueError`` where readers of YAML disagree about it."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(value := float(text)):
        return value
    shown = shorten(text)
    quoted = f'quote it: "{shown}"'
    if text.lower() in _SWITCHES:
        raise ValueError(
            f"{shown} without quotes is a truth value to some readers of YAML and text to others; "
            f"write {_SWITCHES[text.lower()]}, or {quoted}"
        )
    if _SEXAGESIMAL.fullmatch(text):
        raise ValueError(f"{shown} without quotes is a number to base 60 in YAML; {quoted}")
    if _FLOAT.fullmatch(text):
        raise ValueError(f"{shown} is too large for a number; {quoted} if it is text")
    if _LEADING_ZERO.fullmatch(text):
        raise ValueError(
            f"{shown} without quotes is octal to some readers of YAML; "
            f"write it without the leading 0, or {quoted}"
        )
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{shown}: infinity and not-a-number are not allowed here")
    if _DIGITS.fullmatch(text):
        raise ValueError(f"{shown} without quotes is a number to some readers of YAML; {quoted}")
    tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    if tag == "tag:yaml.org,2002:timestamp":
        raise ValueError(f"{shown} without quotes is a date in YAML; {quoted}")
    if tag != "tag:yaml.org,2002:str":
        raise ValueError(f"{shown} without quotes is not text in YAML; {quoted}")
    return text


def is_plain_text(text: str) -> bool:
    """Whether ``text`` without quotes is read back as the same text."""
    try:
        return plain_value(text) == text
    except ValueError:
        return False


def shorten(text: str) -> str:
    """At most 60 printable characters of a text, for a message."""
    printable = "".join(c if c.isprintable() else "?" for c in text[:61])
    return printable if len(printable) <= 60 else printable[:59] + "…"
