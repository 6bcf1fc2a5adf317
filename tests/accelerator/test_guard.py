"""The guard on a device: it never waits, it skips what it must, and takes no old bytes for new."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from slurm_forge.training.step.gradient_guard import apply_gradients, skips_on_device

Device = torch.device
STEPS = 1000


def _step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = net(x).square().mean()
    loss.backward()
    return loss


def test_a_thousand_guarded_steps_wait_for_nothing(sim: Device) -> None:
    net = nn.Linear(4, 1).to(sim)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    x, bad = torch.ones(8, 4, device=sim), torch.full((8, 4), math.nan, device=sim)
    before = None
    applied = 0
    torch.sim.reset_counts()
    with torch.sim.without_waiting():
        for number in range(STEPS):
            loss = _step(net, bad if number % 100 == 7 else x)
            update = apply_gradients(optimizer, max_norm=1.0, loss=loss)
            if before is not None and before.verdict.is_ready():
                applied += before.verdict.read().applied if before.verdict.known_reading else 0
            before = update
    assert torch.sim.counts().waits == 0
    assert before is not None
    assert before.verdict.read().applied
    steps = {float(state["step"].item()) for state in optimizer.state.values()}
    assert steps == {STEPS - STEPS / 100}
    assert all(p.isfinite().all().item() for p in net.parameters())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "plain": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_bad_gradient_changes_no_bit(
    device: Device, kind: str, scaled: bool, occupy: Callable[[Device], None]
) -> None:
    occupy(device)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = OPTIMIZERS[kind](net.parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0) if scaled else None
    x = torch.ones(8, 4, device=device)

    def step(x: torch.Tensor) -> bool:
        loss = net(x).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        return not apply_gradients(optimizer, max_norm=1.0, scaler=scaler).skipped()

    def bits() -> list[list[float]]:
        state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        return [t.detach().cpu().reshape(-1).tolist() for t in [*net.parameters(), *state]]

    assert step(x)
    assert skips_on_device(optimizer) is (kind != "plain")
    before = bits()
    assert not step(x * math.inf)
    assert bits() == before
    assert step(x)
    assert bits() != before
