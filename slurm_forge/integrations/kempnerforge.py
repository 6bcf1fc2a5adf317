"""KempnerForge's training script as a run.

    with slurm_forge.attach("my-run") as run:
        train_script(run, "scripts/train.py", ["configs/train/7b.toml"])

The script is one function, which builds everything by names that it has imported.  Some of these
are exchanged: what saves, and what looks for signals, bad losses and dead connections.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from kempnerforge.training.hooks import TrainingHook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations.external_loop import ExternalLoop, nothing
from slurm_forge.training.loop.run import Run


def train_script(run: Run, script: str | Path, arguments: Sequence[str]) -> None:
    """Run the script: from the run's checkpoint if it has one.

    Every step of the script is one of the run, which saves and stops between two of them.
    KempnerForge's own checkpoints are neither written nor read.

    Args:
        run: The run, from ``slurm_forge.attach`` or as the argument of a training function.
        script: KempnerForge's ``scripts/train.py``, or a copy of it that is your own.
        arguments: What follows it on the command line: the TOML file, and what overrides it.

    Raises:
        UnsupportedError: The script is built in another way, or the configuration asks for pipeline
            parallelism, a vision model, streamed data, or a checkpoint to load from.
    """
    module = _loaded(Path(script))
    exchanged = _Exchanged(ExternalLoop(run))
    for name, wrap in exchanged.names().items():
        if not hasattr(module, name):
            raise UnsupportedError(
                f"{script} has no {name}: it is not built as KempnerForge's scripts/train.py is",
                next_step="Start it with slurm-forge exec (docs/how-to/torchtitan.md).",
            )
        setattr(module, name, wrap(getattr(module, name)))
    words, sys.argv = sys.argv, [str(script), *arguments]
    try:
        module.main()
    finally:
        sys.argv = words


def _loaded(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kempnerforge_train_script", script)
    if spec is None or spec.loader is None or not script.is_file():
        raise UnsupportedError(
            f"{script} is not a Python file",
            next_step="Give the path of KempnerForge's scripts/train.py.",
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_Wrap = Callable[[Any], Any]


@dataclass(slots=True)
class _Exchanged:
    """What takes the place of the script's own parts, and what these share."""

    loop: ExternalLoop
    mesh: DeviceMesh | None = None
    begun: bool = False
    tokens: dict[str, int] = field(default_factory=lambda: {"seen": 0})

    def names(self) -> dict[str, _Wrap]:
        """By the names that the script knows them by."""
        return {
            "load_config": self._config,
            "init_distributed": self._mesh,
            "CheckpointManager": lambda _: self._checkpoints,
            # Asked whether to load: the run knows.
            "resolve_resume_path": lambda _: str,
            "ShutdownHandler": lambda _: _NoSignals,
            "NaNDetector": lambda _: lambda **_: _Losses(self.loop),
            "check_nccl_health": lambda _: lambda: True,
            "clip_grad_norm_": self._clip,
            "MetricsTracker": self._tracker,
            "HookRunner": lambda runner: lambda: runner([_Counter(self.loop, self.tokens)]),
            "destroy_distributed": nothing,
        }

    def _config(self, load: Any) -> Any:
        def loaded(*args: Any, **kwargs: Any) -> Any:
            config = load(*args, **kwargs)
            _require_supported(config)
            return config

        return loaded

    def _mesh(self, initialize: Any) -> Any:
        def initialized(*args: Any, **kwargs: Any) -> DeviceMesh | None:
            self.mesh = initialize(*args, **kwargs)
            return self.mesh

        return initialized

    def _checkpoints(self, config: Any, model: Any, optimizer: Any, **_: Any) -> _RunCheckpoints:
        _check_updates(optimizer, self.loop)
        return _RunCheckpoints(self, model, optimizer)

    def _clip(self, clip: Any) -> Any:
        def clipped(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            self.loop.note_norm(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            return norm

        return clipped

    def _tracker(self, make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            tracker = make(*args, **kwargs)
            start = tracker.start_step

            def start_step() -> None:
                self.loop.boundary()
                if not self.begun:
                    self.begun = True
                    self.loop.release_random()
                start()

            tracker.start_step = start_step
            return tracker

        return made


class _RunCheckpoints:
    """In place of its ``CheckpointManager``: the run, which decides when to save."""

    def __init__(self, exchanged: _Exchanged, model: Any, optimizer: Any) -> None:
        self._exchanged, self._model, self._optimizer = exchanged, model, optimizer
        self._data = _LateDataPosition()

    def load(self, *, scheduler: Any, **_: Any) -> tuple[int, int, dict[str, Any]]:
        """Register everything and restore; where the script counts on from."""
        loop, tokens = self._exchanged.loop, self._exchanged.tokens
        loop.run.register(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=scheduler,
            data=self._data,
            progress=_Tokens(tokens),
        )
        loop.run.restore(mesh=self._exchanged.mesh)
        loop.hold_random()
        return loop.run.step_number, tokens["seen"], {}

    def apply_dataloader_state(self, loader: Any) -> None:
        """Have the loader, which is made after the restore, go on where it was."""
        if not hasattr(loader, "state_dict"):
            raise UnsupportedError(
                f"a {type(loader).__name__} does not tell where it is, so that can't be saved",
                next_step="Use data that KempnerForge's StatefulDataLoader loads.",
            )
        self._data.give(loader)

    def save(self, **_: Any) -> None:
        """The run saves by itself."""

    def wait(self) -> None:
        """The run waits by itself."""


class _LateDataPosition:
    """The position of a loader that comes later than the state it had."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._state: dict[str, Any] = {}

    def give(self, loader: Any) -> None:
        self._loader = loader
        if self._state:
            loader.load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loader is None else dict(self._loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class _Tokens:
    """How many tokens the script has counted."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self._tokens = tokens

    def state_dict(self) -> dict[str, int]:
        return dict(self._tokens)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._tokens.update(state)


class _NoSignals:
    """In place of its ``ShutdownHandler``: the run stops all ranks behind the same step."""

    def __init__(self, timeout_sec: float = 0.0) -> None:
        del timeout_sec

    def register(self) -> None:
        """The run has its own handlers."""

    def should_shutdown(self) -> bool:
        return False

    def finish(self) -> None:
        """Nothing was registered."""


class _Losses:
    """In place of its ``NaNDetector``: the run judges the update, and what follows."""

    should_rollback = False

    def __init__(self, loop: ExternalLoop) -> None:
        self._loop = loop

    def check_loss(self, loss: float, step: int) -> bool:
        del step
        self._loop.add_loss(torch.tensor(loss, device=self._loop.run.device))
        return True


class _Counter(TrainingHook):
    """Counts the steps of the script as those of the run."""

    def __init__(self, loop: ExternalLoop, tokens: dict[str, int]) -> None:
        self._loop, self._tokens = loop, tokens

    def on_step_end(self, ctx: Any) -> None:
        """Count; the boundary is before the next step, behind an evaluation."""
        self._tokens["seen"] = ctx.tokens_seen
        self._loop.count(None)


def _check_updates(optimizer: torch.optim.Optimizer, loop: ExternalLoop) -> None:
    """Have the run make the updates of the optimizer, by the optimizer's own step."""
    step, under_way = optimizer.step, False

    def checked() -> None:
        nonlocal under_way
        if under_way:
            step()
            return
        under_way = True
        try:
            loop.apply(optimizer)
        finally:
            under_way = False

    optimizer.step = checked  # type: ignore[method-assign, assignment]


def _require_supported(config: Any) -> None:
    for name, is_used in (
        ("pipeline parallelism (distributed.pp)", config.distributed.pp > 1),
        ("a vision model ([vlm])", config.is_vlm),
        ("streamed data (data.hf_streaming)", config.data.hf_streaming),
        ("checkpoint.load_path", config.checkpoint.load_path is not None),
    ):
        if is_used:
            raise UnsupportedError(
                f"KempnerForge's script with {name}",
                next_step="Start it with slurm-forge exec and KempnerForge's own checkpoints "
                "(docs/how-to/torchtitan.md).",
            )
