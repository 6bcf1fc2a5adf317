"""A program's own last words behind those of what started it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.incident.last_lines import exit_code_of_worker, last_lines

#: torchrun of torch 2.13 with two workers, the second of which calls sys.exit(7).
TORCHRUN = """\
W1124 19:53:10.309000 24968 torch/distributed/run.py:874] *****************************************
W1124 19:53:10.309000 24968 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment \
variable for each process to be 1 in default
loading data 1
no tokens left in shard 3
W1124 19:53:11.030000 24968 torch/distributed/elastic/multiprocessing/api.py:1028] Sending \
process 25123 closing signal SIGTERM
E1124 19:53:11.057000 24968 torch/distributed/elastic/multiprocessing/api.py:1002] failed \
(exitcode: 7) local_rank: 1 (pid: 25124) of binary: /env/bin/python
Traceback (most recent call last):
  File "/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/env/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in x
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-24_19:53:11
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 25123)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 25123
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-24_19:53:11
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 7 (pid: 25124)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
SRUN = """\
opening shard 4
checksum mismatch in shard 4
srun: error: node1: task 3: Exited with exit code 7
srun: Terminating StepId=31.0
slurmstepd: error: *** STEP 31.0 ON node1 CANCELLED AT 2026-11-24T19:53:11 ***
srun: error: node1: tasks 0-2: Terminated
"""


def test_of_torchrun() -> None:
    assert last_lines(TORCHRUN) == ("loading data 1", "no tokens left in shard 3")
    assert exit_code_of_worker(TORCHRUN) == " (torchrun; rank 1: 7)"


def test_of_srun() -> None:
    assert last_lines(SRUN) == ("opening shard 4", "checksum mismatch in shard 4")
    assert exit_code_of_worker(SRUN) == ""


def test_of_srun_around_torchrun() -> None:
    assert last_lines(TORCHRUN + SRUN[SRUN.index("srun:") :], 1) == ("no tokens left in shard 3",)


def test_of_a_progress_bar_the_last_state_in_plain_text() -> None:
    bar = "\x1b[32m 10%|# | 1/10\x1b[0m\r\x1b[32m 90%|#########| 9/10\x1b[0m\r"
    assert last_lines(f"starting\n{bar}\n\nno disk\n") == (
        "90%|#########| 9/10",
        "no disk",
    )


@given(
    st.lists(st.one_of(st.text(max_size=50), st.sampled_from(TORCHRUN.split("\n")))),
    st.integers(1, 4),
)
def test_any_text_gives_whole_short_lines(lines: list[str], most: int) -> None:
    found = last_lines("\n".join(lines), most)
    assert len(found) <= most
    assert all(line and line == line.strip() and len(line) <= 300 for line in found)
    assert exit_code_of_worker("\n".join(lines)) in (
        "",
        *(f" (torchrun; rank {rank}: {code})" for rank in ("0", "1", "?") for code in (7, -15)),
    )
