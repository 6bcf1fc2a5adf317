"""What an agent has imported can be forked: no thread but one, no GPU, all cores for the worker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from slurm_forge.training.rank.preload import why_not_forkable

_ASK = """
import ctypes, os, sys
from slurm_forge.training.rank import preload as p
assert p.preload(dict(os.environ)) == "", "something could not be imported"
assert p.why_not_forkable() == "", p.why_not_forkable()
needed = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "slurm_forge.training.loop.run")
for name in (*needed, "torch._dynamo"):
    assert name in sys.modules, name
pid = os.fork()
if pid == 0:
    p.give_threads_back({"OMP_NUM_THREADS": "3"})
    asked = 0
    for path in p._loaded("openblas"):
        for name in p._SETTERS:
            getter = getattr(ctypes.CDLL(path), name.replace("_set_", "_get_"), None)
            if getter is not None:
                asked, got = asked + 1, getter()
                assert got == 3, (path, name, got)
    import numpy
    big = numpy.ones((600, 600))
    assert (big @ big)[0, 0] == 600
    import torch
    assert (torch.ones(600, 600) @ torch.ones(600, 600))[0, 0] == 600
    os._exit(10 + bool(asked))
_, status = os.waitpid(pid, 0)
sys.exit(0 if os.waitstatus_to_exitcode(status) in (10, 11) else 1)
"""


def test_everything_that_a_rank_needs_leaves_one_thread() -> None:
    limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environ = {name: value for name, value in os.environ.items() if name not in limits}
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_process_with_threads_is_not_forked() -> None:
    let_go = threading.Event()
    other = threading.Thread(target=let_go.wait)
    other.start()
    try:
        assert "threads are left" in why_not_forkable()
    finally:
        let_go.set()
        other.join()


_JOINED = """
import threading
from slurm_forge.training.rank.preload import why_not_forkable
for _ in range(50):
    other = threading.Thread(target=int)
    other.start()
    other.join()
    assert why_not_forkable() == "", why_not_forkable()
"""


def test_a_thread_that_was_just_joined_is_none() -> None:
    """It is there for a moment longer: every third time, for who looks at once."""
    # A process of its own: the one of the tests may have threads that serve pytest.
    subprocess.run([sys.executable, "-c", _JOINED], timeout=120, check=True)
