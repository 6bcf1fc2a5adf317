"""``python -m slurm_forge.testing.cluster``: a real Slurm on this machine, by one command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ConfigError, ForgeError
from slurm_forge.testing.cluster import machine
from slurm_forge.testing.cluster.cluster import SlurmCluster
from slurm_forge.testing.cluster.install import install_packages
from slurm_forge.testing.cluster.spec import ClusterSpec, Tracking

DEFAULT_DIRECTORY = Path("/tmp/slurm-forge-cluster")  # noqa: S108  ours, mode and owner are checked


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except ForgeError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.action == "install":
        return _install()
    if arguments.action == "up":
        return _up(arguments)
    if arguments.action == "down":
        SlurmCluster(arguments.dir).stop()
        _say(f"stopped; the logs are in {arguments.dir}/log")
        return 0
    cluster = SlurmCluster.attach(arguments.dir)
    if arguments.action == "status":
        healthy = cluster.is_healthy()
        _say(_describe(cluster))
        _say(cluster.queue())
        return 0 if healthy else 1
    if arguments.action == "env":
        _say(_exports(cluster))
        return 0
    command = list(arguments.command) if arguments.action == "exec" else [_shell(cluster)]
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ForgeError("nothing to run", next_step="exec -- sinfo")
    try:
        os.execvpe(command[0], command, dict(cluster.env))  # noqa: S606  that is what exec is for
    except FileNotFoundError:
        raise ForgeError(f"{command[0]}: no such command", next_step="Check its name.") from None


def _install(*, accounting: bool = True, prefix: Path | None = None) -> int:
    path = machine.path_with_prefix(os.environ.get("PATH", os.defpath), prefix)
    installed = install_packages({**os.environ, "PATH": path}, accounting=accounting)
    if installed:
        _say(f"installed {' '.join(installed)}")
    return 0


def _up(arguments: argparse.Namespace) -> int:
    if arguments.install:
        _install(accounting=arguments.accounting, prefix=arguments.slurm)
    cluster = SlurmCluster(arguments.dir, _spec(arguments))
    cluster.start()
    _say(_describe(cluster))
    _say(_exports(cluster))
    _say(_next(arguments.dir))
    return 0


def _spec(arguments: argparse.Namespace) -> ClusterSpec:
    try:
        return _unchecked_spec(arguments)
    except ValueError as error:
        raise ConfigError(str(error), next_step="Give 'up' another value.") from None


def _unchecked_spec(arguments: argparse.Namespace) -> ClusterSpec:
    return ClusterSpec(
        nodes=arguments.nodes,
        cpus=arguments.cpus,
        tracking=Tracking(arguments.tracking),
        kill_wait=timedelta(seconds=arguments.kill_wait),
        cred_expire=timedelta(seconds=arguments.cred_expire),
        slurmd_timeout=timedelta(seconds=arguments.slurmd_timeout),
        job_requeue=arguments.job_requeue,
        send_user_signal=arguments.send_user_signal,
        accounting=arguments.accounting,
        prefix=arguments.slurm,
    )


def _describe(cluster: SlurmCluster) -> str:
    state = cluster.state
    version = f"{state.platform.version.year:02d}.{state.platform.version.month:02d}"
    figures = (
        f"booted in {state.boot_s or 0:.1f} s, a trivial job took {state.trivial_job_s or 0:.1f} s"
    )
    memory = "enforced" if cluster.limits_memory else "not enforced"
    return (
        f"Slurm {version} in {cluster.layout.directory}: {figures}\n"
        f"nodes {' '.join(cluster.nodes)}; processes tracked by {state.tracking.value}"
        f" ({state.platform.cgroup.value}), memory limits {memory}"
        + (f"\ncontrol groups were tried: {state.without_cgroups}" if state.without_cgroups else "")
        + f"\npartitions: {'; '.join(each.contract for each in cluster.spec.partitions)}"
    )


def _exports(cluster: SlurmCluster) -> str:
    """What a shell needs to talk to the cluster: the Slurm of another place comes with its PATH."""
    names = ("SLURM_CONF",) if cluster.spec.prefix is None else ("PATH", "SLURM_CONF")
    return "\n".join(f"export {name}={shlex.quote(cluster.env[name])}" for name in names)


def _next(directory: Path) -> str:
    """What to type after ``up``; a directory of one's own has to be named to each action."""
    program = "python -m slurm_forge.testing.cluster"
    named = "" if directory == DEFAULT_DIRECTORY else f" --dir {shlex.quote(str(directory))}"
    return f"next: type that, or: {program} shell{named}\nto stop it: {program} down{named}"


def _shell(cluster: SlurmCluster) -> str:
    return cluster.env.get("SHELL") or "/bin/bash"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    default = ClusterSpec()
    parser = argparse.ArgumentParser(
        prog="python -m slurm_forge.testing.cluster", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True)
    texts = {
        "install": "apt-get what is missing, nothing else",
        "up": "boot a cluster; wipes the directory",
        "down": "stop exactly the processes of the cluster",
        "status": "is it healthy, what does it run",
        "env": "print what a shell must export",
        "shell": "an interactive shell in which sbatch, squeue, … talk to the cluster",
        "exec": "run one command that talks to the cluster: exec -- sinfo",
    }
    made = {name: actions.add_parser(name, help=text) for name, text in texts.items()}
    for sub in made.values():
        sub.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="default: %(default)s")
    made["exec"].add_argument("command", nargs=argparse.REMAINDER)
    up = made["up"]
    up.add_argument("--install", action="store_true", help="apt-get what is missing")
    up.add_argument(
        "--slurm",
        type=Path,
        metavar="PREFIX",
        help="boot the Slurm that was installed below PREFIX; default: the one on PATH",
    )
    up.add_argument("--tracking", choices=[t.value for t in Tracking], default="auto")
    up.add_argument("--nodes", type=int, default=default.nodes)
    up.add_argument("--cpus", type=int, default=default.cpus, help="CPUs per node")
    for name in ("kill_wait", "cred_expire", "slurmd_timeout"):
        seconds = int(getattr(default, name).total_seconds())
        up.add_argument(f"--{name.replace('_', '-')}", type=int, default=seconds, metavar="SECONDS")
    up.add_argument("--send-user-signal", action="store_true")
    up.add_argument("--no-job-requeue", dest="job_requeue", action="store_false")
    up.add_argument("--no-accounting", dest="accounting", action="store_false")
    return parser


if __name__ == "__main__":
    sys.exit(main())
