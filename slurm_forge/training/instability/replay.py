"""Recompute a step's losses and gradients, and restore everything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from slurm_forge.checkpoint.content.models import wrapped_attribute
from slurm_forge.device.accelerator import in_use, widest_float
from slurm_forge.training.core.host_generators import (
    Generators,
    HostGenerator,
    HostGenerators,
)
from slurm_forge.training.core.loss import (
    BatchLoss,
    Loss,
)
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.step.gradient_norms import parameter_names


@dataclass(frozen=True, slots=True)
class ReplayedMicroBatch:
    """One recomputed micro-batch: its loss, and the observations on the way.

    For ``Loss(sum, count)`` the sum is the loss; ``count`` is None for a mean.
    """

    loss: float
    count: float | None
    first_bad: FirstNonFinite


class StateGuard:
    """Saves what a forward and backward change beside the gradients; ``put_back`` restores it.

    Buffers of all models, the random state, and which modules are in training mode.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        # Parameters may lie on the host (offload) while dropout draws on the device.
        self._device = in_use() or torch.device("cpu")
        self._host = HostGenerators()
        self._random, self._generators = self._host.states(), Generators.now(self._device)
        self._modes: list[tuple[nn.Module, bool]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]] = []
        for module in dict.fromkeys(part for model in models for part in model.modules()):
            self._modes.append((module, module.training))
            for name, buffer in module._buffers.items():
                self._buffers.append((module, name, buffer, _copy(buffer)))
        self._drawn_from = self._random, self._generators

    def begin(self, generators: Generators | None) -> None:
        """The replay begins, with the random numbers of the step if they are known."""
        if generators is not None:
            generators.put_back()
        self._drawn_from = self._host.states(), Generators.now(self._device)

    def drew(self, generators: Generators | None) -> bool:
        """Whether random numbers were drawn since then that can't be those of the step."""
        host, device = self._drawn_from
        drawn = self._host.drawn(host)
        if generators is not None:
            return bool(drawn - {HostGenerator.TORCH})
        return bool(drawn) or not device.same(Generators.now(self._device))

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the state from when this object was created."""
        self._host.put_back(self._random)
        self._generators.put_back()
        for module, training in self._modes:
            module.training = training
        for module, name, buffer, values in self._buffers:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if buffer is not None and values is not None:
                own = _own(buffer)
                # Only if changed: a write increments the version that others compare.
                if not torch.equal(own, values):
                    own.copy_(values)


def needs_peers(models: Iterable[nn.Module]) -> bool:
    """Whether a forward or backward waits for other ranks, so that none may leave it early."""
    kinds = (FSDPModule, nn.SyncBatchNorm)
    return any(
        any(isinstance(part, kinds) for part in model.modules())
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        for model in models
    )


@contextmanager
def unsynchronised(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, gradients stay on their rank.  With DDP, entering it is collective.

    What DDP would do in its next forward is done at once: buffers are broadcast from rank 0 (the
    step used these), and after the very first step buckets get their final order.
    """
    parts = list(dict.fromkeys(part for model in models for part in model.modules()))
    ddps = [part for part in parts if isinstance(part, DistributedDataParallel)]
    sharded = [part for part in parts if isinstance(part, FSDPModule)]
    before = [(ddp, ddp.require_backward_grad_sync, ddp.require_forward_param_sync) for ddp in ddps]
    for ddp in ddps:
        if ddp.reducer._rebuild_buckets():
            ddp._has_rebuilt_buckets = True
        if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            ddp._sync_buffers()  # type: ignore[no-untyped-call]
    try:
        for ddp in ddps:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
        for part in sharded:
            part.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for part in sharded:  # as ``Step`` leaves them
            part.set_requires_gradient_sync(True, recurse=False)
        for ddp, backward, forward in before:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = backward, forward


