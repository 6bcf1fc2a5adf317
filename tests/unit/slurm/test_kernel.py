"""Counters of the kernel as different machines show them, and what they mean."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from slurm_forge.slurm.kernel import (
    OomKills,
    available_memory,
    killed_since,
    memory_groups,
    parse_counters,
    read_memory_limit,
    read_oom_kills,
)

# Seen in a step of Slurm 22.05 with cgroup/v1, of a newer one with cgroup/v2, and in a container.
V1 = "12:pids:/\n4:memory:/slurm_n1/uid_0/job_2/step_0/task_0\n0::/\n"
V2 = "0::/system.slice/slurmstepd.scope/job_2/step_0/user/task_0\n"
OUTSIDE = "0::/../../other\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_memory_group_of_a_step_is_found_in_both_versions() -> None:
    v1 = PurePosixPath("sys/fs/cgroup/memory/slurm_n1/uid_0/job_2/step_0/task_0")
    assert memory_groups(V1)[0] == v1
    v2 = PurePosixPath("sys/fs/cgroup/system.slice/slurmstepd.scope/job_2/step_0/user/task_0")
    assert memory_groups(V2)[0] == v2
    assert all(".." not in group.parts for group in memory_groups(OUTSIDE))
    assert memory_groups("") == ()


def test_the_memory_that_is_left_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    text = "MemTotal: 3 kB\nMemAvailable:   2048 kB\n"
    assert available_memory(machine(tmp_path / "a", V2, {"proc/meminfo": text})) == 2048 * 1024
    assert available_memory(machine(tmp_path / "b", V2, {"proc/meminfo": "nothing"})) is None
    assert available_memory(tmp_path / "c") is None


def test_version_1_counts_kills_beside_the_oom_switch(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/slurm_n1/uid_0/job_2/step_0/task_0"
    files = {
        f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        f"{group}/memory.failcnt": "77\n",
        f"{group}/memory.limit_in_bytes": "524288000\n",
        f"{group}/memory.usage_in_bytes": "1048576\n",
        "proc/vmstat": "nr_free_pages 1\noom_kill 8\n",
    }
    found = read_oom_kills(machine(tmp_path, V1, files))
    assert (found.group, found.machine, found.at_limit) == (3, 8, 77)
    assert found.source == f"/{group}/memory.oom_control"
    assert read_memory_limit(tmp_path) == (524288000, 1048576)


def test_version_2_and_a_container_that_sees_itself_as_the_root(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "4096\n",
    }
    found = read_oom_kills(machine(tmp_path, V2, files))
    assert (found.group, found.source) == (1, "/sys/fs/cgroup/memory.events")
    assert read_memory_limit(tmp_path) == (None, 4096)


@pytest.mark.parametrize(
    ("cgroup", "step", "limit", "used", "none"),
    [
        (V1, "sys/fs/cgroup/memory/slurm_n1/uid_0/job_2/step_0",
         "memory.limit_in_bytes", "memory.usage_in_bytes", "9223372036854771712\n"),
        (V2, "sys/fs/cgroup/system.slice/slurmstepd.scope/job_2/step_0",
         "memory.max", "memory.current", "max\n"),
    ],
)  # fmt: skip
def test_a_limit_of_the_step_is_one_of_its_tasks(
    tmp_path: Path, cgroup: str, step: str, limit: str, used: str, none: str
) -> None:
    task = str(memory_groups(cgroup)[0])
    job = step.rpartition("/")[0]
    files = {
        f"{task}/{limit}": none,
        f"{task}/{used}": "1048576\n",
        f"{step}/{limit}": "1572864000\n",
        f"{step}/{used}": "2097152\n",
        f"{job}/{limit}": "3145728000\n",
        f"{job}/{used}": "4194304\n",
    }
    assert read_memory_limit(machine(tmp_path, cgroup, files)) == (1572864000, 2097152)


def test_no_limit_in_version_1_is_a_number_that_nobody_has(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert read_memory_limit(machine(tmp_path, "4:memory:/\n", files)) == (None, None)


def test_a_machine_that_shows_nothing_says_nothing(tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path) == OomKills()
    assert read_memory_limit(tmp_path) == (None, None)
    assert killed_since(OomKills(), OomKills()) is None
    assert parse_counters("a\nb x\noom_kill\n\nc 1") == {"c": 1}


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (OomKills(group=0, machine=7), OomKills(group=1, machine=8, source="/g"), "0 to 1 in /g"),
        # Another job's process, on the same node.
        (OomKills(group=0, machine=7), OomKills(group=0, machine=8), None),
        (OomKills(machine=7), OomKills(machine=8), "7 to 8 in /proc/vmstat"),
        (OomKills(machine=7, at_limit=1), OomKills(machine=7, at_limit=9), None),
        (OomKills(at_limit=1), OomKills(at_limit=9), "failcnt from 1 to 9"),
        (OomKills(group=2), OomKills(), None),
    ],
)
def test_what_a_rise_means(before: OomKills, now: OomKills, says: str | None) -> None:
    told = killed_since(before, now)
    assert told is None if says is None else told is not None and says in told
