"""Lets ``cluster="forge"`` understand the ``slurm_*`` parameters of existing submitit code.

Submitit's AutoExecutor drops parameters of other clusters before a plugin sees them, silently: a
job that asks for a partition would land somewhere else.  So the two places where it does
(its constructor and the update of its parameters) are wrapped, for this cluster only, when
submitit loads our plugin.  Submitit's deprecated names without prefix (``partition=…``) belong to
the plugin that was loaded last; for every other cluster they keep the meaning that they have
without us.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from submitit import AutoExecutor
from submitit.auto import auto
from submitit.core import plugins
from submitit.core.core import Executor

from slurm_forge.errors import SubmissionError

_CLUSTER = "forge"
_OURS = "forge_"
_THEIRS = "slurm_"
_DONE = "_slurm_forge_wrapped"


def accept_slurm_names() -> None:
    """Wrap AutoExecutor once; doing it again changes nothing."""
    original, make = AutoExecutor._internal_update_parameters, auto.flexible_init
    if getattr(original, _DONE, False):
        return

    @functools.wraps(original)
    def update(self: AutoExecutor, **parameters: Any) -> None:
        is_forge = self.cluster == _CLUSTER
        self._deprecated_args = _deprecated(self, is_forge)
        original(self, **(renamed(parameters) if is_forge else parameters))

    @functools.wraps(make)
    def initialised(cls: type[Executor], folder: str | Path, **parameters: Any) -> Executor:
        # Looked up anew whenever an AutoExecutor is made: the first one loads us in the middle.
        return make(cls, folder, **(renamed(parameters) if cls.name() == _CLUSTER else parameters))

    setattr(update, _DONE, True)
    AutoExecutor._internal_update_parameters = update  # type: ignore[method-assign]
    auto.flexible_init = initialised


def _deprecated(executor: AutoExecutor, is_forge: bool) -> dict[str, str]:
    """What submitit's names without prefix stand for; the later executor wins, as in submitit."""
    shared = executor._valid_parameters()
    executors = dict(plugins.get_executors())
    last = executors.pop(_CLUSTER, None)
    if is_forge and last is not None:
        executors[_CLUSTER] = last
    return {
        name: f"{cluster}_{name}"
        for cluster, kind in executors.items()
        for name in kind._valid_parameters()
        if name not in shared
    }


def renamed(parameters: dict[str, Any]) -> dict[str, Any]:
    """``slurm_x`` as ``forge_x``; both at once is an error, whatever the values."""
    result = dict(parameters)
    for name in parameters:
        if not name.startswith(_THEIRS):
            continue
        own_name = _OURS + name.removeprefix(_THEIRS)
        if own_name in parameters:
            raise SubmissionError(
                f"{name} and {own_name} are both given",
                next_step="Keep one of them: with cluster=forge they mean the same.",
            )
        result[own_name] = result.pop(name)
    return result
