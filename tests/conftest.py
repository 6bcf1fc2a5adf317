"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# A property is about values, not about time: a busy machine must not make one fail.
settings.register_profile("forge", deadline=None, print_blob=True)
settings.load_profile("forge")

# No test strikes nodes of the person who runs it, nor leaves out what that person's runs have.
os.environ["SLURM_FORGE_NODES"] = "off"
