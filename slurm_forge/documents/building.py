"""From plain values to a pydantic model, and from pydantic's errors to one that helps."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import pydantic
from pydantic_core import ErrorDetails, PydanticCustomError

from slurm_forge.documents.hints import did_you_mean
from slurm_forge.documents.keypath import KeyPath, dotted
from slurm_forge.documents.reading import DEFAULT, Document, SourcePlace
from slurm_forge.documents.writing import shorten
from slurm_forge.errors import ConfigError

Model = TypeVar("Model", bound=pydantic.BaseModel)
_MAX_SHOWN = 10

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "dict_type": "keys and values",
    "mapping_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} in the list",
    "too_long": "at most {max_length} in the list",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong, and where it is written."""

    text: str
    place: SourcePlace

    def __str__(self) -> str:
        return str(ConfigError(self.text, path=self.place.source, line=self.place.line))


def wrong_key(
    path: str | KeyPath, message: str, *, because: str | KeyPath = ()
) -> PydanticCustomError:
    """Error to raise in a validator about a key (or a path of keys) inside what it validates.

    ``because`` is the other key that it does not go with: where that one stands in another file,
    the message says which.
    """
    keys = (path,) if isinstance(path, str) else path
    other = (because,) if isinstance(because, str) else because
    context = {"keys": keys, "message": message, "because": other}
    return PydanticCustomError("wrong_key", "{message}", context)


def build(model: type[Model], document: Document, *, besides: Sequence[Mistake] = ()) -> Model:
    """Value of ``model`` in a document; one ``ConfigError`` names all mistakes, first by line.

    Values are taken in pydantic's strict JSON mode: ``"3"`` is not a number and 1 is not true.
    (What a before-validator returns is a Python value to it: a list stays out of a tuple.)
    Unknown keys get the nearest known one as hint; a model's class variable ``known_as`` (other
    name -> key) adds names that people know from elsewhere.  ``besides`` are mistakes that were
    found before, and are told first.
    """
    mistakes = list(besides)
    try:
        value = model.model_validate_json(json.dumps(document.data), strict=True)
        if not mistakes:
            return value
    except pydantic.ValidationError as error:
        mistakes += _mistakes(model, document, error)
    raise error_of(list(dict.fromkeys(mistakes)))


def mistakes(
    model: type[pydantic.BaseModel], document: Document, *, by_itself: bool = True
) -> tuple[Mistake, ...]:
    """What ``build`` would refuse, in the order in which it tells it.

    A document that is only a part of a whole is not ``by_itself``: what its keys have to do with
    each other can't be said before the rest is there.
    """
    try:
        model.model_validate_json(json.dumps(document.data), strict=True)
    except pydantic.ValidationError as error:
        return _mistakes(model, document, error, by_itself=by_itself)
    return ()


def error_of(mistakes: Sequence[Mistake]) -> ConfigError:
    """One error that names them all."""
    first, *rest = mistakes
    others = [str(mistake) for mistake in rest]
    if len(others) > _MAX_SHOWN:
        others[_MAX_SHOWN:] = [f"and {len(others) - _MAX_SHOWN} more"]
    text = "\n".join([first.text, *others])
    return ConfigError(text, path=first.place.source, line=first.place.line)


def build_plain(model: type[Model], data: Mapping[str, Any], source: str | None = None) -> Model:
    """Value of ``model`` in Python values, which have no lines; errors as in ``build``."""
    try:
        return model.model_validate(dict(data))
    except pydantic.ValidationError as error:
        raise error_of(_mistakes(model, Document(dict(data), source), error)) from None
    except UnicodeEncodeError as error:  # pydantic can't even say what is wrong with it
        raise ConfigError(
            f"half of a surrogate pair is not text: {error.object!a}",
            path=source,
            next_step="Write it in UTF-8.",
        ) from None


def _mistakes(
    model: type[pydantic.BaseModel],
    document: Document,
    error: pydantic.ValidationError,
    *,
    by_itself: bool = True,
) -> tuple[Mistake, ...]:
    mistakes: dict[str, Mistake] = {}
    for detail in error.errors(include_url=False):
        if not by_itself and _is_between_keys(model, document.data, detail):
            continue
        path, message = _explained(model, document.data, detail)
        place = document.place_of(path)
        message += _elsewhere(document, detail, place)
        text = f"{dotted(path)}: {message}" if path else message
        mistakes.setdefault(text, Mistake(text, place))
    # File by file and by line; what has none keeps the order of the model, which is that of the
    # manual.
    sources = list(dict.fromkeys([*document.sources.values(), document.path]))
    return tuple(
        sorted(
            mistakes.values(), key=lambda it: (sources.index(it.place.source), it.place.line or 0)
        )
    )


