"""Any loop of one's own: what is behind a checkpoint is exactly what was consumed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, SequentialSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import slurm_forge as forge
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.run_directory import RunDirectory
from slurm_forge.store.identity import CheckpointName
from slurm_forge.training.core import rng
from slurm_forge.training.core.step_boundary import RunStopped
from slurm_forge.vocabulary.position import LAST, Position
from tests.unit.training.test_custom_loop import WIDTH, Program, Stream
from tests.unit.training.test_run import Lab

STEPS = 6


class Rows(Dataset[torch.Tensor]):
    """Seven samples, so that epochs end inside of steps."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) + index


class Loaded(Stream):
    """The batches of a loader that keeps its own state, in torch's random order."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self.iterator: Any = None

    def __next__(self) -> torch.Tensor:
        batch = None
        while batch is None:
            self.iterator = self.iterator or iter(self.loader)
            batch = next(self.iterator, None)
            self.iterator = None if batch is None else self.iterator
        self.position += 1
        self.fetched.append((self.position, batch.sum().item()))
        return batch

    def close(self) -> None:
        """Ends the workers at once: those of a cycle that is collected are waited for, 5 s each."""
        shut_down = getattr(self.iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.loader.load_state_dict(state["loader"])


def stream_of(source: str) -> Stream:
    if source == "stream":
        return Stream()
    if source == "nodes":
        rows = nodes.Mapper(nodes.SamplerWrapper(SequentialSampler(Rows())), Rows().__getitem__)
        batches = nodes.Mapper(nodes.Batcher(rows, batch_size=2), torch.stack)
        prefetched = nodes.Prefetcher(batches, prefetch_factor=2)
        return Loaded(nodes.Loader(prefetched, restart_on_stop_iteration=False))
    workers = 2 if source == "workers" else 0
    return Loaded(StatefulDataLoader(Rows(), 2, shuffle=True, num_workers=workers))


@dataclass
class Memory:
    """Checkpoints that are never on disk: what was saved, in order."""

    saved: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, run: forge.Run) -> None:
        """In place of the saver's ways to the disk and back."""
        saver: Any = run._saver
        losses = saver._loss_history

        def save(reason: str, registry: Any, progress: Any, random: Any, **_: Any) -> Any:
            state = {
                kind: {name: item.state_dict() for name, item in getattr(registry, kind).items()}
                for kind in ("models", "optimizers", "others")
            }
            progress_now = progress.to_json()
            self.saved.append(
                copy.deepcopy(
                    {**state, "progress": progress_now, "random": random, "reason": reason}
                )
            )
            saver.last_save_step = progress.step
            saver.last = CheckpointName(step=progress.step, attempt=1, launch=1, nonce="00000000")
            return saver.last

        def restore(registry: Any, progress: Any, random: Any, *, again: bool = False) -> Any:
            if not self.saved:
                return None, True
            kept = copy.deepcopy(self.saved[-1])
            for kind in ("models", "optimizers", "others"):
                for name, item in getattr(registry, kind).items():
                    item.load_state_dict(kept[kind][name])
            progress.restore(kept["progress"])
            rng.restore(kept["random"])
            losses.restored()
            saver.last_save_step = progress.step
            saver.last = CheckpointName(step=progress.step, attempt=1, launch=1, nonce="00000000")
            return saver.last, True

        saver._save, saver.restore, saver.prepare = save, restore, lambda *_: None


@dataclass(frozen=True)
class Shape:
    """How a loop is written, and how its run is saved."""

    source: str
    loop: str
    take: str
    accumulate: int
    phase: str
    every: int | None
    bad: frozenset[int]
    polls: int


shapes = st.builds(
    Shape,
    # Processes and threads take their time.
    source=st.sampled_from(["stream", "stream", "stream", "loader", "loader", "nodes", "workers"]),
    loop=st.sampled_from(["for", "while", "steps"]),
    take=st.sampled_from(["own", "apply", "block", "whole", "two"]),
    accumulate=st.integers(1, 4),
    phase=st.sampled_from(["none", "before the fetch", "behind the fetch", "behind it, not due"]),
    every=st.sampled_from([None, 1, 2, 3]),
    bad=st.frozensets(st.integers(0, STEPS - 1), max_size=2),
    polls=st.integers(0, 2),
)
places = st.builds(
    Position,
    st.integers(0, STEPS),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([0, 1, 2, LAST]),
)


