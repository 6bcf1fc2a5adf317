"""``python -m tests.compat.binding``: what the package calls in torch, against the one here."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.compat.declared import (
    ASKED_FOR,
    CUDA_BUILDS,
    GUARDED,
    INDIRECT,
    PRIVATE_OWNERS,
)
from tests.compat.signatures import Fit, Verdict, find, judge, on_device
from tests.compat.torch_calls import DEVICE, TorchUse, uses_in, uses_of_package

_MODULES = ("torch.cuda", "torch.xpu")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one torch was found to have of what the package uses."""

    torch: str
    bound: int
    """Names that exist, and calls whose arguments bind to a signature."""
    unchecked: int
    """Calls of builtins without a signature: they exist."""
    guarded: tuple[str, ...]
    """What this torch lacks, and the package asks for before it calls it."""
    misfits: tuple[str, ...]


def survey() -> Survey:
    """Compare every use with the installed torch."""
    has_cuda = torch.version.cuda is not None
    verdicts: list[tuple[str, Verdict, bool]] = []
    for use, where, may_lack in _uses():
        if use.name.startswith(CUDA_BUILDS) and not has_cuda:
            continue
        for each in _on_devices(use):
            verdicts.append((f"{each} ({where})", judge(each), may_lack))
    for attribute, owner in PRIVATE_OWNERS.items():
        fit = Fit.BOUND if has_attribute(owner, attribute) else Fit.MISSING
        verdicts.append((f"{owner}.{attribute}", Verdict(fit, "no such attribute"), False))
    misfits = [each for each in verdicts if each[1].fit in (Fit.MISSING, Fit.REFUSED)]
    return Survey(
        torch=torch.__version__,
        bound=sum(verdict.fit is Fit.BOUND for _, verdict, _ in verdicts),
        unchecked=sum(verdict.fit is Fit.UNCHECKED for _, verdict, _ in verdicts),
        guarded=tuple(name for name, _, may_lack in misfits if may_lack),
        misfits=tuple(
            f"{name}: {verdict.reason}" for name, verdict, may_lack in misfits if not may_lack
        ),
    )


def has_attribute(owner: str, attribute: str) -> bool:
    """Whether objects of a class get an attribute: from the class, or in one of its methods."""
    try:
        value = find(owner)
    except (ImportError, AttributeError):
        return False
    if hasattr(value, attribute):
        return True
    return inspect.isclass(value) and any(
        attribute in getattr(each, "__annotations__", {}) or _is_assigned(each, attribute)
        for each in value.__mro__
    )


def _is_assigned(kind: type, attribute: str) -> bool:
    """Whether the module of a class assigns it to a ``self``."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError):
        return False
    return re.search(rf"\bself\.{attribute}\b[^=\n]*=[^=]", source) is not None


def _uses() -> Iterator[tuple[TorchUse, str, bool]]:
    """Uses, where they are, and whether torch may lack the name; calls stand for their names."""
    uses = list(_all_uses())
    called = {use.name for use, _, _ in uses if use.positional is not None}
    yield from (
        each for each in uses if each[0].positional is not None or each[0].name not in called
    )


def _all_uses() -> Iterator[tuple[TorchUse, str, bool]]:
    for use, where in uses_of_package().items():
        yield use, where, use.name in GUARDED or str(use) in GUARDED
    yield from ((use, "indirectly", False) for use in uses_in(INDIRECT))
    yield from ((use, "device/memory.py", True) for use in uses_in(ASKED_FOR))


def _on_devices(use: TorchUse) -> list[TorchUse]:
    if use.name.partition(".")[0] != DEVICE:
        return [use]
    return [on_device(use, module) for module in _MODULES]


def main(argv: Sequence[str] | None = None) -> int:
    """0 where everything fits."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.binding", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    given = parser.parse_args(argv)
    found = survey()
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    print(f"torch {found.torch}: {found.bound} fit, {found.unchecked} exist, unchecked")
    for name in found.guarded:
        print(f"  absent, asked for first: {name}")
    for misfit in found.misfits:
        print(f"  MISFIT {misfit}")
    return int(bool(found.misfits))


if __name__ == "__main__":
    sys.exit(main())
