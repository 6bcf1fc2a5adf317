"""Checks that data-parallel ranks train on different samples, and model-parallel ones on the same.

Each rank reports a digest of the samples of its last step in an exchange that a save needs anyway.
The first report of a launch has the ids themselves, which shows partial overlaps, too.  For samples
without ids, the inputs of the registered models in a few steps are compared instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.hooks import RemovableHandle

from slurm_forge.checkpoint.content.tensors import why_not_savable
from slurm_forge.device.accelerator import is_capturing
from slurm_forge.device.streams import event_behind
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.core.run_state import TrainingProgress
from slurm_forge.vocabulary.json_value import Json

#: The most ids in the first report of a rank.
_MOST_IDS = 4096
_SHOWN = 3
#: In how many steps of a launch the inputs of models are digested, and of how many models.
_STEPS, _MOST_MODELS = 3, 8
#: The most elements of a tensor in a digest, and the least of a step that identify samples.
_MOST_ELEMENTS, _LEAST_ELEMENTS = 1 << 16, 16


class ModelInputs:
    """Digests of the inputs of the registered models in the first steps of a launch.

    Of each step, the first call in training mode with gradients counts.  Nothing waits for the
    device.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._hooks: dict[str, _InputHook] = {}

    def watch(self, models: Mapping[str, nn.Module]) -> None:
        """Start to digest what these models are given."""
        for name, model in models.items():
            learned = any(each.requires_grad for each in model.parameters())
            if learned and len(self._hooks) < _MOST_MODELS:
                self._hooks[name] = hook = _InputHook(self._step)
                hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def report(self) -> dict[str, Json]:
        """Return one digest per step for each model that was called in enough steps."""
        return {
            name: list[Json](digests)
            for name, hook in self._hooks.items()
            if (digests := hook.digests())
        }


class _InputHook:
    """A forward pre-hook that keeps a model's inputs in its first steps, and removes itself then.

    In a copy of the model, or a pickled one, it does nothing.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        #: The beginnings of the input tensors, by step.
        self._seen: dict[int, list[_Kept]] = {}
        self._digests: list[str] = []
        self.handle: RemovableHandle | None = None

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        step = self._step()
        if step in self._seen:
            return
        if len(self._seen) == _STEPS:
            if self.handle is not None:
                self.handle.remove()
            return
        tensors = list(_tensors([args, kwargs]))
        if any(is_capturing(device) for device in {each.device for each in tensors}):
            return
        enough = sum(each.numel() for each in tensors) >= _LEAST_ELEMENTS
        self._seen[step] = [_Kept(each) for each in tensors] if enough else []

    def digests(self) -> list[str]:
        """Return one digest per step, once all steps are seen and their copies complete."""
        kept = list(self._seen.values())
        if not self._digests and len(kept) == _STEPS and all(e.arrived for s in kept for e in s):
            self._digests = [_digest(some) for some in kept]
            self._seen = {step: [] for step in self._seen}
        return self._digests


def _no_hook() -> Callable[..., None]:
    """Return the hook of a copied model."""
    return _ignore


def _ignore(*_: Any) -> None:
    """Do nothing: the hook of a copied model."""


class _Kept:
    """A copy of the beginning of a tensor."""

    __slots__ = ("_event", "values")

    def __init__(self, tensor: torch.Tensor) -> None:
        beginning = tensor.detach()
        # Narrowed first: to flatten what is expanded or permuted would copy all of it.
        for dim, length in enumerate(tensor.shape):
            rest = max(1, beginning.numel() // max(1, length))
            beginning = beginning.narrow(dim, 0, min(length, -(-_MOST_ELEMENTS // rest)))
        flat = beginning.reshape(-1)[:_MOST_ELEMENTS]
        self.values = flat.clone().resolve_conj().resolve_neg()
        self._event = event_behind(self.values.device)

    @property
    def arrived(self) -> bool:
        """Whether the copy is complete, so that reading it doesn't wait for the device."""
        return self._event is None or self._event.query()


def _digest(some: Sequence[_Kept]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for each in some:
        digest.update(f"{each.values.dtype} {len(each.values)} ".encode())
        digest.update(each.values.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in the arguments of a model."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        if plain and not (value.is_meta or value.is_nested):
            yield value
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, each.name) for each in dataclasses.fields(value)])
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def dataset_digest(data: Any) -> str:
    """Return a digest of which samples a dataset holds, empty if it doesn't show that cheaply.

    It distinguishes datasets that the program has divided over the ranks already, by the indices of
    a ``Subset``, or the first and last sample of a tensor, an array or a list.
    """
    parts: list[object] = []
    if isinstance(data, Subset):
        indices = np.asarray(data.indices)
        parts = [indices.dtype.kind, len(indices), indices.tobytes(), dataset_digest(data.dataset)]
    elif isinstance(data, ConcatDataset):
        parts = [dataset_digest(each) for each in data.datasets]
    elif isinstance(data, TensorDataset):
        parts = [dataset_digest(each) for each in data.tensors]
    elif type(data) in (torch.Tensor, np.ndarray, list, tuple) and len(data):
        parts = [_content(data[0]), _content(data[-1])]
    if not any(parts):
        return ""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _content(sample: Any) -> str:
    if isinstance(sample, list | tuple):
        return "".join(map(_content, sample))
    if type(sample) is torch.Tensor and why_not_savable(sample) == "" and sample.is_cpu:
        sample = sample.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
    if isinstance(sample, np.ndarray | np.generic):
        return "" if sample.dtype.hasobject else repr(sample.tobytes())
    return repr(sample) if isinstance(sample, int | float | str | bytes) else ""