def replay(
    models: Mapping[str, nn.Module],
    batch: Batch,
    compute_loss: Callable[[Any], torch.Tensor | Loss],
    replayed: list[ReplayedMicroBatch],
    *,
    device: torch.device,
    loss_scale: float,
) -> None:
    """Recompute this rank's micro-batches, one after another, weighted as in the step.

    Each is appended to ``replayed`` when it is complete; no gradient is kept.  Raises the
    exceptions of ``compute_loss`` and of the backward.
    """
    # The number of ranks cancels out: each has an equal share of the global batch.
    weights = BatchLoss(global_batch=sum(batch.micro_sizes), ranks=1, device=device)
    lookout = NonFiniteTracer(models)
    try:
        for micro, size in zip(batch.micro_batches, batch.micro_sizes, strict=True):
            lookout.begin()
            with torch.enable_grad():
                loss = compute_loss(micro)
                weights.begin(size)
                lookout.backward(weights.weigh(loss) * loss_scale)
            if isinstance(loss, Loss):
                value, count = float(loss.sum.detach()), float(loss.count)
            else:
                value, count = float(loss.detach()), None
            del loss
            replayed.append(ReplayedMicroBatch(value, count, lookout.read()))
    finally:
        lookout.close()


def _own(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    if buffer is None or is_lazy(buffer) or buffer.is_meta or buffer.layout is not torch.strided:
        return None
    return _own(buffer).clone()


#: How bad the values of a tensor are: -inf alone may be intended, as in the mask of an attention.
_FINE, _MINUS_INFINITY, _BAD = range(3)
_DEEPEST = 8


@dataclasses.dataclass(frozen=True, slots=True)
class FirstNonFinite:
    """The findings: the module that produced the first bad value, and each gradient's norm.

    Norms are in the order in which the backward reached the parameters.
    """

    layer: str
    norms: tuple[tuple[str, float], ...]


class NonFiniteTracer:
    """Hooks on the models' modules until ``close``; ``backward`` computes gradients and keeps none.

    Modules inside code compiled by torch.compile are excluded: a hook would recompile them.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._handles: list[RemovableHandle] = []
        # By id, with the parameter itself, so that its id is not reused.
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        parameters = {id(p): p for model in models.values() for p in model.parameters()}
        for key, name in parameter_names(models).items():
            if key in parameters:
                self._names[key] = parameters[key], name
        self._paths: list[str] = []
        self._in_forward = False
        self._pending: list[tuple[int, list[torch.Tensor]]] = []
        self._passed: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
        self._norms: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for path, module in modules_of(models, compiled=False):
            self._watch(path, module)

    def begin(self) -> None:
        """A forward follows."""
        self._pending.clear()
        self._passed.clear()
        self._norms.clear()
        self._in_forward = True

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of everything that ``loss`` depends on, without keeping them.

        Not ``loss.backward()``, which would run the hooks of DDP and of optimizers that step inside
        the backward.  Reentrant checkpointing allows nothing else.
        """
        self._in_forward = False  # recomputations in the backward were observed already
        if not loss.requires_grad:
            return
        leaves, reentrant = _leaves(loss)
        if reentrant:
            leaf_by_id = {id(leaf): leaf for leaf in leaves}
            leaf_by_id |= {
                key: tensor for key, (tensor, _) in self._names.items() if tensor.requires_grad
            }
            leaves = list(leaf_by_id.values())
        if not leaves:
            return
        handles = []
        try:
            for leaf in leaves:
                handles.append(leaf.register_hook(self._gradient_of(leaf)))  # type: ignore[no-untyped-call]
                if reentrant:
                    handles.append(leaf.register_post_accumulate_grad_hook(_drop))  # type: ignore[no-untyped-call]
            if reentrant:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                torch.autograd.grad(loss, leaves, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()

    def read(self) -> FirstNonFinite:
        """The findings of the last forward and backward.  Waits for the device."""
        first = {_BAD: "", _MINUS_INFINITY: ""}
        for path, ins, outs in self._passed:
            before = max((_badness(*each.tolist()) for each in ins), default=_FINE)
            after = max((_badness(*each.tolist()) for each in outs), default=_FINE)
            if after > before and not first[after]:
                first[after] = self._paths[path] or "the model"
        norms = tuple(
            (self._name(leaf), math.hypot(*(part.item() for part in parts)))
            for leaf, parts in self._norms.values()
        )
        return FirstNonFinite(first[_BAD] or first[_MINUS_INFINITY], norms)

    def close(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, path: str, module: nn.Module) -> None:
        at = len(self._paths)
        self._paths.append(path)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if isinstance(module, FSDPModule):
                self._learn(path, module)
            if self._in_forward:
                # Now: a module may work in place.
                self._pending.append((at, _extremes(tensors_in((args, kwargs)))))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._in_forward or all(begun != at for begun, _ in self._pending):
                return
            while True:  # more than one only if an exception interrupted a forward
                begun, ins = self._pending.pop()
                if begun == at:
                    self._passed.append((at, ins, _extremes(tensors_in(output))))
                    return

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _learn(self, path: str, module: nn.Module) -> None:
        """Add the names of parameters that FSDP2 has just gathered: these are separate tensors."""
        gathered = {id(p): p for p in module.parameters()}
        for key, name in parameter_names({"": module}).items():
            if key not in self._names:
                self._names[key] = gathered[key], below(path, name)

    def _name(self, leaf: torch.Tensor) -> str:
        entry = self._names.get(id(leaf))
        return entry[1] if entry else f"a parameter of shape {tuple(leaf.shape)}"

    def _gradient_of(self, leaf: torch.Tensor) -> Any:
        def note_norm(grad: torch.Tensor) -> torch.Tensor | None:
            values = plain_values(grad)
            if values is not None and values.numel():
                norm = torch.linalg.vector_norm(values, dtype=widest_float(values.device))
                self._norms.setdefault(id(leaf), (leaf, []))[1].append(norm)
            # Replaced by something that takes no memory: nobody uses it.
            plain = type(grad) is torch.Tensor and grad.layout is torch.strided
            return grad.new_zeros(()).expand_as(grad) if plain else None

        return note_norm


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a batch, or in a module's inputs or outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > _DEEPEST:
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)


def plain_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's values of a tensor of any kind; None if they are not floating-point numbers."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    is_plain_float = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return (
        tensor if is_plain_float and tensor.layout is torch.strided and not tensor.is_meta else None
    )


