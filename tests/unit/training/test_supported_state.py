"""What can't be saved or resumed exactly is refused before the first step, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

from slurm_forge.errors import UnsupportedError
from slurm_forge.training.checkpointing.supported_state import (
    OptimizerWatch,
    require_known_optimizer,
    require_supported,
    require_supported_wrapper,
)
from slurm_forge.training.core.run_state import Registry


def registry(**objects: Any) -> Registry:
    made = Registry()
    for name, value in objects.items():
        made.add(name, value)
    return made


def refused(**objects: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        require_supported(registry(**objects))
    assert caught.value.next_step
    return caught.value


class Subclass(torch.Tensor):
    """A tensor of somebody's own."""


def with_parameter(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter("odd", nn.Parameter(value, requires_grad=value.is_floating_point()))
    return model


def test_what_is_ordinary_is_accepted() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.BatchNorm1d(2), shared)
    model.register_buffer("scratch", torch.empty(2, device="meta"), persistent=False)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    require_supported(registry(model=model, again=shared, frozen=frozen, optimizer=optimizer))
    require_supported(Registry())


def test_a_parameter_without_values_is_refused() -> None:
    error = refused(net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, device="meta")))
    assert "parameter 1.weight of model 'net' (shape [3, 2], float32 on meta)" in error.message
    assert "no values" in error.message


def test_a_lazy_module_is_refused_until_it_was_called() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    assert "0.weight of model 'net' (not initialised)" in refused(net=model).message
    model(torch.zeros(1, 3))
    require_supported(registry(net=model))


def test_a_buffer_that_is_saved_counts_too() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].register_buffer("odd", torch.zeros(3).to_sparse())
    assert "buffer 0.odd of model 'net'" in refused(net=model).message


def test_quantized_nested_and_foreign_tensors_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("q", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    assert "buffer q" in refused(net=model).message
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    assert "parameter odd" in refused(net=with_parameter(nested)).message
    foreign = torch.ones(2).as_subclass(Subclass)
    model = nn.Linear(2, 2)
    model.register_buffer("odd", foreign)
    assert "Subclass" in refused(net=model).message


class Packed(nn.Module):
    """Holds what can't be saved, and saves what it is made from."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ones(2).to_sparse())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}plain"] = self.packed.to_dense()


def test_what_a_module_makes_of_its_state_is_what_counts() -> None:
    require_supported(registry(net=nn.Sequential(Packed())))


@pytest.fixture
def mesh(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_sum_that_is_not_reduced_is_refused_with_its_placement(mesh: Any) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    error = refused(net=model)
    assert "parameter weight of model 'net'" in error.message
    assert "Partial" in error.message or "(P" in error.message, error.message
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
    require_supported(registry(net=model))


def test_fsdp1_is_refused_when_it_is_registered(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"'0' of model 'net' is wrapped by Fully.*FSDP1"):
        require_supported_wrapper("net", model)
    require_supported_wrapper("net", nn.Linear(2, 2))
    require_supported_wrapper("optimizer", object())


def test_an_optimizer_without_its_model_is_refused() -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    both = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
    error = refused(generator=generator, optimizer=both)
    assert "optimizer 'optimizer' trains a parameter that belongs to no registered model" in (
        error.message
    )
    assert "number 2 of group 0, shape [1, 2], float32" in error.message
    require_supported(registry(generator=generator, critic=critic, optimizer=both))


def test_an_optimizer_whose_state_is_divided_over_the_ranks_is_refused(mesh: Any) -> None:
    model = nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    error = refused(model=model, zero=zero)
    assert "'zero' is a ZeroRedundancyOptimizer" in error.message
    assert "fully_shard" in error.next_step


def test_a_model_without_an_optimizer_is_accepted() -> None:
    require_supported(registry(model=nn.Linear(2, 2)))


class Wrapper:
    """An optimizer of a library's own around another."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_an_optimizer_that_nobody_saves_is_not_stepped() -> None:
    model = nn.Linear(2, 2)
    registered, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    known = registry(model=model, optimizer=registered)
    require_known_optimizer(registered, known)
    with pytest.raises(UnsupportedError, match=r"registered: 'optimizer'.*lost at every resume"):
        require_known_optimizer(other, known)
    require_known_optimizer(other, registry(model=model, wrapped=Wrapper(other)))


class Steps:
    """Counts the steps of a run, as its progress does."""

    counted = 0


def watch(registered: Registry) -> tuple[OptimizerWatch, Steps]:
    steps = Steps()
    return OptimizerWatch(registered, lambda: steps.counted), steps


def test_an_optimizer_of_registered_parameters_that_is_not_registered_is_refused() -> None:
    model, own, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    # It has the optimizer, and leaves it out of its state.
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    of_own = torch.optim.SGD(own.parameters())
    looking, steps = watch(registry(model=model, optimizer=of_own, schedule=schedule))
    looking.begin()
    try:
        optimizer.step()
        torch.optim.Adam(other.parameters()).step()
        steps.counted = 1
        torch.optim.Adam(model.parameters()).step()  # one that lives for this step only
        torch.optim.Adam(other.parameters()).step()
        with pytest.raises(UnsupportedError, match=r"Adam.*steps weight of model 'model'") as found:
            optimizer.step()
        assert "run.register(model=…, optimizer=…)" in found.value.next_step
    finally:
        looking.end()
    optimizer.step()


def test_a_part_of_what_is_registered_is_no_stranger() -> None:
    model = nn.Linear(2, 2)
    inner, shared = (torch.optim.Adam(model.parameters()) for _ in range(2))
    outer = torch.optim.Adam(model.parameters())
    outer.state = shared.state
    wrapped = torch.optim.SGD(model.parameters())
    listed = Wrapper(Listed([wrapped]))  # type: ignore[arg-type]
    looking, steps = watch(registry(model=model, outer=outer, listed=listed))
    later, _ = watch(registry(model=model, inner=inner))
    looking.begin()
    try:
        for steps.counted in range(3):
            shared.step()
            wrapped.step()
        later.begin()  # of the next run in this process
        for steps.counted in range(3):
            inner.step()
    finally:
        later.end()


class Listed(Wrapper):
    """Keeps its optimizers in a list."""

    def __init__(self, several: list[Any]) -> None:
        super().__init__(several[0])
        self.several = several
        del self.inner


def test_a_compiled_step_is_not_broken_by_the_watch() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looking, _ = watch(registry(model=model, optimizer=optimizer))
    looking.begin()
    try:
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.detach().clone()
        torch.compile(optimizer.step, backend="eager")()
        assert not torch.equal(before, model.weight)
    finally:
        looking.end()
