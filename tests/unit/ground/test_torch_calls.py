"""Everything the package calls in torch fits the torch that is installed.

``scripts/compat-matrix`` repeats it on each version from 2.6 on.
"""

from __future__ import annotations

import pytest

from tests.compat.binding import has_attribute, survey
from tests.compat.declared import ASKED_FOR, GUARDED, NOT_TORCHS, PRIVATE_OWNERS
from tests.compat.signatures import Fit, judge
from tests.compat.torch_calls import (
    PACKAGE,
    asked_names,
    private_uses,
    uses_in,
    uses_of_package,
)


def test_everything_called_in_torch_fits_the_installed_one() -> None:
    found = survey()
    assert found.misfits == ()
    assert found.bound > 250, "the collector no longer sees the calls"


def test_private_attributes_have_an_owner_to_be_looked_for_in() -> None:
    unknown = {use for use in private_uses() if use.attribute not in PRIVATE_OWNERS}
    assert {use.attribute for use in unknown} == NOT_TORCHS, "declare them in tests/compat"


def test_what_is_asked_for_before_it_is_called_is_declared() -> None:
    declared = {use.name.rpartition(".")[2] for use in uses_in(ASKED_FOR)}
    assert asked_names((PACKAGE / "device/memory.py").read_text()) <= declared


def test_a_guard_is_for_something_that_is_used() -> None:
    uses = uses_of_package()
    assert set(GUARDED) <= {use.name for use in uses} | {str(use) for use in uses}


@pytest.mark.parametrize(
    ("call", "fit"),
    [
        ("dist.all_reduce(tensor, group=None, async_op=True)", Fit.BOUND),
        ("dist.all_reduce(tensor, the_group=None)", Fit.REFUSED),
        ("dist.all_reduce()", Fit.REFUSED),
        ("dist.all_reduce(tensor, **options)", Fit.BOUND),
        ("dist.no_such_function(tensor)", Fit.MISSING),
        ("TCPStore('host', 0, 1, is_master=True, master_listen_fd=3)", Fit.BOUND),
        ("TCPStore('host', 0, 1, is_the_master=True)", Fit.REFUSED),
        ("HashStore('file')", Fit.REFUSED),
        ("HashStore()", Fit.BOUND),
        ("torch.no_such_module.function()", Fit.MISSING),
        ("torch_optimizer.register_optimizer_step_post_hook(hook)", Fit.BOUND),
    ],
)
def test_a_call_that_would_fail_is_found(call: str, fit: Fit) -> None:
    (use,) = (each for each in uses_in(f"{_IMPORTS}\n{call}") if each.positional is not None)
    assert judge(use).fit is fit


_IMPORTS = """
import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch._C._distributed_c10d import HashStore, TCPStore
"""


@pytest.mark.parametrize(
    "code",
    [
        "module_of(device).set_device(device)",
        "module = module_of(device)\n    module.set_device(0)",
    ],
)
def test_calls_of_a_device_module_are_seen(code: str) -> None:
    text = f"import torch\ndef f():\n    {code}\n"
    assert "device.set_device(…)" in [str(use) for use in uses_in(text)]


@pytest.mark.parametrize(
    ("owner", "attribute", "there"),
    [
        ("torch.nn.Module", "_buffers", True),
        ("torch.amp.grad_scaler.GradScaler", "_per_optimizer_states", True),
        ("torch.amp.grad_scaler.GradScaler", "_per_optimiser_states", False),
        ("torch.no_such.Class", "_buffers", False),
    ],
)
def test_private_attributes_are_looked_for(owner: str, attribute: str, there: bool) -> None:
    assert has_attribute(owner, attribute) is there
