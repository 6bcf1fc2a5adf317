from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.stack_text import essence, threads, where

SITE = "/env/lib/python3.11/site-packages"
HEAD = "Thread 0x00007f1 (most recent call first)"


def dump(*stacks: list[tuple[str, int, str]], head: str = HEAD) -> str:
    return "\n".join(
        head + ":\n" + "\n".join(f'  File "{f}", line {n} in {name}' for f, n, name in stack)
        for stack in stacks
    )


CHANNEL = [("/usr/lib/python3.11/selectors.py", 468, "select"), ("/x/member.py", 20, "_read")]
SLEEP = [("/home/ann/train.py", 12, "loop"), ("/home/ann/train.py", 90, "train")]
REDUCE = [(f"{SITE}/torch/distributed/distributed_c10d.py", 2800, "all_reduce"),
          (f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper"), *SLEEP]  # fmt: skip
BACKWARD = [(f"{SITE}/torch/autograd/graph.py", 829, "_engine_run_backward"), *SLEEP]
OURS = "/x/slurm_forge"
PENDING_SAVE = f"{OURS}/checkpoint/write/pending_save.py"
WAITS = [("/usr/lib/python3.11/threading.py", 320, "wait"),
         ("/usr/lib/python3.11/concurrent/futures/_base.py", 451, "result"),
         (PENDING_SAVE, 53, "result"),
         (f"{OURS}/checkpoint/write/save.py", 8, "settle")]  # fmt: skip
WRITES = [
    (f"{OURS}/checkpoint/write/shard_writer.py", 90, "finish"),
    (PENDING_SAVE, 69, "run_to_end"),
]
EXCHANGES = [(f"{SITE}/torch/distributed/distributed_c10d.py", 1, "all_gather_object"),
             (f"{OURS}/checkpoint/write/save.py", 3, "persist"),
             (PENDING_SAVE, 69, "run_to_end")]  # fmt: skip


def test_the_main_thread_is_the_last_of_a_dump() -> None:
    found = where(dump(CHANNEL, SLEEP))
    assert (found.top, found.together) == ("loop (train.py:12)", False)


def test_a_collective_is_named() -> None:
    found = where(dump(CHANNEL, REDUCE))
    assert (found.together, found.call) == (True, "all_reduce")
    found = where(dump(BACKWARD))
    assert (found.together, found.call) == (True, "backward")


def test_below_pythons_own_wrappers() -> None:
    waits = [("/usr/lib/python3.11/threading.py", 320, "wait"), *SLEEP]
    assert where(dump(waits)).top == "wait (threading.py:320) in loop (train.py:12)"


def test_compiling_and_loading() -> None:
    deep = [("/usr/lib/python3.11/subprocess.py", 1, "wait"),
            (f"{SITE}/torch/_inductor/codecache.py", 9, "load"), *SLEEP]  # fmt: skip
    assert where(dump(deep)).compiling
    loads = [("/usr/lib/python3.11/queue.py", 1, "get"),
             (f"{OURS}/training/data/loader.py", 200, "next_step"), *SLEEP]  # fmt: skip
    assert where(dump(loads)).loading


def test_who_waits_for_its_save_is_where_the_save_is() -> None:
    own = where(dump(WRITES, CHANNEL, WAITS))
    assert own.saving and own.top == "finish (shard_writer.py:90)"
    other = where(dump(EXCHANGES, CHANNEL, WAITS))
    assert (other.together, other.call) == (True, "all_gather_object")


def test_py_spys_words() -> None:
    text = (
        "Process 12: python train.py\nPython v3.11.2 (/usr/bin/python3.11)\n\n"
        'Thread 12 (idle): "MainThread"\n'
        "    all_reduce (torch/distributed/distributed_c10d.py:28)\n"
        "    train (train.py:9)\n"
        'Thread 14 (idle): "forge-channel"\n    select (selectors.py:468)\n'
    )
    assert where(text).call == "all_reduce"
    assert threads(text)[-1][0].function == "all_reduce"


def test_the_names_of_python_3_14() -> None:
    head = "Current thread 0x00007f1 [python] (most recent call first)"
    assert where(dump(SLEEP, head=head)).top == "loop (train.py:12)"


def test_nothing_says_nothing() -> None:
    assert threads("") == ()
    assert where("no stack here\n").top == ""


NAME = st.text(string.ascii_letters + "_/.", min_size=1, max_size=30)
STACK = st.lists(st.tuples(NAME, st.integers(1, 10**6), NAME), min_size=1, max_size=60)


@given(st.lists(st.one_of(STACK, st.sampled_from([WRITES, EXCHANGES, WAITS, REDUCE])), max_size=20))
def test_the_essence_means_the_same_and_is_short(
    stacks: list[list[tuple[str, int, str]]],
) -> None:
    text = dump(*stacks)
    short = essence(text)
    assert len(short) < 40_000
    full, kept = where(text), where(short)
    assert (kept.together, kept.saving, kept.top) == (full.together, full.saving, full.top)


@given(st.text(max_size=2000))
def test_any_text_may_come(text: str) -> None:
    where(essence(text))
