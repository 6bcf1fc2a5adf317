"""Ranks that torchrun or a container starts, on a real Slurm: preempted, hit, and finished."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch

from slurm_forge.journal.events import NoticeSeen
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from tests.jobs import consumed, told_variables
from tests.slurm.harness import Watched, left_in_peace, submit

pytestmark = [pytest.mark.slurm]

SHIELD, WORKER, AGENT = (["slurm_forge.process", name] for name in ("shield", "worker", "agent"))
STAND_IN = Path(__file__).resolve().with_name("apptainer.py")
STEPS = 120
PACE = {"steps": STEPS, "pace": 0.05}


def run_of(
    cluster: SlurmCluster, folder: Path, name: str, partition: str, **job: object
) -> Watched:
    """Two nodes with two ranks each."""
    wanted = {
        "nodes": 2, "tasks_per_node": 2, "cpus_per_task": 1, "mem": "3500M", "time": "00:30:00",
        "partition": partition,
    }  # fmt: skip
    job.setdefault("args", PACE)
    return submit(cluster, folder, name=name, resources=wanted, **job)


def causes(watched: Watched) -> list[Cause]:
    return [i.cause for a in watched.state.attempts for _, i in a.incidents]


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def has(name: list[str], words: list[str]) -> bool:
    return any(words[at : at + len(name)] == name for at in range(len(words)))


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def ranks_of(slurm: SlurmCluster, watched: Watched) -> dict[int, tuple[int, list[int]]]:
    """Per task its torchrun, and the ranks below it, once all of them are there."""
    found: dict[int, tuple[int, list[int]]] = {}

    def all_there() -> bool:
        found.clear()
        for task, shield in slurm.tasks(watched.job).items():
            for below in children(shield.pid):
                ranks = [each for each in children(below) if has(WORKER, words_of(each))]
                if has(SHIELD, words_of(shield.pid)) and "torch.distributed.run" in words_of(below):
                    found[task] = (below, ranks)
        return [len(ranks) for _, ranks in found.values()] == [2, 2]

    slurm.wait_for(all_there, 40, "two ranks below each torchrun")
    return dict(found)


def left_of(watched: Watched) -> list[list[str]]:
    """What still runs of a run, but for its supervisor."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            words = words_of(int(entry.name))
            if str(watched.run.path) in words and has(WORKER, words):
                found.append(words)
    return found


def test_preempted_below_torchrun_loses_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its agent would end the ranks 30 seconds after a SIGTERM; it never hears of one."""
    reference, samples = left_in_peace(tmp_path / "reference", ranks=4, args={"steps": STEPS})
    watched = run_of(slurm, tmp_path, "below", "preempt", template="torchrun")
    watched.wait_step(20)
    ranks_of(slurm, watched)
    slurm.preempt(watched.job)
    state = watched.wait_finished()
    assert causes(watched) == [Cause.PREEMPTED], watched.story()
    first = state.attempts[0]
    assert first.incidents[0][1].step == first.checkpoints[-1][1].step, watched.story()
    heard = {event.source for _, event in watched.events(NoticeSeen) if event.what == "SIGTERM"}
    assert heard & {"rank 0", "rank 2"}, watched.story()  # the shields, by the first rank of each
    assert watched.digest() == reference
    assert consumed(watched.run.path) == samples


@pytest.mark.slow
def test_a_killed_rank_below_torchrun_is_relaunched(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = run_of(slurm, tmp_path, "killed", "normal", template="torchrun")
    watched.wait(lambda s: (s.committed_step or 0) >= 20, 90, "a checkpoint")
    before = ranks_of(slurm, watched)
    os.kill(before[1][1][1], signal.SIGKILL)
    watched.wait(lambda s: len(s.attempts[0].launches) > 1, 40, "another launch")
    assert not any(words_of(each) for _, ranks in before.values() for each in ranks)
    again = ranks_of(slurm, watched)
    # Who ends a shield ends all that is below it, and the run goes on.  No rank has said anything
    # yet: that srun ends the step of a killed task must not look like somebody's scancel.
    os.kill(slurm.tasks(watched.job)[0].pid, signal.SIGKILL)
    watched.wait(lambda s: len(s.attempts) > 1, 60, "the next rung: other nodes")
    assert not any(words_of(each) for below, ranks in again.values() for each in [below, *ranks])
    watched.wait_finished()
    assert causes(watched) == [Cause.CRASH, Cause.CRASH], watched.story()
    slurm.wait_for(lambda: not left_of(watched), 10, "nothing is left of the run")


#: A program that knows nothing of us: each rank of torchrun counts, and saves when it is told.
COUNTS = """
import os, signal, sys, time
from pathlib import Path
rank, here = os.environ["RANK"], Path(sys.argv[1])
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
saved = here / f"saved-{rank}"
step = begun = int(saved.read_text()) if saved.exists() else 0
with open(here / f"starts-{rank}", "a") as file:
    file.write(f"{begun} of {os.environ['WORLD_SIZE']}\\n")
