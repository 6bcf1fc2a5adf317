"""sbatch's options by name, as its manual has them (20.11 to 26.05); plugins of a site add more."""

from __future__ import annotations

from collections.abc import Iterable

_LONG = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    consolidate-segments constraint container container-id contiguous core-spec cores-per-socket
    cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input
    job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output
    overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet
    reboot requeue reservation resv-ports segment signal sockets-per-node spread-job
    spread-segments stepmgr switches test-only thread-spec threads-per-core time time-min tmp
    tres-bind tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap
    x11
"""
LONG_OPTIONS = frozenset(_LONG.split())
#: Added by plugins that many sites have: pyxis, shifter, CSCS' uenv and container engine.
PLUGIN_OPTIONS = frozenset(
    {
        "container-entrypoint", "container-env", "container-image", "container-mount-home",
        "container-mounts", "container-name", "container-remap-root", "container-save",
        "container-workdir", "container-writable", "no-container-mount-home", "image", "volume",
        "module", "environment", "uenv", "view",
    }
)  # fmt: skip
_SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile",
    "G": "gpus", "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes",
    "O": "overcommit", "Q": "quiet", "S": "core-spec", "W": "wait", "a": "array", "b": "begin",
    "c": "cpus-per-task", "d": "dependency", "e": "error", "i": "input", "k": "no-kill",
    "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos",
    "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip


def long_name(option: str) -> str:
    """The long name of an option as typed: ``gres`` of ``--gres=gpu:4``, ``time`` of ``-t 5``.

    A short option that sbatch does not know stays as it is.
    """
    if option.startswith("--"):
        return option[2:].split("=", 1)[0].split(" ", 1)[0]
    word = option.lstrip("-")
    return _SHORT.get(word[:1], word.split(" ", 1)[0].split("=", 1)[0])


def asks_for_requeue(options: Iterable[str]) -> bool | None:
    """What options say of ``--requeue``: to sbatch the last word counts; None where there is none.

    JobRequeue of slurm.conf counts only for a job that says nothing.
    """
    words = [word for word in map(long_name, options) if word in ("requeue", "no-requeue")]
    return words[-1] == "requeue" if words else None


def value_of(option: str) -> str | None:
    """What stands behind ``=`` or a space in an option as it is typed; None where nothing does."""
    for sign in ("=", " "):
        name, equals, value = option.partition(sign)
        if equals and not set("= ") & set(name):
            return value.strip()
    return None