def _is_between_keys(model: type[pydantic.BaseModel], data: Any, detail: ErrorDetails) -> bool:
    """Whether a section as a whole was refused, of which each key is fine."""
    if detail["type"] not in ("wrong_key", "value_error") or not _is_mapping(detail["input"]):
        return False
    return bool(_models_at(model, _path_in(data, detail["loc"])))


def _elsewhere(document: Document, detail: ErrorDetails, place: SourcePlace) -> str:
    """Where the other key of two stands that do not go together, if that is another file."""
    because = detail.get("ctx", {}).get("because")
    if not because:
        return ""
    other = (*_path_in(document.data, detail["loc"]), *because)
    written = document.written_at(other)
    if written is None or written.source in (place.source, DEFAULT):
        return ""
    return f" ({dotted(other)}: {written})"


def _explained(
    model: type[pydantic.BaseModel], data: Any, detail: ErrorDetails
) -> tuple[KeyPath, str]:
    path = _path_in(data, detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "wrong_key":
        return (*path, *context["keys"]), str(context["message"])
    if kind == "missing":
        return (*path, str(detail["loc"][-1])), "missing, and there is no default for it"
    if kind == "extra_forbidden":
        key = str(detail["loc"][-1])
        known, aliases = _keys_at(model, path[:-1])
        return path, f"unknown key {did_you_mean(key, known, aliases)}"
    if kind == "value_error":
        return path, str(context.get("error", detail["msg"]))
    value = detail["input"]
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        hint = did_you_mean(value if isinstance(value, str) else "", choices)
        return path, f"unknown value {_shown(value)} {hint}"
    expected = _EXPECTED.get(kind)
    if expected is None:
        return path, f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, got {_shown(value)}"
    limits = {
        name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()
    }
    got = limits.get("actual_length", _shown(value))
    return path, f"expected {expected.format(**limits)}, got {got}"


def _path_in(data: Any, location: tuple[str | int, ...]) -> KeyPath:
    """The part of pydantic's location that is in the document: it also names types and keys."""
    path: list[str | int] = []
    for part in location:
        if isinstance(part, int):
            known = isinstance(data, (list, tuple)) and part < len(data)
        else:
            known = isinstance(data, Mapping) and part in data
        if known:
            data = data[part]
            path.append(part)
    return tuple(path)


def _keys_at(model: type[pydantic.BaseModel], path: KeyPath) -> tuple[list[str], dict[str, str]]:
    """The keys that the model knows at ``path``, and the other names for them."""
    keys: list[str] = []
    aliases: dict[str, str] = {}
    for candidate in _models_at(model, path):
        keys += candidate.model_fields
        aliases.update(getattr(candidate, "known_as", {}))
    return keys, aliases


def _models_at(model: type[pydantic.BaseModel], path: KeyPath) -> list[type[pydantic.BaseModel]]:
    here: list[Any] = [model]
    for part in path:
        here = [inner for outer in here for inner in _inside(outer, part)]
    return [each for kind in here for each in _alternatives(kind) if _is_model(each)]


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    for candidate in _alternatives(annotation):
        if _is_model(candidate):
            if part in candidate.model_fields:
                yield candidate.model_fields[str(part)].annotation
        elif arguments := typing.get_args(candidate):
            # The values of a mapping come last, the items of a list first.
            yield arguments[-1 if isinstance(part, str) else 0]


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (Mapping, pydantic.BaseModel))


def _is_model(kind: Any) -> TypeGuard[type[pydantic.BaseModel]]:
    # In Python 3.10 tuple[int, ...] calls itself a type, and issubclass then refuses it.
    plain = typing.get_origin(kind) is None and isinstance(kind, type)
    return plain and issubclass(kind, pydantic.BaseModel)


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _alternatives(typing.get_args(annotation)[0])
    elif origin is typing.Union or origin is types.UnionType:
        for argument in typing.get_args(annotation):
            yield from _alternatives(argument)
    else:
        yield annotation


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{shorten(value)}"'
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, (list, tuple)):
        return "a list"
    return shorten(str(value))
