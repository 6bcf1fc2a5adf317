"""The content of a checkpoint: registered objects as tensors and JSON, and back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from slurm_forge.checkpoint.content.health import NOTES
from slurm_forge.checkpoint.content.json_state import (
    SaveTensor,
    decode,
    encode,
    escape,
)
from slurm_forge.checkpoint.content.models import (
    ParameterName,
    apply_model,
    capture_model,
    name_parameters,
    rank_buffers,
    target_model,
)
from slurm_forge.checkpoint.content.optimizers import (
    OptimizerTarget,
    capture_optimizer,
    capture_options,
    target_optimizer,
)
from slurm_forge.checkpoint.content.outline import (
    ObjectOutline,
    Outline,
    outline_of,
)
from slurm_forge.checkpoint.content.rank_states import (
    OWN,
    RankIdentity,
    other_layout,
    own_states,
    pack,
    padded,
    unpack,
)
from slurm_forge.checkpoint.content.stages import PipelineStages, staged
from slurm_forge.checkpoint.content.tensors import (
    Tensors,
    check_savable,
    new_target,
    saved_tensors,
    some,
)
from slurm_forge.errors import CheckpointError, MismatchError
from slurm_forge.store.adoption import FRESH
from slurm_forge.vocabulary.json_value import Json

#: Keys under it are states of data sources, each belonging to one rank.
DATA = "data/"
#: The largest tensor of a registered object, in elements, that ranks compare before every save;
#: larger ones would take too long, and are compared while they are written.
_SMALL = 1 << 14
_NO_OUTLINE = Outline((), (), [], [])


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a scaler, an EMA: any object that can return its state and restore it."""

    def state_dict(self) -> Any:
        """Return the state: tensors, numbers, strings, None, in lists, tuples and dicts."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore what ``state_dict`` returned."""
        ...


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured state.  The tensors are live: nothing may change before the write.

    ``alike``: keys of tensors that are equal on all ranks.  ``parts``: a digest of each part that
    may differ between ranks.  ``common``: a digest of those that may not (the options of
    optimizers, schedulers, gradient scalers); ``copies`` are tensors of objects that may not
    either, ``buffers`` those of models, and large ones of objects, that may.  ``shape``: a digest
    of what must not differ for a save to be possible.
    """

    tensors: Tensors
    document: dict[str, Json]
    alike: frozenset[str]
    parts: dict[str, str]
    shape: str
    known: Known | None
    common: Mapping[str, str] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Objects:
    """The registered objects, captured.

    ``digests`` are those of objects that are saved once for all ranks; ``own`` is what is saved for
    this rank.  ``large`` are tensors that may differ between ranks and are excluded from digests.
    """

    document: dict[str, Json] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    large: set[str] = field(default_factory=set)
    own: Tensors = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The constant part of an optimizer's JSON while it holds the same state."""

    params: list[Json]
    rest: dict[str, Json]
    digest: str

    @classmethod
    def of(cls, document: Any) -> _Fixed:
        params = [group["params"] for group in document["groups"]]
        rest = {key: value for key, value in document.items() if key != "groups"}
        return cls(params, rest, _digest([params, rest]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a capture leaves for the next one: names and JSON, no tensors."""

    outline: Outline
    models: dict[str, Json]
    optimizers: Mapping[str, _Fixed]
    loose: tuple[str, ...]
    alike: frozenset[str]
    shape: str
    parts: Mapping[str, str]
    buffers: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The objects of a run under their registered names.

    ``extra`` is the run's own JSON (step, samples consumed, plan, …), ``rng`` this rank's generator
    states under ``rng/rank-<r>/…``.  When loading, ``extra`` is ignored, and of ``rng`` only the
    keys are used.  ``notes`` are figures under ``notes/…`` that at most one rank provides: those
    that were not saved stay unchanged.  ``stages`` describes, with pipeline parallelism, the other
    stages; ``models`` are then named by ``PipelineStages.name``.  ``data`` provides the state of
    this rank's data source, bytes under ``data/…`` in multiples of 4 KiB; all keys that begin with
    ``data_prefix`` are loaded, and if there are none, those of every rank.
    """

    models: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[str, torch.Tensor] = field(default_factory=dict)
    notes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stages: PipelineStages | None = None
    data: Callable[[], Mapping[str, torch.Tensor]] = dict
    data_prefix: str = DATA
    identity: RankIdentity | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        wrong = [key for key in self.rng if not key.startswith("rng/rank-")]
        if wrong:
            raise ValueError(f"generator states are named rng/rank-<r>/…, not {wrong[0]!r}")

    def placed(self, rank: int, ranks: int) -> TrainingState:
        """A copy with the number of this rank, unless that is given."""
        if self.identity is not None:
            return self
        return dataclasses.replace(self, identity=RankIdentity(rank, str(ranks)))

    def capture(self, known: Known | None = None, own: Collection[str] = ()) -> Captured:
        """Capture the state; CheckpointError, naming the key, for a value that can't be saved.

        With the result of an earlier call, names that are still valid are reused; shapes, dtypes
        and placements are then not examined (``Planner.known`` compares them).  ``own`` names what
        is saved for each rank, such as ``objects/data``.
        """
        with torch.no_grad():
            sight = outline_of(self.models, self.optimizers)
            if known is not None and sight is not None:
                again = self._again(known, sight, own)
                if again is not None:
                    return again
            return self._anew(sight, own)

    def _again(self, known: Known, sight: ObjectOutline, own: Collection[str]) -> Captured | None:
        tensors = known.outline.tensors(sight)
        if tensors is None:
            return None
        loose: Tensors = {}
        save = _saver(loose)
        optimizers: dict[str, Json] = {
            name: _with_options(
                known.optimizers[name], capture_options(name, optimizer.param_groups, save)
            )
            for name, optimizer in self.optimizers.items()
        }
        objects = self._objects(save, own)
        if tuple(loose) != known.loose:
            return None
        return self._captured(known, {**tensors, **loose}, loose, optimizers, objects, own)

    def _anew(self, sight: ObjectOutline | None, own: Collection[str]) -> Captured:
        tensors: Tensors = {}
        alike: set[str] = set()
        names = name_parameters(self.models)
        models: dict[str, Json] = {
            name: capture_model(name, module, tensors, alike)
            for name, module in self.models.items()
        }
        optimizers: dict[str, Json] = {
            name: capture_optimizer(name, optimizer, names, tensors, alike)
            for name, optimizer in self.optimizers.items()
        }
        loose = {key: tensors.pop(key) for key in list(tensors) if _is_option(key)}
        outline = sight and Outline.of(sight, self.models, self.optimizers, names, tensors)
        # A DTensor's replicas are equal by definition: any holder may write it.
        alike.update(key for key, tensor in tensors.items() if isinstance(tensor, DTensor))
        shape = _digest(sorted((*tensors, *loose)))
        objects = self._objects(_saver(loose), own)
        known = Known(
            outline=outline or _NO_OUTLINE,
            models=models,
            optimizers={name: _Fixed.of(each) for name, each in optimizers.items()},
            loose=tuple(loose),
            alike=frozenset(alike),
            shape=shape,
            parts={f"models/{name}": _digest(value) for name, value in models.items()},
            buffers=frozenset(rank_buffers(self.models) & tensors.keys()),
        )
        captured = self._captured(known, {**tensors, **loose}, loose, optimizers, objects, own)
        return captured if outline else dataclasses.replace(captured, known=None)

    def _objects(self, save: SaveTensor, own: Collection[str]) -> _Objects:
        made = _Objects()
        identity = self.identity or RankIdentity()
        for name, item in self.objects.items():
            state, key = _state_of(name, item), f"objects/{escape(name)}"
            if key in own:
                made.own[identity.key(key)] = padded(pack(state, key))
                if identity.rank == 0:  # also for exports, and for another layout of ranks
                    made.document[name] = encode(state, key, save)
                continue
            called, tensors = name, Tensors()
            value = encode(state, key, tensors.__setitem__)
            if self.stages is not None and tensors:  # named by the stage that owns the tensors
                called, tensors = staged(name, self.stages.stage), Tensors()
                value = encode(state, f"objects/{escape(called)}", tensors.__setitem__)
            copies = set() if not tensors else _copies(tensors, self.models)
            large = {key for key, each in tensors.items() if each.numel() > _SMALL} - copies
            if self.stages is not None or _of_optimizer(item):  # never per rank
                copies, large = copies | large, set()
            made.copies.update(copies)
            made.large.update(large)
            made.document[called] = value
            made.digests[called] = _digest([value, _facts(tensors, copies | large)])
            for key, tensor in tensors.items():
                save(key, tensor)
        return made

    def _captured(
        self,
        known: Known,
        tensors: Tensors,
        loose: Tensors,
        optimizers: dict[str, Json],
        objects: _Objects,
        own: Collection[str],
    ) -> Captured:
        late = {key for key, tensor in loose.items() if isinstance(tensor, DTensor)}
        save = _saver(tensors)
        identity = self.identity or RankIdentity()
        own_buffers = known.buffers.intersection(own)
        tensors.update({identity.key(key): tensors[key] for key in sorted(own_buffers)})
        tensors.update(objects.own)
        for key, tensor in (*self.rng.items(), *self.notes.items(), *self.data().items()):
            save(key, tensor)
        extra = {key: encode(value, f"extra/{key}") for key, value in self.extra.items()}
        parts = {f"extra/{key}": _digest(value) for key, value in extra.items()} | {**known.parts}
        common = {
            f"optimizers/{name}": _digest(_options(value)) for name, value in optimizers.items()
        }
        for name, digest in objects.digests.items():
            item = self.objects.get(name)
            (common if _of_optimizer(item) else parts)[f"objects/{escape(name)}"] = digest
        return Captured(
            tensors,
            {
                "extra": extra,
                "models": known.models,
                "optimizers": optimizers,
                "objects": objects.document,
                **({} if self.stages is None else {"stages": self.stages.count}),
            },
            known.alike | late if late else known.alike,
            parts,
            known.shape,
            known,
            common,
            frozenset(objects.copies),
            (known.buffers - own_buffers) | objects.large,
        )

    def trained(self) -> frozenset[str]:
        """Keys of the parameters that require a gradient, which are learned."""
        names = name_parameters(self.models).values()
        return frozenset(f"models/{name.key}" for name in names if name.learned)

    def target(self, document: Mapping[str, Any], metadata: Metadata) -> LoadTarget:
        """Make room for the saved state; CheckpointError, before any change, if it differs."""
        fresh, stages = fresh_parts(document), self.stages
        items, optimizers_here = self.objects, set(self.optimizers)
        if "optimizer" in fresh:
            items = {name: each for name, each in items.items() if not _of_optimizer(each)}
            begun = self.objects.keys() - items.keys()
            left = {
                name: each
                for name, each in document["objects"].items()
                # Including those of pipeline stages: see ``_objects``.
                if name not in begun and name.rpartition("@")[0] not in begun
            }
            document = {**document, "optimizers": {}, "objects": left}
            optimizers_here = set()
        own_keys, foreign = self._own_states(items, metadata)
        objects = {
            name: name
            if f"objects/{escape(name)}" in own_keys
            else self._saved_as(name, document["objects"])
            for name in items
        }
        found = set(document["objects"])
        if stages is not None:
            found -= {name for name in found if name.rpartition("@")[0] in objects}
            found |= set(objects.values()) & set(document["objects"])
        models = set(self.models) if stages is None else set(stages.models)
        _compare_names("models", models, set(document["models"]))
        _compare_names("optimizers", optimizers_here, set(document["optimizers"]))
        _compare_names("objects", set(objects.values()), found)
        names = name_parameters(self.models)
        targets: Tensors = {}
        for name, module in self.models.items():
            target_model(
                name,
                module,
                document["models"][name],
                metadata,
                targets,
                all_stages=None if stages is None else stages.models[name],
            )
        optimizers = [
            target_optimizer(
                name,
                optimizer,
                names,
                document["optimizers"][name],
                metadata,
                targets=targets,
                all_stages=self._all_groups(name, optimizer, names, document),
            )
            for name, optimizer in self.optimizers.items()
            if "optimizer" not in fresh
        ]
        for name, item in items.items():
            if f"objects/{escape(name)}" not in own_keys:
                _target_object(objects[name], item, metadata, targets)
        saved = saved_tensors(metadata, OWN)
        for called, key in own_keys.items():
            targets[key] = new_target(saved[key], targets.get(called))
        rng = {} if "rng" in fresh else saved_tensors(metadata, "rng/")
        for key in set(self.rng) & set(rng):
            targets[key] = new_target(rng[key], None)
        data = saved_tensors(metadata, DATA)
        own = {key for key in data if key.startswith(self.data_prefix)}
        for key in own or data:
            targets[key] = new_target(data[key], None)
        saved = saved_tensors(metadata, NOTES)
        for key in set(self.notes) & set(saved):
            if saved[key].size == self.notes[key].shape:  # another version may have noted less
                targets[key] = self.notes[key]
        return LoadTarget(self, document, targets, optimizers, objects, own_keys, foreign)

    def _own_states(
        self, items: Collection[str], metadata: Metadata
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """This rank's saved keys by the names that all ranks use, and state of another layout.

        Of state that was saved on another layout of ranks, rank 0's is loaded.

        Raises:
            MismatchError: There is such an object's state, and the resume has to be exact.
        """
        identity = self.identity or RankIdentity()
        here = {f"objects/{escape(name)}" for name in items}
        saved = {
            called: layout
            for called, layout in own_states(saved_tensors(metadata, OWN)).items()
            if called in here or called.startswith("models/")
        }
        foreign = tuple(each for each, layout in saved.items() if layout != identity.layout)
        refused = [each for each in foreign if each in here]
        if refused and self.exact:
            raise other_layout(refused, saved[refused[0]], identity)
        keys = {each: identity.key(each) for each in saved if each not in foreign}
        there = saved_tensors(metadata, identity.prefix)
        return {each: key for each, key in keys.items() if key in there}, foreign

    def _saved_as(self, name: str, saved: Mapping[str, Any]) -> str:
        """The name of a registered object in a checkpoint: see ``_objects``."""
        called = name if self.stages is None else staged(name, self.stages.stage)
        return called if called in saved else name

    def _all_groups(
        self,
        name: str,
        optimizer: Optimizer,
        names: Mapping[int, ParameterName],
        document: Mapping[str, Any],
    ) -> Sequence[Collection[str]] | None:
        """The keys of all stages' parameters; None if there are no stages, now or then."""
        if self.stages is not None:
            return self.stages.groups[name]
        if "stages" not in document:
            return None
        return [
            {names[id(each)].key for each in group["params"] if id(each) in names}
            for group in optimizer.param_groups
        ]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The destination of the saved tensors; ``apply`` then passes them to the objects."""

    state: TrainingState
    document: Mapping[str, Any]
    tensors: Tensors
    optimizers: list[OptimizerTarget]
    #: The name in the checkpoint of each registered object that is loaded.
    objects: Mapping[str, str]
    #: Saved per-rank keys by the names that all ranks use.
    own: Mapping[str, str]
    #: State that was saved for each rank on another layout of ranks.
    foreign: tuple[str, ...]

    def apply(self) -> None:
        """Restore the objects: models, optimizers, then everything else."""
        for called, key in self.own.items():
            if called in self.tensors:
                self.tensors[called].copy_(self.tensors[key])
        for name, module in self.state.models.items():
            apply_model(name, module, self.document["models"][name], self.tensors)
        for optimizer in self.optimizers:
            optimizer.apply()
        for name, saved_name in self.objects.items():
            own = self.own.get(f"objects/{escape(name)}")
            if own is not None:
                state = unpack(self.tensors[own])
            else:
                saved = self.document["objects"][saved_name]
                state = decode(saved, self.tensors.__getitem__)
            item = self.state.objects[name]
            with _named_in_errors(name, item, "load_state_dict"):
                item.load_state_dict(state)

    def rng(self) -> dict[str, torch.Tensor]:
        """The requested generator states that were saved."""
        return {key: self.tensors[key] for key in self.state.rng if key in self.tensors}

    def data(self) -> dict[str, torch.Tensor]:
        """The requested states of data sources."""
        return {key: tensor for key, tensor in self.tensors.items() if key.startswith(DATA)}


def fresh_parts(document: Mapping[str, Any]) -> frozenset[str]:
    """What a run that begins at this checkpoint does not take over from it."""
    named = document.get(FRESH)
    return frozenset(each for each in named or () if isinstance(each, str))


def _of_optimizer(item: Any) -> bool:
    """Whether it belongs to an optimizer and starts afresh with it."""
    return isinstance(item, (LRScheduler, ReduceLROnPlateau, GradScaler))


def _target_object(name: str, item: Stateful, metadata: Metadata, targets: Tensors) -> None:
    # Never in place: only the object knows what its state shares with other objects.  Its present
    # tensors show how the saved ones are distributed over ranks and devices.
    prefix = f"objects/{escape(name)}"
    present: Tensors = {}
    encode(_state_of(name, item), prefix, present.__setitem__)
    # The root itself may be a tensor, which needs both prefixes.
    for key, saved in saved_tensors(metadata, prefix).items():
        if key == prefix or key.startswith(f"{prefix}/"):
            targets[key] = new_target(saved, present.get(key))


def _state_of(name: str, item: Stateful) -> Any:
    with _named_in_errors(name, item, "state_dict"):
        return item.state_dict()


@contextmanager
def _named_in_errors(name: str, item: Stateful, method: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{method}() of {name!r} ({type(item).__name__}) raised {type(error).__name__}: "
            f"{error}",
            next_step=f"Correct {method}() of this registered object: state_dict() is called at "
            "every save, and load_state_dict() gets what it returned.",
        ) from error


def _copies(tensors: Tensors, models: Mapping[str, nn.Module]) -> set[str]:
    """The tensors of an object that are copies of one thing on all ranks that hold them.

    These are ``DTensor``s, and all tensors of an object that has one for each learned parameter of
    a model, as an EMA has.  Tensors on a device count as copies, too.
    """
    copies = {
        key
        for key, tensor in tensors.items()
        if isinstance(tensor, DTensor) or tensor.device.type != "cpu"
    }
    shapes = Counter(each.shape for each in tensors.values() if each.is_floating_point())
    for model in models.values():
        learned = Counter(each.shape for each in model.parameters() if each.requires_grad)
        if learned and learned <= shapes:
            return set(tensors)
    return copies


def _facts(tensors: Tensors, later: Collection[str]) -> list[Json]:
    """What ranks compare of an object's tensors before a save; ``later``: the values beside it."""
    facts: list[Json] = []
    for key, tensor in tensors.items():
        content = "" if key in later else hashlib.sha256(pack(tensor, key)).hexdigest()
        facts.append([key, str(tensor.dtype), list[Json](tensor.shape), content])
    return facts


def _compare_names(section: str, registered: set[str], saved: set[str]) -> None:
    if registered != saved:
        here, there = some(registered - saved) or "none", some(saved - registered) or "none"
        raise MismatchError(
            f"the registered {section} differ from the saved ones; only here: {here}, "
            f"only in the checkpoint: {there}",
            next_step="Register the same objects under the same names as when it was written"
            + (
                "; what ends in @ and a number is a pipeline stage's own: use as many stages, or "
                "give their parameters global names."
                if any("@" in name for name in registered ^ saved)
                else "."
            ),
        )


def _saver(tensors: Tensors) -> SaveTensor:
    def save(key: str, tensor: torch.Tensor) -> None:
        tensors[key] = check_savable(key, tensor)

    return save


def _is_option(key: str) -> bool:
    """Whether it is a tensor among an optimizer's options (a learning rate, say)."""
    parts = key.split("/", 3)
    return parts[0] == "optimizers" and parts[2] == "groups"


def _with_options(fixed: _Fixed, options: Sequence[Json]) -> Json:
    groups: list[Json] = [
        {"params": params, "options": each}
        for params, each in zip(fixed.params, options, strict=True)
    ]
    return {"groups": groups, **fixed.rest}


def _options(document: Any) -> Json:
    return [group["options"] for group in document["groups"]]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode("ascii")).hexdigest()
