"""Quotas, as the tools of file systems print them (forms of their man pages)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.slurm.process import Completed
from slurm_forge.store.mounts import Mount
from slurm_forge.store.quota import Quota, ask_quota, parse_mmlsquota, parse_quota

LUSTRE = """\
Disk quotas for usr ada (uid 1000):
      Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
        /scratch  1048576* 1000000 2000000 6d23h12m 900000  0  1000000       -
uid 1000 is using default block quota setting
"""
LONG_NAME = """\
Disk quotas for usr ada (uid 1000):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/lustre/very/long/name
                [2048]       0       0       -      12       0       0       -
"""
NFS = """\
Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nas:/home        4096    8192   10240       0     100       0       0       0
"""
NFS_WITHOUT_GRACE = """\
Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nas:/home        4096    8192   10240             100     200     300
"""
GPFS = """\
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:
mmlsquota::0:1:::fs%2Fone:USR:1000:ada:512:1024:2048:0:none:7:10:20:0:none::
mmlsquota::0:1:::fs%2Fone:GRP:100:lab:1:2:3:0:none:7:10:20:0:none::
"""


def test_lustre() -> None:
    (found,) = parse_quota(LUSTRE)
    assert found == Quota(
        filesystem="/scratch",
        used=1 << 30,
        soft=1_000_000 << 10,
        hard=2_000_000 << 10,
        files=900_000,
        files_hard=1_000_000,
    )
    assert found.left == 0, "beyond the soft limit"
    assert found.files_left == 100_000


def test_a_long_name_and_no_limits() -> None:
    (found,) = parse_quota(LONG_NAME)
    assert found.filesystem == "/lustre/very/long/name" and found.used == 2 << 20
    assert found.left is None and found.files == 12 and found.files_left is None


@pytest.mark.parametrize(("text", "files"), [(NFS, None), (NFS_WITHOUT_GRACE, 200)])
def test_nfs(text: str, files: int | None) -> None:
    (found,) = parse_quota(text)
    assert found.left == 4 << 20 and found.files == 100 and found.files_soft == files


def test_gpfs() -> None:
    (found,) = parse_mmlsquota(GPFS)
    assert found.filesystem == "fs/one" and found.left == 512 << 10 and found.files_left == 3


@pytest.mark.parametrize("text", ["", "Disk quotas for user ada (uid 1): none\n", "no quota here"])
def test_no_quota_is_none(text: str) -> None:
    assert parse_quota(text) == parse_mmlsquota(text) == ()


@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    for quota in (*parse_quota(text), *parse_mmlsquota(text)):
        assert quota.used >= 0 and (quota.left is None or quota.left >= 0)


class Pretend:
    def __init__(self, done: Completed | OSError) -> None:
        self.done, self.asked = done, []  # type: ignore[var-annotated]

    def __call__(
        self, argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]
    ) -> Completed:
        self.asked.append(tuple(argv))
        if isinstance(self.done, OSError):
            raise self.done
        return self.done


SCRATCH = Mount("/scratch", "lustre", "x:/scratch")


def found_at(name: str) -> str:
    return f"/usr/bin/{name}"


def test_what_is_asked_and_that_over_quota_is_an_answer() -> None:
    runner = Pretend(Completed(("lfs",), 1, LUSTRE, ""))
    answer = ask_quota(SCRATCH, "ada", runner, {}, found_at)
    assert runner.asked == [("/usr/bin/lfs", "quota", "-u", "ada", "/scratch")]
    assert answer is not None and len(answer.quotas) == 1 and answer.problem == ""


@pytest.mark.parametrize(
    ("done", "problem"),
    [
        (Completed(("lfs",), None, "", ""), "no answer within 5 s"),
        (Completed(("lfs",), 2, "", "Permission denied\n"), "Permission denied"),
        (OSError(13, "Permission denied"), "Permission denied"),
    ],
)
def test_what_fails_is_told(done: Completed | OSError, problem: str) -> None:
    answer = ask_quota(SCRATCH, "ada", Pretend(done), {}, found_at)
    assert answer is not None and answer.problem == problem and answer.quotas == ()


def test_a_tool_that_is_missing_or_a_name_that_is_no_name() -> None:
    def nowhere(name: str) -> None:
        return None

    runner = Pretend(Completed((), 0, "", ""))
    answer = ask_quota(SCRATCH, "ada", runner, {}, nowhere)
    assert answer is not None and answer.problem == "lfs is not installed here"
    assert ask_quota(Mount("/", "ext4", "/dev/sda1"), "ada", runner, {}, nowhere) is None
    for name in ("-x", "a b", ""):
        assert ask_quota(SCRATCH, name, runner, {}, found_at) is None
    assert ask_quota(None, "ada", runner, {}, found_at) is None
    assert runner.asked == []


OF_GPFS = Mount("/p", "gpfs", "fs1")
OF_GROUPS = (
    "mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:\n"
    "mmlsquota::0:1:::fs1:GRP:0:lab:99:\n"
)


@pytest.mark.parametrize(
    ("mount", "text", "problem"),
    [
        (SCRATCH, "Disk quotas for usr ada (uid 1):\n", ""),
        (Mount("/h", "nfs4", "x"), "Disk quotas for user ada (uid 1): none\n", ""),
        (OF_GPFS, OF_GROUPS, ""),
        (SCRATCH, " /scratch 1.5T 2T 2T - 5 0 0 -\n", "not understood: /scratch 1.5T 2T 2T"),
        (SCRATCH, " /scratch -5 100 200 - 5 0 0 -\n", "not understood"),
        (SCRATCH, "Some errors happened when getting quota info.\n", "Some errors happened"),
        (OF_GPFS, OF_GROUPS + "mmlsquota::0:1:::fs1:USR:0:ada:lots:\n", "not understood"),
    ],
)
def test_an_answer_that_can_not_be_read_is_no_promise_of_no_quota(
    mount: Mount, text: str, problem: str
) -> None:
    answer = ask_quota(mount, "ada", Pretend(Completed((), 0, text, "")), {}, found_at)
    assert answer is not None and answer.quotas == ()
    assert problem in answer.problem and bool(problem) == bool(answer.problem)
