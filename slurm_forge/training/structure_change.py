"""How what is registered differs from what was saved, in lines that a person can act on.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from slurm_forge.training.naming import Folded, fold, guess_renames
from slurm_forge.training.structure import Model, Optimization, Other, Structure, TensorShape

__all__ = ["differences"]

_MOST_LINES = 20
_T = TypeVar("_T", Model, Optimization, Other)


def differences(saved: Structure, now: Structure, *, most: int = _MOST_LINES) -> tuple[str, ...]:
    """``model: head.bias is new``, … ; at most ``most`` lines, then how many more there are.

    What makes a load impossible comes first: models, then optimizers, then everything else.
    """

    def optimizers(name: str, was: Optimization, is_now: Optimization) -> Iterator[str]:
        return _optimizer(name, was, is_now, _tensor_names(saved), _tensor_names(now))

    lines = [
        *_by_name("model", saved.models, now.models, _model),
        *_by_name("optimizer", saved.optimizers, now.optimizers, optimizers),
        *_by_name("object", saved.others, now.others, _other),
    ]
    if len(lines) > most:
        lines[most:] = [f"and {len(lines) - most} more differences"]
    return tuple(lines)


def _by_name(
    what: str,
    saved: Mapping[str, _T],
    now: Mapping[str, _T],
    compare: Callable[[str, _T, _T], Iterator[str]],
) -> Iterator[str]:
    for name in dict.fromkeys((*saved, *now)):
        if name not in now:
            yield f"{what} {name} ({saved[name].kind}) is not registered now"
        elif name not in saved:
            yield f"{what} {name} ({now[name].kind}) is new"
        else:
            if saved[name].kind != now[name].kind:
                yield f"{name} is {now[name].kind}, was {saved[name].kind}"
            yield from compare(name, saved[name], now[name])


def _model(name: str, saved: Model, now: Model) -> Iterator[str]:
    gone = {fqn: tensor for fqn, tensor in saved.tensors.items() if fqn not in now.tensors}
    new = {fqn: tensor for fqn, tensor in now.tensors.items() if fqn not in saved.tensors}
    # Whether it is trained does not make it another tensor.
    shapes = [{fqn: (t.shape, t.dtype) for fqn, t in part.items()} for part in (gone, new)]
    changed: list[tuple[str, str]] = []
    for rule, explained in guess_renames(*shapes):
        old, becomes = next(iter(explained.items()))
        count = f"{len(explained)} tensors" if len(explained) > 1 else "1 tensor"
        yield f"{name}: {rule} ({count} of the same shape: {old} is {becomes})"
        for before, after in explained.items():
            del gone[before], new[after]
        for before in list(gone):
            after = rule.apply(before) or ""
            if after in new:  # renamed like the others, and of another shape
                changed.append((after, _changed(gone.pop(before), new.pop(after))))
    for fqn, was in saved.tensors.items():
        if fqn in now.tensors and (text := _changed(was, now.tensors[fqn])):
            changed.append((fqn, text))
    for names, text in fold(changed):
        yield f"{name}: {names} {text}"
    for kind, tensors in (("is gone", gone), ("is new", new)):
        for names, tensor in fold(tensors.items()):
            yield f"{name}: {names} {kind}, {_shape(tensor)}{_times(names)}"
    yield from _modes(name, set(saved.in_eval), set(now.in_eval))


def _changed(was: TensorShape, now: TensorShape) -> str:
    if was.shape != now.shape and was.dtype != now.dtype:
        return f"is {_shape(now)}, was {_shape(was)}"
    if was.shape != now.shape:
        return f"is {now.shape}, was {was.shape}"
    if was.dtype != now.dtype:
        return f"is {now.dtype}, was {was.dtype}"
    if None not in (was.trained, now.trained) and was.trained != now.trained:
        return "is trained, was frozen" if now.trained else "is frozen, was trained"
    return ""


def _shape(tensor: TensorShape) -> str:
    return f"{tensor.dtype} {tensor.shape}"


def _times(names: Folded) -> str:
    return f" ({len(names.numbers)} times)" if len(names.numbers) > 1 else ""


def _modes(name: str, saved: set[str], now: set[str]) -> Iterator[str]:
    for parts, is_now, was in ((now - saved, "eval", "train"), (saved - now, "train", "eval")):
        for part in sorted(parts):
            whose = f"{name}: {part}" if part else name
            yield f"{whose} is in {is_now} mode, was in {was} mode"


def _optimizer(
    name: str,
    saved: Optimization,
    now: Optimization,
    then_known: frozenset[str],
    now_known: frozenset[str],
) -> Iterator[str]:
    if len(saved.groups) != len(now.groups):
        yield f"{name} has {_groups(now)}, had {_groups(saved)}"
    said: dict[str, list[int]] = {}
    pairs = list(zip(saved.groups, now.groups, strict=False))
    for index, (was, is_now) in enumerate(pairs):
        # What only one of them knows comes from another version of torch, or another optimizer.
        for option in sorted(was.options.keys() & is_now.options.keys()):
            if was.options[option] != is_now.options[option]:
                text = f"{option} {is_now.options[option]}, was {was.options[option]}"
                said.setdefault(text, []).append(index)
    for text, groups in said.items():
        everywhere = len(groups) == len(pairs)
        yield f"{name}: {'' if everywhere else f'group {_list(groups)}: '}{text}"
    yield from _members(name, saved, now, then_known, now_known)
    for index, (was, is_now) in enumerate(pairs):
        if was.parameters == is_now.parameters and was.order != is_now.order:
            yield f"{name}: group {index} has the same parameters in another order"


def _members(
    name: str,
    saved: Optimization,
    now: Optimization,
    then_known: frozenset[str],
    now_known: frozenset[str],
) -> Iterator[str]:
    """Parameters that both models have, and that the optimizer treats differently."""
    then, here = _group_of(saved), _group_of(now)
    lines: list[tuple[str, str]] = []
    for fqn in dict.fromkeys((*then, *here)):
        if fqn in then and fqn in here:
            if then[fqn] != here[fqn]:
                lines.append((fqn, f"is in group {here[fqn]}, was in group {then[fqn]}"))
        elif fqn in then and fqn in now_known:
            lines.append((fqn, "is not optimized now, was before"))
        elif fqn in here and fqn in then_known:
            lines.append((fqn, "is optimized now, was not before"))
    for names, text in fold(sorted(lines)):
        yield f"{name}: {names} {text}"


def _other(name: str, saved: Other, now: Other) -> Iterator[str]:
    for option in sorted(saved.options.keys() & now.options.keys()):
        if saved.options[option] != now.options[option]:
            yield f"{name}: {option} {now.options[option]}, was {saved.options[option]}"


def _group_of(optimizer: Optimization) -> dict[str, int]:
    return {fqn: index for index, group in enumerate(optimizer.groups) for fqn in group.parameters}


def _tensor_names(structure: Structure) -> frozenset[str]:
    """As optimizers know them: with the model's name where there are several models."""
    several = len(structure.models) > 1
    return frozenset(
        f"{name}.{fqn}" if several else fqn
        for name, model in structure.models.items()
        for fqn in model.tensors
    )


def _groups(optimizer: Optimization) -> str:
    count = len(optimizer.groups)
    return f"{count} parameter group{'' if count == 1 else 's'}"


def _list(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
