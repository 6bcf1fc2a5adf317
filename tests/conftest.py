"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal

from hypothesis import settings

# A property is about values, not about time: a busy machine must not make one fail.  What finds
# something new looks for long: scripts/test --all has it look ten times as long.
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=50)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=500)
settings.load_profile("ci")

# No test strikes nodes of the person who runs it, nor leaves out what that person's runs have.
os.environ["SLURM_FORGE_NODES"] = "off"
# Nor is anything of that person's settings what is tested.
os.environ["XDG_CONFIG_HOME"] = "/nowhere/settings"

# A shell that starts the tests in the background has SIGINT ignored, and so would every program
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported and collected lives until the end: no collection has to look at it."""
    gc.collect()
    gc.freeze()
