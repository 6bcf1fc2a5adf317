r"""Patterns that find step, loss and gradient norm in what a program prints: given, or of a preset.

A pattern has one unnamed group, the number.  That of a step may have a group ``total``: only
counts of the first total that is seen are steps (a progress bar of an evaluation has another one),
and where the preset counts epochs, a step is ``epoch * total + count``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from slurm_forge.documents import did_you_mean

#: What parses patterns for ``re``.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


class Metric(str, Enum):
    """What can be read from the output."""

    STEP = "step"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"


#: How else people call them.
_ALIASES = {
    "iter": "step", "iteration": "step", "global_step": "step", "it": "step",
    "train_loss": "loss", "training_loss": "loss", "norm": "grad_norm", "gnorm": "grad_norm",
    "gradient_norm": "grad_norm", "gradnorm": "grad_norm",
}  # fmt: skip

_NUMBER = (
    r"(?:tensor\()?([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[nN][aA][nN]\b|[iI]nf(?:inity)?\b))"
)


#: A validation's loss may be NaN because it had no sample.
_NOT_OF_TRAINING = r"(?<![\w./])(?<!val )(?<!test )(?<!eval )(?<!best )(?<!validation )"


@dataclass(frozen=True, slots=True)
class MetricPatterns:
    """Regular expressions; None is not looked for.

    ``epoch`` is looked for beside the steps that begin anew with each, counted from
    ``first_epoch``.
    """

    step: str | None = None
    loss: str | None = None
    grad_norm: str | None = None
    epoch: str | None = None
    first_epoch: int = 0


#: docs/how-to/exec.md says which versions they were read in.
PRESETS: Mapping[str, MetricPatterns] = {
    "plain": MetricPatterns(
        step=r"(?i)(?<![\w.])(?:step|iter(?:ation)?)\b['\"]?\s{0,8}[:=#]?\s{0,8}(\d+)",
        loss=rf"(?i){_NOT_OF_TRAINING}(?:train[_/ ])?loss\b['\"]?\s{{0,8}}[:=]?\s{{0,8}}{_NUMBER}",
        grad_norm=rf"(?i)(?<![\w.])grad(?:ient)?[_ ]?norm\b['\"]?\s{{0,8}}[:=]?\s{{0,8}}{_NUMBER}",
    ),
    "hf": MetricPatterns(
        # Of bars without a description: those of datasets and shards have one.
        step=r"^\s*\d+%\|[^|]*\|\s*(\d+)/(?P<total>\d+) \[",
        loss=rf"'loss': '?{_NUMBER}",
        grad_norm=rf"'grad_norm': '?{_NUMBER}",
    ),
    "lightning": MetricPatterns(
        step=r"Epoch \d+(?::|/-?\d+)\s.*?(\d+)/(?P<total>\d+) ",
        loss=rf"(?<![\w/])(?:train[_/])?loss(?:_step)?[=:] ?{_NUMBER}",
        grad_norm=rf"(?<![\w/])grad_norm(?:_step)?[=:] ?{_NUMBER}",
        epoch=r"Epoch (\d+)(?::|/-?\d+)\s",
    ),
    "keras": MetricPatterns(
        step=r"^\s*(\d+)/(?P<total>\d+) (?:[━╸╺]|- )",
        loss=rf"(?<![\w])loss: {_NUMBER}",
        epoch=r"^\s*Epoch (\d+)/\d+",
        first_epoch=1,
    ),
    "torchtitan": MetricPatterns(
        step=r"(?<!\w)step:\s*(\d+)",
        loss=rf"(?<!\w)loss:\s*{_NUMBER}",
        grad_norm=rf"(?<!\w)grad_norm:\s*{_NUMBER}",
    ),
    "kempnerforge": MetricPatterns(
        step=r"\[step (\d+)\]",
        loss=rf"(?<!\w)loss={_NUMBER}",
        grad_norm=rf"(?<!\w)grad_norm={_NUMBER}",
    ),
}


def as_list(value: object) -> object:
    """What a job file may say instead of a list: a preset, one pattern, or a mapping of names."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(f"{name}={pattern}" for name, pattern in value.items())
    # To pydantic this is Python from here on, and strict Python takes no list for a tuple.
    return tuple(value) if isinstance(value, list) else value


def check_metric_pattern(text: str) -> str:
    """``NAME=REGEX`` or the name of a preset as it is; ``ValueError`` for anything else."""
    name, given, pattern = text.partition("=")
    if not given:
        if text not in PRESETS:
            meant = did_you_mean(text, PRESETS)
            raise ValueError(
                f'"{text}" is neither NAME=REGEX nor a preset {meant}; a pattern is written '
                r'"loss=loss: (\S+)"'
            )
        return text
    known = [each.value for each in Metric]
    if name not in known:
        raise ValueError(f'there is no metric "{name}" {did_you_mean(name, known, _ALIASES)}')
    compiled = compiled_pattern(pattern)
    if compiled.groups - len(compiled.groupindex) != 1:
        example = r"step (\d+)" if name == Metric.STEP.value else r"loss: (\S+)"
        raise ValueError(
            f'"{text}" needs exactly one group, which is the number: "{name}={example}"'
        )
    return text


def compiled_pattern(text: str) -> re.Pattern[str]:
    """A pattern that lines of any length can be searched for; else ``ValueError``."""
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(f'"{text}" is no regular expression: {error}') from None
    if _repeats_a_repetition(_parser.parse(text)):
        raise ValueError(
            f'"{text}" repeats a repetition, which can take forever on a long line: write each '
            r'repetition once, as in "loss: (\S+)"'
        )
    return compiled


def _repeats_a_repetition(parsed: Iterable[tuple[Any, Any]], *, inside: bool = False) -> bool:
    """Whether a part that may repeat without a limit contains another such part."""
    for operation, arguments in parsed:
        deeper = inside
        if str(operation).endswith("_REPEAT"):
            if arguments[1] == _parser.MAXREPEAT:
                if inside:
                    return True
                deeper = True
            parts = [arguments[2]]
        else:
            parts = [each for each in _parts(arguments) if isinstance(each, _parser.SubPattern)]
        if any(_repeats_a_repetition(each, inside=deeper) for each in parts):
            return True
    return False


def _parts(arguments: Any) -> Iterator[Any]:
    """What an operation of a parsed pattern contains, however deep its tuples and lists are."""
    if isinstance(arguments, tuple | list):
        for each in arguments:
            yield from _parts(each)
    else:
        yield arguments


@cache
def metric_patterns(given: Iterable[str], step_pattern: str | None = None) -> MetricPatterns | None:
    """The patterns that checked texts mean, the last one of a name first; None without any."""
    merged: dict[str, str | int | None] = {}
    for text in given:
        name, own, pattern = text.partition("=")
        if own:
            merged[name] = pattern
            if name == Metric.STEP.value:
                merged["epoch"] = None
            continue
        preset = PRESETS[text]
        fields = ("step", "loss", "grad_norm", "epoch", "first_epoch")
        merged |= {field: getattr(preset, field) for field in fields}
    if step_pattern is not None:
        merged |= {"step": step_pattern, "epoch": None}
    return MetricPatterns(**merged) if merged else None  # type: ignore[arg-type]
