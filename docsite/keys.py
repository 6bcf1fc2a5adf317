"""The reference of a file: every key of a pydantic model and of the models in it."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, get_args

from pydantic import BaseModel

from docsite.tables import code, default_words, paragraph, table, type_words
from slurm_forge.units import format_duration

__all__ = ["keys_of_model"]

_MANY = 4


def keys_of_model(model: type[BaseModel], title: str) -> list[str]:
    """A heading and a table per model: keys, what may be written, defaults, descriptions."""
    schema = model.model_json_schema()
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    places = dict(_places(model, ()))
    links = {
        name: f"[{_heading(place)}](#{_anchor(place)})"
        for name, place in ((kind.__name__, place) for kind, place in places.items())
    }
    for name, definition in definitions.items():
        if "enum" in definition:
            links[name] = ", ".join(code(str(each)) for each in definition["enum"])
        elif "anyOf" in definition:  # a short form beside the model
            short = [each for each in definition["anyOf"] if "properties" not in each]
            links[name] = f"{type_words({'anyOf': short}, links)} or {links[name]}"
    lines = [f"## {title}", "", *_section(model, schema, links)]
    for kind, place in places.items():
        lines += ["", f'<a id="{_anchor(place)}"></a>', "", f"## `{_heading(place)}`", ""]
        lines += _section(kind, _of_the_model(definitions[kind.__name__]), links)
    return lines


def _of_the_model(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a definition that says the keys, where there is a short form beside it."""
    alternatives = definition.get("anyOf", (definition,))
    found: Mapping[str, Any] = next(each for each in alternatives if "properties" in each)
    return found


def _section(
    model: type[BaseModel], schema: Mapping[str, Any], links: Mapping[str, str]
) -> list[str]:
    comments = _comments(model)
    rows = []
    for key, field in model.model_fields.items():
        written = schema["properties"][key]
        default = _default(model, key, written)
        said = field.description or comments.get(key, "")
        rows.append((code(key), type_words(written, links), default, paragraph(said)))
    doc = paragraph(inspect.cleandoc(model.__doc__ or ""))
    return [doc, "", *table(("key", "type", "default", "description"), rows)]


def _default(model: type[BaseModel], key: str, schema: Mapping[str, Any]) -> str:
    field = model.model_fields[key]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return default_words(None)  # its own table says them
    if isinstance(value, timedelta):
        return default_words(format_duration(value))
    if "default" in schema:
        return default_words(schema["default"])
    # Made by a factory, which no schema shows.
    made = model.model_construct(None, **{key: value})
    return default_words(made.model_dump(include={key}, mode="json")[key])


def _places(
    model: type[BaseModel], path: tuple[str, ...]
) -> Iterator[tuple[type[BaseModel], tuple[str, ...]]]:
    """The models in a model, each at the first place where it can be written."""
    seen: set[type[BaseModel]] = set()
    fields = model.model_fields
    steps = [pair for key in fields for pair in _models_in(fields[key].annotation, key)]
    often = Counter(kind for kind, _ in steps)
    for kind, step in steps:
        if kind in seen:
            continue
        seen.add(kind)
        # What most keys hold has the name of none of them.
        named = step if often[kind] < _MANY else f"*{'[]' if step.endswith('[]') else ''}"
        yield kind, (*path, named)
        yield from _places(kind, (*path, named))


def _models_in(annotation: Any, step: str) -> Iterator[tuple[type[BaseModel], str]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation, step
        return
    parts = get_args(annotation)
    origin = getattr(annotation, "__origin__", None)
    if origin in (tuple, list):
        step = f"{step}[]"
    elif origin is dict:
        step = f"{step}.NAME"
    for part in parts:
        yield from _models_in(part, step)


def _heading(place: tuple[str, ...]) -> str:
    return ".".join(place)


def _anchor(place: tuple[str, ...]) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", _heading(place).lower()).strip("-")


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """What ``#:`` says above a field, for models that have no descriptions."""
    found: dict[str, str] = {}
    said: list[str] = []
    for line in inspect.getsource(model).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            said.append(text.removeprefix("#:").strip())
            continue
        key = re.match(r"([a-z_]+): ", text)
        if key and said:
            found[key[1]] = " ".join(said)
        said = []
    return found
