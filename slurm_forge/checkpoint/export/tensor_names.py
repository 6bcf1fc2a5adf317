"""Which tensors an export contains and what they are called there: decisions on names alone."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from slurm_forge.checkpoint.content.json_state import unescape
from slurm_forge.errors import CheckpointError

#: Sections of registered objects, in the manifest's state and as the first part of a key.
_REGISTERED = ("models", "optimizers", "objects")


def names_of_run(
    keys: Iterable[str], state: Mapping[str, Any], only: Collection[str], *, everything: bool
) -> dict[str, str]:
    """The name in the export for each key of a run's checkpoint that is exported.

    Without ``only``: the models.  A single model's tensors are named as its ``load_state_dict``
    expects them; those of several objects begin with the object's name.
    """
    registered = {name for section in _REGISTERED for name in state.get(section, {})}
    models = set(state.get("models", {}))
    wanted = set(only) or models
    unknown = wanted - registered
    if unknown:
        raise _unknown(min(unknown), registered)
    if not wanted and not everything:
        raise CheckpointError(
            "no model was registered: there is nothing to export",
            next_step="Choose with --only, or take everything: --all.",
        )
    alone = len(wanted) == 1 and wanted <= models and not everything
    names: dict[str, str] = {}
    for key in keys:
        parts = [unescape(part) for part in key.split("/")]
        section, owner = parts[0], parts[1] if len(parts) > 1 else ""
        if section == "extra" and len(parts) > 2:  # tensors in the extra state of a model
            owner = parts[2]
        if not everything and (section not in (*_REGISTERED, "extra") or owner not in wanted):
            continue
        if alone and section == "extra":
            continue  # internal to get_extra_state, and no key of the state dict
        names[key] = _join(parts, section, single=len(models) == 1, alone=alone)
    return _distinct(names)


def names_of_plain(keys: Iterable[str], only: Collection[str]) -> dict[str, str]:
    """All names unchanged; with ``only``, those below these names, a single one being removed."""
    names = list(keys)
    if not only:
        return {key: key for key in names}
    known = {key.partition(".")[0] for key in names}
    for prefix in only:
        if not any(_below(key, prefix) for key in names):
            raise _unknown(prefix, known)
    chosen = [key for key in names if any(_below(key, prefix) for prefix in only)]
    (prefix, *more) = only
    cut = len(prefix) + 1 if not more and prefix not in chosen else 0
    return {key: key[cut:] for key in chosen}


def _below(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _join(parts: list[str], section: str, *, single: bool, alone: bool) -> str:
    if section not in _REGISTERED:
        return ".".join(parts)
    if alone:
        return ".".join(parts[2:])
    if section == "optimizers" and parts[2] == "state" and single:
        parts = [*parts[:3], *parts[4:]]  # torch's spelling: no model between state and parameter
    return ".".join(parts[1:])


def _distinct(names: dict[str, str]) -> dict[str, str]:
    first: dict[str, str] = {}
    for key, name in names.items():
        if name in first:
            raise CheckpointError(
                f"{first[name]} and {key} would both be called {name}",
                next_step="Export them into files of their own: --only.",
            )
        first[name] = key
    return names


def _unknown(name: str, known: Collection[str]) -> CheckpointError:
    close = difflib.get_close_matches(name, known, n=1)
    meant = f' (did you mean "{close[0]}"?)' if close else ""
    listed = ", ".join(sorted(known)[:12]) or "nothing"
    return CheckpointError(
        f"there is no {name!r} in it{meant}", next_step=f"What can be chosen: {listed}."
    )