def step(program: Program, shape: Shape, batches: list[torch.Tensor]) -> None:
    """One optimizer step on what was fetched for it."""
    run, number = program.run, program.run.step_number
    program.seen.append((number, tuple(program.stream.fetched[-len(batches) :])))
    factor = math.nan if number in shape.bad and shape.take != "own" else 1.0

    def compute_loss(micro: torch.Tensor) -> torch.Tensor:
        return program.model(micro).square().mean() * factor

    if shape.take == "block":
        with run.step(forge.Batch(micro_batches=batches)) as made:
            for micro in made.micro_batches():
                made.backward(compute_loss(micro))
            made.apply(max_norm=1.0)
        return
    if shape.take in ("whole", "two"):
        batch = forge.Batch(micro_batches=batches)
        optimizer = program.optimizer if shape.take == "two" else None
        run.train_step(batch, compute_loss, optimizer=optimizer)
        return
    for micro in batches:
        compute_loss(micro).backward()
    if shape.take == "apply":
        run.apply(program.optimizer, max_norm=1.0)
    else:
        torch.nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
        program.optimizer.step()
        program.optimizer.zero_grad()
    run.advance(loss=0.5)


def evaluate(run: forge.Run, shape: Shape) -> None:
    """Every second step, where the loop has a phase at all."""
    due = run.step_number % 2 == 0 < run.step_number
    if shape.phase != "behind it, not due":
        due = run.due("eval", every=2)
    if due:
        with run.phase("eval"):
            torch.rand(3)
            for _ in range(shape.polls):
                run.poll()


def body(program: Program, shape: Shape, first: torch.Tensor | None = None) -> None:
    if shape.phase == "before the fetch" and first is None:
        evaluate(program.run, shape)
    batches = [next(program.stream) if first is None else first]
    batches += [next(program.stream) for _ in range(shape.accumulate - 1)]
    if shape.phase.startswith("behind"):
        evaluate(program.run, shape)
    step(program, shape, batches)


def train(program: Program, shape: Shape) -> None:
    run = program.run
    run.restore()
    if shape.loop == "steps":
        for _ in run.steps(until=forge.Steps(STEPS)):
            body(program, shape)
        return
    while run.step_number < STEPS:
        if shape.loop == "while":
            body(program, shape)
            continue
        for first in program.stream:
            body(program, shape, first)
            if run.step_number == STEPS:
                return


def lived(
    folder: Path, shape: Shape, stops: list[tuple[Position, RequestKind]]
) -> tuple[Memory, Program]:
    """A run that is stopped (or asked to save) at each of these places in turn."""
    directory = RunDirectory.at(folder)
    directory.create(b"")
    made = Lab(directory, {"checkpoint": {"background": False, "every_steps": shape.every}})
    made.spec["recovery"] = {"non_finite": [{"do": "skip", "times": 9}]}
    memory, seen = Memory(), []
    for place, kind in [*stops, (Position(STEPS + 1), RequestKind.STOP)]:
        run, _ = made.start(due={place: kind})
        memory.keep(run)
        stream = stream_of(shape.source)
        program = Program(run, stream=stream)
        try:
            train(program, shape)
        except RunStopped:
            continue
        finally:
            seen += program.seen
            if isinstance(stream, Loaded):
                stream.close()
        run.finish()
        break
    program.seen = seen
    return memory, program


@settings(
    # Examples with workers take seconds; 800 where time does not matter.
    max_examples=12 if settings.default.max_examples < 100 else 800,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=shapes,
    stops=st.lists(
        st.tuples(places, st.sampled_from([RequestKind.STOP, RequestKind.STOP, RequestKind.SAVE])),
        max_size=4,
    ),
)
def test_the_samples_behind_every_checkpoint_are_those_consumed(
    tmp_path_factory: Any, shape: Shape, stops: list[tuple[Position, RequestKind]]
) -> None:
    folder = tmp_path_factory.mktemp("loops")
    memory, program = lived(folder / "run", shape, stops)
    for kept in memory.saved:
        number = kept["progress"]["step"]
        assert kept["others"]["stream"]["position"] == number * shape.accumulate, kept["reason"]
    _, whole = lived(folder / "whole", shape, [])
    expected, size = dict(whole.seen), shape.accumulate
    assert all(seen == expected[number] for number, seen in program.seen)
    if shape.source == "stream":
        assert expected == {n: tuple(range(n * size, (n + 1) * size)) for n in range(STEPS)}
    assert torch.equal(program.weights, whole.weights)


def test_a_save_behind_the_fetch_is_seen(tmp_path: Path, monkeypatch: Any) -> None:
    """The property can fail: as it did where a phase saved what was fetched."""
    from slurm_forge.training.loop.positions import Positions

    shape = Shape("stream", "while", "own", 1, "behind the fetch", None, frozenset(), 1)
    stop: Callable[[], Any] = lambda: lived(  # noqa: E731
        tmp_path / "run", shape, [(Position(2, 1, 1), RequestKind.STOP)]
    )
    monkeypatch.setattr(Positions, "ahead", lambda self: {})
    memory, _ = stop()
    assert memory.saved[0]["others"]["stream"]["position"] == 3
