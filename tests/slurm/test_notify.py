"""A run on a real Slurm that is held sends a message from its batch step, which Slurm then ends."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.launch.watch.run_notifications import RunNotifications
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.cluster.spec import ClusterSpec
from tests.slurm.harness import submit
from tests.unit.launch.message_servers import PASSWORD, webhook

#: slurm.conf, KillWait: Slurm's own default.  Within the test cluster's 5 s a busy machine may not
#: get to the message, and leaves it to a watcher.
DEFAULT_KILL_WAIT = timedelta(seconds=30)


@pytest.mark.slow
def test_a_held_run_sends_once_from_the_batch_step_and_keeps_its_secrets(
    slurm_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SlurmCluster(slurm_directory, ClusterSpec(nodes=2, kill_wait=DEFAULT_KILL_WAIT)) as slurm:
        _held_run(slurm, tmp_path, monkeypatch)


def _held_run(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setitem(slurm.env, "XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setitem(slurm.env, "XDG_STATE_HOME", str(tmp_path / "state"))
    with webhook() as hook:
        targets = tmp_path / "config" / "slurm_forge" / "notify.yaml"
        targets.parent.mkdir(parents=True)
        targets.touch(mode=0o600)
        targets.write_text(f'team: "{hook.url}"\n')
        watched = submit(
            slurm,
            tmp_path,
            name="held",
            partition="normal",
            nodes=2,
            args={"steps": 40, "pace": 0.2},
            inject=["exception@12:rank0"],
            recovery={"app_error": [{"do": "hold"}]},
            notify={"to": ["team"]},
        )
        watched.wait(lambda s: s.status is RunStatus.HELD, 120, "the run to be held")
        slurm.wait_for(lambda: bool(hook.posts), 60, f"the message\n{watched.story()}")
        watched.wait(lambda s: s.attempts[-1].outcome == "held", 60, "the end of the attempt")
        watcher = RunNotifications(Knobs.from_environ(process_environ()))
        watcher.look([watched.run], {})
        watcher.finish(timedelta(seconds=60))
        (post,) = hook.posts
    assert post["title"].startswith("held: held: app_error"), post
    assert f"Job: {watched.job}, attempt 1" in post["message"]
    requeue = f"slurm-forge requeue {watched.run.path}"
    assert requeue in post["message"]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and ".code" not in path.parts]
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == [targets]
    told = [slurm.run("scontrol", "show", "job", watched.job).stdout]
    told.append(slurm.run("squeue", "-h", "-j", watched.job, "-o", "%all").stdout)
    assert not any(PASSWORD in each for each in told)