while step < 100 and not told:
    step += 1
    time.sleep(0.1)
saved.write_text(str(step))
if step == 100 and rank == "0":
    (here / "done").touch()
"""


@pytest.mark.slow
def test_a_command_below_torchrun_is_told_and_brought_back(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    watched = run_of(
        slurm, tmp_path, "counts", "preempt", template="torchrun", entry=None, args={},
        command=[str(tmp_path / "counts.py"), str(tmp_path)],
        program={"notify": "USR1", "done_file": str(tmp_path / "done")},
    )  # fmt: skip
    starts = [tmp_path / f"starts-{rank}" for rank in range(4)]
    slurm.wait_for(lambda: all(each.exists() for each in starts), 60, "all ranks count")
    slurm.preempt(watched.job)
    watched.wait_finished()
    for each in starts:
        first, second = each.read_text().splitlines()
        assert (first, second.partition(" ")[2]) == ("0 of 4", "of 4")
        assert int(second.split()[0]) > 0, "it was not told, or did not go on"
    assert causes(watched) == [Cause.PREEMPTED], watched.story()


def container(tmp_path: Path, **more: object) -> dict:
    """Keys of a job in a container; ``tests/slurm/apptainer.py`` says what stands in for it."""
    programs, image = tmp_path / "programs", tmp_path / "image"
    programs.mkdir()
    image.mkdir()
    (image / "in-the-image").write_text("yes")
    (programs / "apptainer").symlink_to(STAND_IN)
    # What an image would hold: this interpreter, and torch.
    held = {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1])}
    mounts = sorted(each for each in held if not each.startswith(("/usr", "/root")))
    return {
        "container": {
            "runtime": "apptainer", "image": str(image), "python": sys.executable,
            "mounts": mounts, **more,
        },
        "setup": [f"export PATH={shlex.quote(str(programs))}:$PATH"],
    }  # fmt: skip


@pytest.mark.slow
def test_preempted_in_a_container_loses_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    plain = submit(slurm, tmp_path / "plain", name="plain", nodes=2, partition="normal", args=PACE)
    plain.wait_finished()
    watched = submit(
        slurm, tmp_path, name="within", nodes=2,
        args={**PACE, "variables": ["APPTAINER_CONTAINER"]},
        **container(tmp_path, options=["--cleanenv"]),
    )  # fmt: skip
    watched.wait_step(20)
    for task in slurm.tasks(watched.job).values():
        assert has(SHIELD, words_of(task.pid))
    # An agent inside of the container: a killed rank comes back without another srun.
    agents = agents_below(slurm, watched)
    os.kill(children(agents[1])[0], signal.SIGKILL)
    watched.wait(lambda s: len(s.attempts[0].launches) > 1, 40, "another launch")
    assert agents_below(slurm, watched) == agents
    watched.wait(lambda s: s.attempts[0].launches[-1].step or 0, 40, "steps of it")
    slurm.preempt(watched.job)
    state = watched.wait_finished()
    assert causes(watched) == [Cause.CRASH, Cause.PREEMPTED], watched.story()
    assert len(state.attempts) == 2
    inside = {each["APPTAINER_CONTAINER"] for each in told_variables(watched.run.path, 1)}
    assert inside == {str(tmp_path / "image")}
    assert watched.digest() == plain.digest()
    assert consumed(watched.run.path) == consumed(plain.run.path)


def agents_below(slurm: SlurmCluster, watched: Watched) -> dict[int, int]:
    """Per task the agent of its rank, inside of the container."""
    found = {}
    for task, shield in slurm.tasks(watched.job).items():
        (outside,) = children(shield.pid)
        (agent,) = children(outside)
        assert has(AGENT, words_of(agent)), words_of(agent)
        found[task] = agent
    return found
