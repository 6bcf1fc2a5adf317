"""What differs from launch to launch is no difference; what an error says is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.incident.incident_similarity import (
    alike,
    essence,
)
from slurm_forge.vocabulary.cause import Cause, Evidence
from tests.unit.recovery.life import incident

SAME = [
    ("object at 0x7f00aa", "object at 0x7fbbcc1"),
    ("at 2026-11-22T02:40:01.123Z it ended", "at 2026-11-23T12:00:59Z it ended"),
    ("[12:30:01] failed", "[02:03:04.56] failed"),
    ("connect to 10.1.0.7:29500 failed", "connect to 10.1.0.12:30001 failed"),
    ("connect to [fe80::1]:29500 failed", "connect to [fe80::a:2]:1 failed"),
    ("connect to localhost:29500 failed", "connect to localhost:31000 failed"),
    ("port 29500 in use", "port 31000 in use"),
    ("DataLoader worker (pid 4711) is killed", "DataLoader worker (pid 12) is killed"),
    ("DataLoader (pid(s) 4711) exited", "DataLoader (pid(s) 12) exited"),
    ("process 3 of rank 17", "process 99 of rank 1"),
    ("ranks 1, 5 and 7 are gone", "ranks 2 are gone"),
    ("local_rank: 3 on cuda:3", "local_rank: 0 on cuda:0"),
    ("no file /tmp/tmpa8fk2l_x/part-00017.bin", "no file /tmp/tmpzz0011qq/part-00002.bin"),
    ("no file tmpa8fk2l_x", "no file tmpq1w2e3r4"),
    ("in /scratch/job.123/data/7.npz", "in /scratch/job.9/data/11.npz"),
    ("timed out after 30.25 s", "timed out after 31 s"),
    ("Timeout(ms)=600000 ran for 600123 milliseconds", "Timeout(ms)=600001 ran for 7 milliseconds"),
    ("lost n1", "lost n12"),
    ("lost n1.cluster.org:29500", "lost n12:30000"),
    ("lost n1, n12, n7", "lost n12"),
    ("object 3f2b8c1d-0a1b-2c3d-4e5f-112233445566", "object 00000000-0a1b-2c3d-4e5f-aaaaaaaaaaaa"),
    ("build 1f2e3d4c5b6a", "build ab12cd34ef56"),
    ("one  line\nand another", "one line and another"),
]
OTHER = [
    ("bad sample 17", "bad sample 18"),
    ("train.py:41 in train", "train.py:42 in train"),
    ("(/home/me/train.py:41 in train)", "(/home/me/train.py:42 in train)"),
    ("(/home/me/train.py:41 in train)", "(/home/me/valid.py:41 in train)"),
    ("expected size 3, got 4", "expected size 3, got 5"),
    ("SIGSEGV", "SIGABRT"),
    ("exit 16", "exit 17"),
    ("KeyError: 'deadbeef'", "KeyError: 'feedbeef'"),
    ("ValueError: a", "TypeError: a"),
]
HOSTS = ("n1", "n12", "n7")


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_changes_from_launch_to_launch_is_no_difference(one: str, other: str) -> None:
    assert essence(one, HOSTS) == essence(other, HOSTS)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_what_an_error_says_is_one(one: str, other: str) -> None:
    assert essence(one, HOSTS) != essence(other, HOSTS)


def seen(*evidence: tuple[str, str], cause: Cause = Cause.APP_ERROR, **changes: object) -> object:
    return incident(cause, evidence=tuple(Evidence(*each) for each in evidence), **changes)


def test_the_rank_and_the_host_that_speak_are_no_difference() -> None:
    one = seen(("rank 3 on n1", "ValueError: x"), hosts=("n1",))
    other = seen(("rank 0 on gpu-b7.x", "ValueError: x"), hosts=("gpu-b7.x",))
    assert alike(one, other)  # type: ignore[arg-type]


def test_who_only_followed_counts_for_nothing_in_an_error() -> None:
    one = seen(("rank 3 on n1", "ValueError: x"), ("rank 1 on n1", "connection closed"))
    other = seen(("rank 3 on n1", "ValueError: x"), ("rank 0 on n1", "peer gone"))
    assert alike(one, other)  # type: ignore[arg-type]


def test_of_a_crash_one_may_have_been_seen_better_but_not_otherwise() -> None:
    first = ("rank 3 on n1", "SIGSEGV")
    poor = seen(first, cause=Cause.CRASH)
    well = seen(first, ("dump", "forward at model.py:7"), cause=Cause.CRASH)
    otherwise = seen(first, ("dump", "backward at model.py:9"), cause=Cause.CRASH)
    assert alike(poor, well) and alike(well, poor)  # type: ignore[arg-type]
    assert not alike(well, otherwise)  # type: ignore[arg-type]


def test_without_evidence_or_at_another_step_nothing_is_alike() -> None:
    bare = seen()
    assert not alike(bare, bare)  # type: ignore[arg-type]
    one, other = seen(("a", "b"), step=1), seen(("a", "b"), step=2)
    assert not alike(one, other)  # type: ignore[arg-type]


@given(text=st.text(max_size=200), hosts=st.lists(st.text(max_size=9), max_size=3))
def test_any_text_has_an_essence_that_is_stable(text: str, hosts: list[str]) -> None:
    once = essence(text, hosts)
    assert essence(text, hosts) == once
    assert len(once) <= len(text) + 1


@given(
    rank=st.integers(0, 9999),
    pid=st.integers(1, 2**22),
    address=st.integers(1, 2**48),
    port=st.integers(1, 65535),
    seconds=st.floats(0, 1e5, allow_nan=False),
    host=st.from_regex(r"[a-z]{1,6}-?[0-9]{1,4}", fullmatch=True),
)
def test_any_rank_process_address_port_time_and_host(
    rank: int, pid: int, address: int, port: int, seconds: float, host: str
) -> None:
    def told(rank: int, pid: int, address: int, port: int, seconds: float, host: str) -> str:
        text = (
            f"rank {rank} (pid {pid}) on {host}: <Store object at {address:#x}> of {host}:{port} "
            f"did not answer within {seconds:.3f} s (store.py:88 in get)"
        )
        return essence(text, (host, "n1"))

    assert told(rank, pid, address, port, seconds, host) == told(0, 1, 1, 1, 1.0, "n1")
