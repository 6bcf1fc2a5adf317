"""Markdown from values: tables, code, and the words for what a JSON Schema allows."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["code", "default_words", "paragraph", "table", "type_words"]

_NONE = "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; a bar inside of a cell is escaped."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    return lines


def _cell(text: str) -> str:
    # Not with a backslash, which readers of Markdown show inside of code, or do not.
    return " ".join(text.split()).replace("|", "&#124;") or _NONE


def code(text: str) -> str:
    """Text between backticks, whatever it holds."""
    if "|" in text:
        return f"<code>{html.escape(text, quote=False)}</code>"
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def paragraph(text: str) -> str:
    """Words of a docstring: its quotes of code are Markdown's."""
    return text.replace("``", "`").strip()


def default_words(value: Any) -> str:
    """A default as it would be written in a file; a dash for none."""
    if value is None or value in ({}, [], ""):
        return _NONE
    return code(_flow(value))


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(each) for each in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def type_words(schema: Mapping[str, Any], links: Mapping[str, str]) -> str:
    """What may be written, in words; ``links`` has a Markdown link per name of a model."""
    words = list(dict.fromkeys(_alternatives(schema, links)))
    return " or ".join(words) or "anything"


def _alternatives(schema: Mapping[str, Any], links: Mapping[str, str]) -> list[str]:
    if "$ref" in schema:
        return [links.get(schema["$ref"].rpartition("/")[2], "a value")]
    if "anyOf" in schema:
        return [word for each in schema["anyOf"] for word in _alternatives(each, links)]
    if "const" in schema:
        return [code(str(schema["const"]))]
    if "enum" in schema:
        return [", ".join(code(str(each)) for each in schema["enum"])]
    if "examples" in schema:
        return ["such as " + ", ".join(code(_flow(each)) for each in schema["examples"])]
    kinds = schema.get("type", ())
    return [
        word
        for kind in ([kinds] if isinstance(kinds, str) else kinds)
        for word in _of_kind(kind, schema, links)
    ]


def _of_kind(kind: str, schema: Mapping[str, Any], links: Mapping[str, str]) -> list[str]:
    if kind == "array":
        inner = schema.get("items", schema.get("prefixItems", {}))
        return [f"list of {type_words(inner, links) if isinstance(inner, dict) else 'values'}"]
    if kind in ("integer", "number"):
        return [("whole number" if kind == "integer" else "number") + _bounds(schema)]
    if kind == "object":
        inner = schema.get("additionalProperties")
        held = type_words(inner, links) if isinstance(inner, dict) else ""
        return [f"mapping of names to {held}" if held.startswith("[") else "mapping"]
    return {"string": ["text"], "boolean": ["true or false"], "null": []}.get(kind, [kind])


def _bounds(schema: Mapping[str, Any]) -> str:
    parts = []
    if "minimum" in schema:
        parts.append(f"{schema['minimum']} or more")
    if "exclusiveMinimum" in schema:
        parts.append(f"above {schema['exclusiveMinimum']:g}")
    if "maximum" in schema:
        parts.append(f"at most {schema['maximum']:g}")
    return "".join(f", {part}" for part in parts)
