"""A fake Slurm for tests: the state machine of slurmctld, in virtual time, without a process."""

from __future__ import annotations

from tests.fake_slurm.client import Disturbance, Network, Request
from tests.fake_slurm.clock import Timer, VirtualClock
from tests.fake_slurm.fake import FakeSlurm
from tests.fake_slurm.programs import (
    BATCH,
    STEPS,
    Program,
    Programs,
    Runs,
    Start,
    StartOver,
)
from tests.fake_slurm.spec import FakeSlurmSpec

__all__ = [
    "BATCH",
    "STEPS",
    "Disturbance",
    "FakeSlurm",
    "FakeSlurmSpec",
    "Network",
    "Program",
    "Programs",
    "Request",
    "Runs",
    "Start",
    "StartOver",
    "Timer",
    "VirtualClock",
]
