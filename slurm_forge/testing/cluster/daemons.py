"""Starting the daemons, each in the foreground of a session of its own, and asking for answers."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.testing.cluster import machine
from slurm_forge.testing.cluster.layout import Layout, Ports
from slurm_forge.testing.cluster.processes import is_alive, refer, wait_until
from slurm_forge.testing.cluster.state import Daemon

# In the environment of every daemon, and only there: finds the orphans of a crashed cluster.
MARKER = "SLURM_FORGE_TEST_CLUSTER"

_PATIENCE_S = 60.0  # a loaded machine; on a quiet one each daemon answers within 1.5 s
_TAIL_LINES = 15


@dataclass(slots=True)
class DaemonStarter:
    """Starts the daemons of one cluster and tells ``record`` of each before waiting for it.

    ``environment`` is what clients of this cluster run with.  ForgeError, with the end of the
    log, where a daemon dies or does not answer.
    """

    layout: Layout
    ports: Ports
    environment: Mapping[str, str]
    record: Callable[[Daemon], None]
    # Kept so that dead children are reaped; daemons found again by another process are not here.
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def munged(self) -> None:
        """The cluster's own munged; back once it makes credentials."""
        run = self.layout.run
        daemon = self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",  # it would refuse a directory such as /tmp above its files
            f"--key-file={self.layout.munge_key}",
            f"--socket={self.layout.munge_socket}",
            f"--pid-file={run}/munged.pid",
            f"--log-file={self.layout.log('munged')}",
            f"--seed-file={run}/munged.seed",
            "--num-threads=10",
        )
        socket_path = str(self.layout.munge_socket)
        self._wait(daemon, lambda: self._ask("munge", "-n", "-S", socket_path) is not None)

    def database(self) -> None:
        """MariaDB over a fresh data directory; back once it accepts connections."""
        options = f"--defaults-file={self.layout.database_options}"
        with self.layout.output("mariadb-install-db").open("wb") as output:
            done = subprocess.run(
                [
                    self._program("mariadb-install-db"),
                    options,
                    "--auth-root-authentication-method=normal",
                    "--skip-test-db",
                    "--skip-name-resolve",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                timeout=_PATIENCE_S,
                check=False,
            )
        if done.returncode != 0:
            raise self._failure("mariadb-install-db", "failed")
        daemon = self._start("mariadbd", "mariadbd", options)
        self._wait(daemon, lambda: _accepts(self.ports.database))

    def accounting(self) -> None:
        """The slurmdbd; back once it has made its tables and answers."""
        daemon = self._start("slurmdbd", "slurmdbd", "-D")
        self._wait(daemon, lambda: self._ask("sacctmgr", "-nP", "list", "cluster") is not None)

    def controller(self) -> None:
        """The slurmctld; back once it is the primary and answers."""
        daemon = self._start("slurmctld", "slurmctld", "-D", "-i")
        self._wait(daemon, lambda: " is UP" in (self._ask("scontrol", "ping") or ""))

    def nodes(self, names: tuple[str, ...]) -> None:
        """One slurmd per name, started together; back once none of them is unknown or down."""
        started = [self._start(f"slurmd.{name}", "slurmd", "-D", "-N", name) for name in names]
        for name, daemon in zip(names, started, strict=True):
            self._wait(daemon, partial(self._node_is_ready, name))

    def reap(self) -> None:
        """Collect the exit statuses of children that died, so that no zombies stay."""
        self.children = [child for child in self.children if child.poll() is None]

    def _node_is_ready(self, name: str) -> bool:
        # A trailing mark means that the node does not respond (yet).
        state = (self._ask("sinfo", "-h", "-n", name, "-o", "%T") or "unknown").split()
        return bool(state) and all(
            word in ("idle", "mixed", "allocated", "completing") for word in state
        )

    def _start(self, name: str, *argv: str) -> Daemon:
        with self.layout.output(name).open("ab") as output:
            child = subprocess.Popen(
                [self._program(argv[0]), *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Not below the caller's directory, which may go away, nor in its session, whose
                # Ctrl-C would reach the daemons.
                cwd="/",
                start_new_session=True,
                env={**self.environment, MARKER: str(self.layout.directory)},
            )
        self.children.append(child)
        process = refer(child.pid)
        if process is None:
            child.wait()
            raise self._failure(name, "died at once")
        daemon = Daemon(name, process)
        self.record(daemon)
        return daemon

    def _wait(self, daemon: Daemon, answers: Callable[[], bool]) -> None:
        def settled() -> bool:
            return not is_alive(daemon.process) or answers()

        if not wait_until(settled, timeout_s=_PATIENCE_S, every_s=0.05):
            raise self._failure(daemon.name, f"did not answer within {_PATIENCE_S:.0f} s")
        if not is_alive(daemon.process):
            raise self._failure(daemon.name, "died while starting")

    def _ask(self, *argv: str) -> str | None:
        """The answer of a client command; None while there is none."""
        try:
            answer = subprocess.run(
                [self._program(argv[0]), *argv[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=dict(self.environment),
                timeout=15,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return answer.stdout if answer.returncode == 0 else None

    def _program(self, name: str) -> str:
        path = machine.search_path(self.environment.get("PATH", ""))
        return shutil.which(name, path=path) or name

    def _failure(self, name: str, what: str) -> ForgeError:
        log = self.layout.output(name)
        return ForgeError(
            f"{name} {what}:\n{tail(log, _TAIL_LINES)}",
            next_step=f"The whole log is {log}.",
        )


def tail(path: Path, lines: int) -> str:
    """The last lines of a log; empty where there is no such file."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True