def samples_report(
    progress: TrainingProgress,
    layout: RankLayout,
    *,
    ids: bool,
    inputs: Mapping[str, Json] | None = None,
    sampler: Json = None,
) -> Json:
    """Return this rank's report about the samples of its last step; ``ids``: with their ids.

    ``inputs`` is the report of ``ModelInputs``, for samples without ids.  ``sampler`` is the digest
    of what a sampler has given for all ranks, if the samples are from one.
    """
    samples = progress.sample_ids
    digest = hashlib.blake2b(repr(samples).encode(), digest_size=8).hexdigest()
    return {
        "data_rank": layout.data_rank,
        "count": len(samples),
        "consumed": progress.consumed,
        "digest": digest,
        "ids": [_to_json(each) for each in samples[:_MOST_IDS]] if ids else [],
        "inputs": dict(inputs or {}) if not samples else {},
        "sampler": sampler if samples else None,
        # Ranks along tp are given the same tokens, those along cp and pp other parts of a sample.
        "stream": layout.random_stream,
        "place": [list[Json](each) for each in layout.model_coordinates],
    }


def wrong_samples(reports: Sequence[Any]) -> str:
    """Describe what is wrong with the samples of all ranks; empty if nothing is.

    For samples without ids, the inputs of the models are compared.
    """
    known = [(rank, each) for rank, each in enumerate(reports) if each and each["count"]]
    by_data_rank: dict[int, tuple[int, Mapping[str, Any]]] = {}
    by_digest: dict[str, int] = {}
    orders: dict[str, tuple[int, Any]] = {}
    owners: dict[str, int] = {}
    for rank, each in known:
        other, first = by_data_rank.setdefault(each["data_rank"], (rank, each))
        if other != rank:
            if any(first[fact] != each[fact] for fact in ("digest", "count", "consumed")):
                return (
                    f"ranks {other} and {rank} belong to one model-parallel group (data-parallel "
                    f"rank {each['data_rank']}) and trained on different samples in the last step: "
                    f"{first['count']} up to position {first['consumed']}, and {each['count']} up "
                    f"to position {each['consumed']}; pass the mesh to run.batches(mesh=…)"
                )
            continue
        if each["sampler"] is not None:
            # It may give a sample several times: what counts is that all ranks divide one order.
            other, order = orders.setdefault("sampler", (rank, each["sampler"]))
            if order != each["sampler"]:
                return (
                    f"the samplers of ranks {other} and {rank} have given different samples up to "
                    "the last step; the order has to be that of the whole run, and to follow from "
                    "set_epoch(epoch) or the global random generators"
                )
            continue
        twin = by_digest.setdefault(each["digest"], rank)
        if twin != rank:
            return _same(twin, rank, f"all {each['count']} samples")
        shared = [text for text in map(str, each["ids"]) if owners.setdefault(text, rank) != rank]
        if shared:
            some = ", ".join(shared[:_SHOWN])
            return _same(owners[shared[0]], rank, f"{len(shared)} samples ({some})")
    return _wrong_inputs(reports)


def _wrong_inputs(reports: Sequence[Any]) -> str:
    """Describe what is wrong with the inputs of the models; empty if nothing is."""
    by_stream: dict[tuple[str, int], tuple[int, Any]] = {}
    by_inputs: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(reports):
        inputs = (each or {}).get("inputs", {})
        for model, digests in inputs.items():
            other, first = by_stream.setdefault((model, each["stream"]), (rank, digests))
            if first != digests:
                return (
                    f"ranks {other} and {rank} belong to one tensor-parallel group, and model "
                    f"{model!r} was given different inputs there; give all ranks of a group the "
                    "same samples, by their place along the data-parallel dimensions"
                )
        # The same in every step: data of one batch, or none at all.
        varied = [model for model, digests in inputs.items() if len(set(digests)) == len(digests)]
        if not varied:
            continue
        # All of them: a generator may be given the same noise, and its discriminator other data.
        twin, data_rank = by_inputs.setdefault(
            repr((each["place"], inputs)), (rank, each["data_rank"])
        )
        if data_rank != each["data_rank"]:
            return (
                f"ranks {twin} and {rank} gave model {' and '.join(map(repr, varied))} the same "
                f"inputs in {len(inputs[varied[0]])} steps: they train on the same samples; divide "
                "the data over the ranks (DistributedSampler, split_dataset_by_node), or give the "
                "dataset to run.batches, which does it"
            )
    return ""


def _same(one: int, two: int, what: str) -> str:
    return (
        f"ranks {one} and {two} trained on the same samples in the last step: {what}; give each "
        "data-parallel rank a part of its own, as run.batches(dataset) does"
    )


def _to_json(sample: object) -> Json:
    if isinstance(sample, tuple):
        return [_to_json(part) for part in sample]
    return sample if isinstance(sample, int | str) else str(sample)
