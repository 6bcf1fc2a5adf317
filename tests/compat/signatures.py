"""Whether a use of torch fits the torch that is installed: names exist, arguments bind."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.compat.torch_calls import DEVICE, TorchUse

_NAMED = re.compile(r"^(?:\d+\. )?\w+\((?P<parameters>.*)\)(?: -> .*)?$")


class Fit(str, Enum):
    """What a comparison with an installed torch gave."""

    BOUND = "bound"
    """The arguments bind to the signature; or the name, which is not called, exists."""
    UNCHECKED = "exists"
    """It exists, but has no signature (a builtin of C), or takes anything."""
    MISSING = "missing"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One use against one torch."""

    fit: Fit
    reason: str = ""


def judge(use: TorchUse) -> Verdict:
    """Compare a use with the installed torch."""
    try:
        value = find(use.name)
    except (ImportError, AttributeError) as missing:
        return Verdict(Fit.MISSING, str(missing))
    if use.positional is None:
        return Verdict(Fit.BOUND)
    signatures = list(signatures_of(value))
    if not signatures or any(_takes_anything(each) for each in signatures):
        return Verdict(Fit.UNCHECKED)
    reasons = [_refusal(each, use) for each in signatures]
    refused = [reason for reason in reasons if reason]
    return Verdict(Fit.REFUSED, refused[0]) if len(refused) == len(reasons) else Verdict(Fit.BOUND)


def on_device(use: TorchUse, module: str) -> TorchUse:
    """A use of a device module as one of a module that torch has."""
    return TorchUse(module + use.name[len(DEVICE) :], use.positional, use.keywords, use.is_partial)


def find(name: str) -> Any:
    """What a dotted name stands for: modules are imported as far as they go.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module or class has no such name.
    """
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], start=1):
        if hasattr(value, part) or not inspect.ismodule(value):
            value = getattr(value, part)
            continue
        try:  # torch.optim deletes the names of its modules, which are imported all the same
            value = importlib.import_module(".".join(parts[: place + 1]))
        except ModuleNotFoundError:
            raise AttributeError(f"{'.'.join(parts[:place])} has no {part}") from None
    return value


def signatures_of(value: Callable[..., Any]) -> Iterator[inspect.Signature]:
    """Its signatures: Python's own, or those that pybind11 writes into docstrings."""
    if inspect.isclass(value):
        doc = value.__init__.__doc__ or ""
        written = list(_from_docstring(doc, is_method=True))
        if written:
            yield from written
            return
    try:
        yield inspect.signature(value)
    except (TypeError, ValueError):
        yield from _from_docstring(value.__doc__ or "", is_method=False)


def _from_docstring(text: str, *, is_method: bool) -> Iterator[inspect.Signature]:
    for line in text.splitlines():
        match = _NAMED.match(line.strip())
        if match is None or ("self:" not in line and is_method):
            continue
        parameters = [_parameter(part) for part in _split(match["parameters"])]
        if any(each is None for each in parameters):
            continue
        known = [each for each in parameters if each is not None]
        if is_method:
            known = known[1:]
        try:
            yield inspect.Signature(known)
        except ValueError:
            continue


def _parameter(text: str) -> inspect.Parameter | None:
    match = re.match(r"^(\*{0,2})(\w+)(?:: .*?)?(?P<default>\s?=.*)?$", text.strip(), re.DOTALL)
    if match is None:
        return None
    kinds = {
        "": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "*": inspect.Parameter.VAR_POSITIONAL,
        "**": inspect.Parameter.VAR_KEYWORD,
    }
    default = None if match["default"] and not match[1] else inspect.Parameter.empty
    return inspect.Parameter(match[2], kinds[match[1]], default=default)


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter in "([{<":
            depth += 1
        elif letter in ")]}>" and text[place - 1 : place + 1] != "->":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part for part in [*parts, text[start:]] if part.strip()]


def _takes_anything(signature: inspect.Signature) -> bool:
    kinds = {each.kind for each in signature.parameters.values()}
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _refusal(signature: inspect.Signature, use: TorchUse) -> str:
    bind = signature.bind_partial if use.is_partial else signature.bind
    try:
        bind(*[None] * (use.positional or 0), **dict.fromkeys(use.keywords))
    except TypeError as refused:
        return str(refused)
    return ""