def _extremes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Smallest and largest value of each tensor; both are NaN if one value is."""
    extremes = []
    with torch.no_grad():
        for tensor in tensors:
            values = plain_values(tensor)
            if values is not None and values.numel():
                extremes.append(torch.stack(torch.aminmax(values)))
    return extremes


def _badness(smallest: float, largest: float) -> int:
    if largest != largest or largest == float("inf"):  # noqa: PLR0124
        return _BAD
    return _MINUS_INFINITY if smallest == float("-inf") else _FINE


def modules_of(
    models: Mapping[str, nn.Module], *, compiled: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with names like parameters; ``compiled`` includes compiled ones."""
    visited: set[nn.Module] = set()
    for name, model in models.items():
        yield from _walk(model, name if len(models) > 1 else "", compiled, visited)


def _walk(
    module: nn.Module, path: str, compiled: bool, visited: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    is_compiled = (
        type(module).__name__ == "OptimizedModule"  # imported by name: torch._dynamo takes a second
        or module._compiled_call_impl is not None
    )
    if module in visited or (is_compiled and not compiled):
        return
    visited.add(module)
    yield path, module
    wrapped = wrapped_attribute(module)
    for name, child in module.named_children():
        yield from _walk(child, path if name == wrapped else below(path, name), compiled, visited)


def below(path: str, name: str) -> str:
    """The name of a part of the module called ``path``."""
    return f"{path}.{name}" if path else name


def _leaves(loss: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """The tensors whose gradients determine that of ``loss``; whether some of them are hidden."""
    leaves: list[torch.Tensor] = []
    reentrant = False
    todo, visited = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        reentrant = reentrant or node.name() == "CheckpointFunctionBackward"
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves.append(variable)
        todo += [function for function, _ in node.next_functions]
    return leaves, reentrant


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
