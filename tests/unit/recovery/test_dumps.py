"""What dying processes leave behind: real ones, of this Python, and recorded texts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.incident.crash_dumps import (
    Traceback,
    find_dump,
    find_tracebacks,
)


def last_traceback(text: str) -> Traceback | None:
    return next(find_tracebacks(text), None)


PROGRAM = """\
import ctypes, faulthandler, os, sys, threading, time

faulthandler.enable()
threading.Thread(target=lambda: time.sleep(60), daemon=True).start()


def step(kind):
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "abort":
        os.abort()
    if kind == "raise":
        json_error()


def json_error():
    import json

    json.loads("{")


def train():
    step(sys.argv[1])


train()
"""


def output_of(folder: Path, kind: str) -> str:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), kind],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    return "loss 0.3\n" + done.stderr


def test_a_segmentation_fault_of_this_python(tmp_path: Path) -> None:
    dump = find_dump(output_of(tmp_path, "segfault"))
    assert dump is not None
    assert (dump.error, dump.signal) == ("Fatal Python error: Segmentation fault", "SIGSEGV")
    # The thread that died, not the one that slept; and the user's frames, not those of ctypes.
    assert dump.frames == ("train.py:9 in step", "train.py:23 in train", "train.py:26 in <module>")
    assert dump.innermost.startswith("__init__.py:")
    assert dump.innermost.endswith(" in string_at")


def test_an_abort_of_this_python(tmp_path: Path) -> None:
    dump = find_dump(output_of(tmp_path, "abort"))
    assert dump is not None
    assert (dump.error, dump.signal) == ("Fatal Python error: Aborted", "SIGABRT")
    assert dump.frames[0] == dump.innermost == "train.py:11 in step"


def test_an_exception_of_this_python(tmp_path: Path) -> None:
    text = output_of(tmp_path, "raise")
    assert find_dump(text) is None
    found = last_traceback(text)
    assert found is not None
    assert found.error.startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert found.frame == "train.py:19 in json_error"


@pytest.mark.parametrize("prefix", ["2: ", " 12: ", "[rank2]: "])
def test_what_srun_and_torch_put_in_front(tmp_path: Path, prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in output_of(tmp_path, "raise").splitlines())
    found = last_traceback(text)
    assert found is not None
    assert found.error.startswith("json.decoder.JSONDecodeError")
    assert found.frame == "train.py:19 in json_error"


def test_the_words_of_a_c_plus_plus_exception_and_the_frames_of_python() -> None:
    text = (
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: device-side assert triggered\n"
        "Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43\n"
        "Fatal Python error: Aborted\n\n"
        "Current thread 0x00007f0e (most recent call first):\n"
        '  File "/v/lib/python3.11/site-packages/torch/nn/functional.py", line 2345 in embedding\n'
        '  File "/home/u/gpt.py", line 7 in forward\n'
        '  File "/home/u/gpt.py", line 7 in forward\n\n'
        "Extension modules: numpy\n"
    )
    dump = find_dump(text)
    assert dump is not None
    assert dump.error == "c10::Error: CUDA error: device-side assert triggered"
    assert dump.signal == "SIGABRT"
    assert dump.frames == ("gpt.py:7 in forward",)
    assert dump.innermost == "functional.py:2345 in embedding"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("terminate called without an active exception", ""),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "std::bad_alloc"),
        (
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no\n",
            "std::runtime_error: no",
        ),
        ("train: a.cc:3: void f(): Assertion `x > 0' failed.", ""),
        ("free(): invalid pointer", ""),
        ("malloc(): unaligned tcache chunk detected", ""),
        ("double free or corruption (!prev)", "double free or corruption"),
        ("*** stack smashing detected ***: terminated", "*** stack smashing detected ***"),
        ("F0000 00:00:17 x.cc:7] Check failed: a == b", "Check failed: a == b"),
        ("pure virtual method called", ""),
    ],
)
def test_aborts_without_the_fault_handler(text: str, error: str) -> None:
    dump = find_dump(f"loss 1\n{text}\n")
    assert dump is not None
    assert dump.signal == "SIGABRT"
    assert dump.error == (error or text.removesuffix("."))
    assert dump.frames == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "free() the memory",
        "Assertion of faith",
        "AssertionError: x failed",
        "the program was Aborted",
        "Thread 0x00007f (most recent call first):\n  File \"a.py\", line 1 in f\n",
    ],
)  # fmt: skip
def test_what_is_no_crash(text: str) -> None:
    assert find_dump(text) is None
    assert last_traceback(text) is None


def test_a_crash_before_it_is_another_one() -> None:
    text = (
        "free(): invalid pointer\n"
        "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/u/old.py", line 1 in f\n\n'
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x1 [MainThread] (most recent call first):\n"
        '  File "/u/new.py", line 2 in g\n'
    )
    dump = find_dump(text)
    assert dump is not None
    assert (dump.error, dump.frames) == (
        "Fatal Python error: Segmentation fault",
        ("new.py:2 in g",),
    )


def test_the_words_of_a_crash_before_it_are_not_taken_for_its_own() -> None:
    crash = (
        "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/u/a.py", line 1 in f\n\n'
    )
    dump = find_dump(f"free(): invalid pointer\n{crash}{crash}")
    assert dump is not None
    assert dump.error == "Fatal Python error: Aborted"


def test_a_library_s_frames_where_there_are_no_others() -> None:
    text = (
        "Fatal Python error: Bus error\n\nThread 0x1 (most recent call first):\n"
        '  File "/v/site-packages/torch/a.py", line 2 in g\n'
        '  File "/v/site-packages/slurm_forge/training/rank/main.py", line 3 in main\n'
    )
    dump = find_dump(text)
    assert dump is not None
    assert (dump.signal, dump.frames) == ("SIGBUS", ("a.py:2 in g", "main.py:3 in main"))


def test_a_traceback_that_is_cut_off_says_nothing() -> None:
    assert (
        last_traceback('Traceback (most recent call last):\n  File "a.py", line 1, in f\n') is None
    )


def test_the_last_traceback_of_a_chain() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/u/a.py", line 1, in f\n    x\n    ^\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/u/a.py", line 3, in g\n    y\nslurm_forge.errors.ForgeError: no\n'
    )
    found = last_traceback(text)
    assert found is not None
    assert (found.error, found.frame) == ("slurm_forge.errors.ForgeError: no", "a.py:3 in g")


def test_all_tracebacks_from_the_last_one_backwards() -> None:
    one = 'Traceback (most recent call last):\n  File "/u/a.py", line 1, in f\n    x\nKeyError: 1\n'
    two = one.replace("KeyError: 1", "OSError: no")
    text = f"Exception in thread Thread-1 (f):\n{one}step 3\n{two}bye\n"
    last, first = find_tracebacks(text)
    assert (last.error, first.error) == ("OSError: no", "KeyError: 1")
    assert (last.in_passing, first.in_passing) == (False, True)
    assert text[last.at : last.end] == two.rstrip("\n")
    assert text[first.end : last.at] == "\nstep 3\n"
    assert last.innermost == "/u/a.py"


def test_where_a_crash_begins() -> None:
    text = "step 3\nfree(): invalid pointer\nFatal Python error: Aborted\n"
    dump = find_dump(text)
    assert dump is not None
    assert text[dump.at :].startswith("free()")


PIECES = st.sampled_from(
    ["Fatal Python error: ", "Aborted", "\n", "Current thread 0x1 (most recent call first):\n",
     '  File "a.py", line 3 in f\n', "Traceback (most recent call last):", "what(): ", "E: x",
     "terminate called after throwing an instance of '", "'", ": Assertion `", "' failed", "\r"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=300), st.lists(PIECES, max_size=40).map("".join)))
def test_any_text_is_read(text: str) -> None:
    dump = find_dump(text)
    assert dump is None or (dump.signal and len(dump.error) <= 300 and len(dump.frames) <= 8)
    found = last_traceback(text)
    assert found is None or found.error
    for each in find_tracebacks(text):
        assert 0 <= each.at < each.end <= len(text)


@pytest.mark.parametrize(
    "piece",
    ["a", ": Assertion `", "Fatal Python error: ", '  File "a.py", line 3 in f\n', "free(): ",
     "Traceback (most recent call last):\n", "terminate called after throwing an instance of 'x'\n"]
)  # fmt: skip
def test_a_megabyte_of_nonsense_is_read_in_no_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    find_dump(text)
    last_traceback(text)
    list(find_tracebacks(text))
    assert time.process_time() - began < 4
