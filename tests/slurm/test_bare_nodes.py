"""Compute nodes that have srun and nothing else of Slurm's: no scontrol, squeue, sacct, sbatch.

Such centres there are: their compute images carry only what starts the ranks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.journal.events import NoticeSeen, RequeueFailed, Resumed
from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from tests.slurm.harness import REPOSITORY, Watched, environment, submit
from tests.slurm.test_survival import causes, repeated_steps

pytestmark = [pytest.mark.slurm]

#: Slurm's programs that a login node has and these compute nodes do not.
MISSING = frozenset(
    {
        "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "scancel", "scontrol", "sdiag", "sinfo",
        "sprio", "squeue", "sreport", "sshare", "strigger",
    }
)  # fmt: skip
SLURM_FORGE = (sys.executable, "-m", "slurm_forge.cli.main")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with all that this machine has but those programs."""
    folder = tmp_path_factory.mktemp("bare")
    for place in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in Path(place).iterdir():
            link = folder / program.name
            if program.name not in MISSING and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def on_bare_nodes(
    slurm: SlurmCluster,
    folder: Path,
    bare: str,
    name: str,
    *,
    steps: int = 80,
    pace: float = 0.1,
    **more: Any,
) -> Watched:
    args = {"steps": steps, "pace": pace}
    return submit(
        slurm, folder, name=name, nodes=2, args=args, setup=[f"export PATH={bare}"], **more
    )


def ask(slurm: SlurmCluster, ledger: Path, *words: str) -> str:
    """A verb of ours on the login node, where Slurm's programs are."""
    with environment(slurm, ledger):
        done = subprocess.run(
            [*SLURM_FORGE, *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=slurm.deadline(60),
        )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout + done.stderr


def check_it_went_on(watched: Watched, cause: Cause) -> None:
    """Saved where it was stopped, in the first attempt, and went on from there in the second."""
    state = watched.state
    assert len(state.attempts) == 2, watched.story()
    assert causes(watched) == [cause]
    stopped = state.attempts[0].checkpoints[-1][1].step
    assert watched.events(Resumed)[-1][1].step == stopped
    assert repeated_steps(watched) == 0


@pytest.mark.slow
def test_preempted_where_nobody_can_be_asked_it_is_slurm_that_requeues(
    slurm: SlurmCluster, tmp_path: Path, bare: str
) -> None:
    """The supervisor stays to the end of the grace time: what exits before is not requeued."""
    watched = on_bare_nodes(slurm, tmp_path, bare, "bare")
    watched.wait_step(25)
    slurm.preempt(watched.job)
    watched.wait_finished()
    check_it_went_on(watched, Cause.PREEMPTED)
    assert watched.events(NoticeSeen)
    (failed, *_) = watched.events(RequeueFailed)
    assert "can't be started" in failed[1].reason, "it was asked after all"
    assert slurm.job(watched.job).restarts == 1


@pytest.mark.slow
def test_at_the_time_limit_the_watcher_on_the_login_node_carries_the_requeue_out(
    slurm: SlurmCluster, tmp_path: Path, bare: str
) -> None:
    watched = on_bare_nodes(
        slurm,
        tmp_path,
        bare,
        "limit",
        steps=55,
        pace=0.6,
        partition="normal",
        minutes=1,
        lead="25s",
    )
    slurm.wait_state(watched.job, ["COMPLETED"], 90)
    told = ask(slurm, tmp_path / "nodes", "status", str(watched.run.path))
    assert "slurm-forge reconcile" in told

    def watched_over() -> bool:
        ask(slurm, tmp_path / "nodes", "watch", "--once", str(watched.run.path))
        return watched.state.status is RunStatus.FINISHED

    slurm.wait_for(watched_over, 200, "the watcher to carry the requeues out")
    assert set(causes(watched)) == {Cause.TIME_LIMIT}
    assert len(watched.state.attempts) >= 2
    assert repeated_steps(watched) == 0


@pytest.mark.slow
def test_cancelled_by_a_preemption_it_is_brought_back_by_reconcile(
    slurm: SlurmCluster, tmp_path: Path, bare: str
) -> None:
    watched = on_bare_nodes(slurm, tmp_path, bare, "cancel", partition="cancel")
    watched.wait_step(25)
    slurm.preempt(watched.job)
    slurm.wait_for(lambda: slurm.job(watched.job).state == "PREEMPTED", 90, "its end")
    told = ask(slurm, tmp_path / "nodes", "reconcile", str(watched.run.path))
    watched.wait_finished()
    check_it_went_on(watched, Cause.PREEMPTED)
    assert "cancel: requeued" in told


@pytest.mark.slow
def test_a_program_of_ones_own_is_requeued_by_slurm_too(
    slurm: SlurmCluster, tmp_path: Path, bare: str
) -> None:
    watched = submit(
        slurm,
        tmp_path,
        name="own",
        nodes=1,
        entry=None,
        command=["bash", "examples/exec/loop.sh", str(tmp_path / "out"), "100"],
        program={"progress_file": str(tmp_path / "out" / "done")},
        setup=[f"export PATH={bare}"],
    )
    slurm.wait_for((tmp_path / "out" / "done").exists, 60, "its first piece")
    slurm.preempt(watched.job)
    watched.wait_finished()
    assert len(watched.state.attempts) == 2
    assert (tmp_path / "out" / "all").read_text().split() == [str(i) for i in range(1, 101)]


@pytest.mark.slow
def test_without_a_database_nothing_is_missed(slurm_directory: Path, tmp_path: Path) -> None:
    """AccountingStorageType none: sacct has nothing to say, on the login node either."""
    with SlurmCluster(slurm_directory, ClusterSpec(accounting=False)) as slurm:
        assert "accounting_storage/none" in slurm.run("scontrol", "show", "config").stdout
        watched = submit(slurm, tmp_path, name="nodb", nodes=2, args={"steps": 80, "pace": 0.1})
        watched.wait_step(25)
        slurm.preempt(watched.job)
        watched.wait_finished()
        check_it_went_on(watched, Cause.PREEMPTED)
        told = ask(slurm, tmp_path / "nodes", "explain", str(watched.run.path))
        assert "preempted" in told
        assert "(certain)" in told
        ask(slurm, tmp_path / "nodes", "watch", "--once", str(watched.run.path))


@pytest.mark.slow
def test_a_chain_goes_on_by_itself(slurm: SlurmCluster, tmp_path: Path, bare: str) -> None:
    """Nobody has to be asked for the next task of an array."""
    watched = on_bare_nodes(
        slurm, tmp_path, bare, "chain", partition="cancel", template="array", chain=2
    )
    watched.wait_step(25)
    slurm.preempt(f"{watched.job}_1")
    watched.wait_finished()
    check_it_went_on(watched, Cause.PREEMPTED)
