"""No signal ever reaches a process that is not ours."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_forge.errors import UnsupportedError
from slurm_forge.testing.cluster import install, machine, processes
from slurm_forge.testing.cluster.clients import client_environment
from slurm_forge.testing.cluster.layout import CgroupKind, Layout, Platform, Ports, SlurmVersion
from slurm_forge.testing.cluster.processes import ProcessRef
from slurm_forge.testing.cluster.spec import ClusterSpec, Tracking
from slurm_forge.testing.cluster.state import ClusterState, Daemon, read_state, write_state

STATE = ClusterState(
    boot_id="b",
    spec=ClusterSpec(),
    platform=Platform(hostname="h", version=SlurmVersion(22, 5), cgroup=CgroupKind.V1),
    ports=Ports(1, 21040),
    tracking=Tracking.CGROUP,
    daemons=(Daemon("munged", ProcessRef(1, 2)),),
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], env={"PATH": "/usr/bin:/bin", "OURS": "yes"}) as child:
        yield child
        child.kill()


def ref(child: subprocess.Popen[bytes]) -> ProcessRef:
    found = processes.refer(child.pid)
    assert found is not None
    return found


def test_a_recycled_process_id_gets_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    real = ref(sleeper)
    stranger = replace(real, started=real.started - 1)
    assert not processes.is_alive(stranger)
    assert not processes.kill(stranger, signal.SIGKILL)
    processes.stop([stranger], patience_s=1)
    assert sleeper.poll() is None
    assert processes.kill(real, signal.SIGKILL)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_zombie_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    real = ref(sleeper)
    sleeper.kill()
    assert processes.wait_until(lambda: not processes.is_alive(real), timeout_s=10)
    assert processes.refer(sleeper.pid) is None  # though nobody has waited for it yet


def test_who_ignores_sigterm_is_killed_after_the_patience() -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        processes.stop([ref(child)], patience_s=0.2)
        assert child.wait(10) == -signal.SIGKILL


def test_a_stopped_process_hears_the_sigterm(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    processes.stop([ref(sleeper)], patience_s=20)
    assert sleeper.wait(10) == -signal.SIGTERM


def test_processes_are_found_by_the_whole_setting(sleeper: subprocess.Popen[bytes]) -> None:
    def found(*settings: str) -> bool:
        return ref(sleeper) in set(processes.with_environment(*settings))

    assert processes.wait_until(lambda: found("OURS=yes"), timeout_s=10)  # it execs first
    assert found("OURS=")
    assert not found("OURS=ye")
    assert not found("OURS=yes", "OTHER=")


def test_waiting_ends_at_its_deadline() -> None:
    began = time.monotonic()
    assert not processes.wait_until(lambda: False, timeout_s=0.1)
    assert time.monotonic() - began < 60


def test_the_state_survives_the_way_through_its_file(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert read_state(layout) is None
    write_state(layout, STATE)
    assert read_state(layout) == STATE
    assert layout.state.stat().st_mode & 0o077 == 0
    layout.state.write_text("{half")
    assert read_state(layout) is None


def test_a_block_of_ports_in_use_is_passed_over() -> None:
    with machine.claimed_ports(4) as first, machine.claimed_ports(4) as second:
        assert first.slot != second.slot
        taken = second.controller
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("127.0.0.1", taken))
        foreign.listen(1)
        with machine.claimed_ports(4) as first, machine.claimed_ports(4) as second:
            assert taken not in (first.controller, second.controller)


def test_nothing_of_another_slurm_leaks_into_the_clients() -> None:
    outside = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURMD_NODENAME": "gpu17",
        "SBATCH_PARTITION": "theirs",
        "SQUEUE_FORMAT": "%A",
    }
    assert client_environment(outside, Path("/c/slurm.conf")) == {
        "PATH": "/bin",
        "SLURM_CONF": "/c/slurm.conf",
    }


def test_what_is_missing_is_named_by_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SBIN", ())
    assert {"munge", "slurmd", "mariadb-server"} <= set(machine.missing_packages(str(tmp_path)))
    assert "mariadb-server" not in machine.missing_packages(str(tmp_path), accounting=False)
    reason = machine.why_not_here(str(tmp_path))
    assert reason is not None
    assert "slurmctld" in reason
    with pytest.raises(UnsupportedError) as caught:
        install.install_packages({"PATH": str(tmp_path)})
    assert "munge" in caught.value.message


def test_installing_asks_apt_for_what_is_missing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SBIN", ())
    for name in ("apt-get", "sudo", "slurmctld", "mariadbd", "mariadb-install-db"):
        program = tmp_path / name
        log = "" if name != "sudo" else "shift; exec "
        program.write_text(
            f'#!/bin/sh\n{log}"$@"\n' if log else f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install.install_packages({"PATH": str(tmp_path)})
    update, request = (tmp_path / "asked").read_text().splitlines()
    assert update.startswith("update")
    assert {"munge", "slurmd", "slurm-client"} <= set(request.split())
    assert not {"slurmctld", "mariadb-server"} & set(request.split())
