"""What a YAML scalar without quotes means, where all readers agree; everything else is an error.

YAML 1.1 reads ``48:00:00`` as 172800 and ``off`` as false, YAML 1.2 as text; ``1e-3`` is text to
PyYAML and a number to everybody who writes it.
"""

from __future__ import annotations

import math
import re

import yaml

__all__ = ["is_plain_text", "plain_value", "shorten"]

_MAX_DIGITS = 300
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?")
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
        raise ValueError(f"{shown}: infinity and not-a-number are no values here")
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
