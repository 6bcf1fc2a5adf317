"""Every process that slurm_forge starts: ``python -m slurm_forge.process NAME ARGUMENTS…``.

Scripts wait in the queue for weeks, and hold these names; modules may move meanwhile.  A script has
tried no more than the import of this module: a supervisor's own imports take most of a second of
every start, and are made once.  Where they fail, or come to no end, the process becomes the script
again, which tells what is wrong and has the job wait (``not_started`` in
``sbatch_templates/start.bash``).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

_MODULE = "slurm_forge.process"
#: What each process is; its ``main`` takes the arguments from ``sys.argv``.  A name stays for good.
MODULES = {
    "agent": "slurm_forge.training.agent.main",
    "deputy": "slurm_forge.launch.supervisor.deputy",
    "execute": "slurm_forge.launch.command.main",
    "export": "slurm_forge.checkpoint.export.main",
    "live_job": "slurm_forge.launch.diagnose.live_job",
    "live_node": "slurm_forge.launch.diagnose.live_node",
    "live_rank": "slurm_forge.training.preflight.signal_listener",
    "local_tasks": "slurm_forge.launch.local.tasks",
    "notify": "slurm_forge.launch.notify.main",
    "preflight_node": "slurm_forge.training.preflight.standalone",
    "report": "slurm_forge.cli.observe.report_process",
    "send_message": "slurm_forge.launch.notify.apprise_message",
    "shield": "slurm_forge.launch.supervisor.signal_shield",
    "supervise": "slurm_forge.launch.supervisor.main",
    "witness": "slurm_forge.training.monitor.main",
    "worker": "slurm_forge.training.rank.main",
}
#: Where they were in the first versions, whose scripts name modules.
_OLD = {
    "agent": "slurm_forge.training.agent",
    "shield": "slurm_forge.launch.shield",
    "worker": "slurm_forge.training.worker",
}
#: In front of a name: import it and end, so that a script can tell what is wrong.
_TRY = "--try"
#: As long as the script itself waits for an interpreter.
_IMPORT_WITHIN_S = 300.0
#: Set by the script for us, and by us for the script: names that start.bash knows.
_SCRIPT = "forge_script"
_REASON = "forge_not_started"
_MOST = 4000
_MOST_MEMORY = 1 << 29


def process_words(name: str, *arguments: str) -> tuple[str, ...]:
    """What stands behind the interpreter: ``-m slurm_forge.process NAME ARGUMENTS…``."""
    if name not in MODULES:
        raise KeyError(name)
    return ("-m", _MODULE, name, *arguments)


def old_process_words(name: str, *arguments: str) -> tuple[str, ...]:
    """The same in scripts of earlier versions, which name the module."""
    return ("-m", _OLD[name], *arguments)


def yield_to_others(niceness: int) -> None:
    """Have this process, and what it starts, take less of a node than the ranks beside it.

    It fails by itself at half a GiB.  Were it chosen to be ended where memory runs out, Slurm would
    say of the whole job that it ran out of memory.
    """
    import resource
    from contextlib import suppress

    os.nice(niceness)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))


def main(argv: Sequence[str] | None = None) -> int:
    """Become the process that is named, with the arguments behind it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    trying = arguments[:1] == [_TRY]
    name, *rest = arguments[1:] if trying else arguments or [""]
    module = _imported(name, os.environ.pop(_SCRIPT, ""))
    if module is None:
        return 2
    if trying:
        return 0
    sys.argv = [module.__file__ or name, *rest]
    return int(module.main() or 0)


def _imported(name: str, script: str) -> ModuleType | None:
    """The module of a process; None, and told, where there is none of that name."""
    if name not in MODULES:
        message = _unknown(name)
        _back_to_script(script, message)
        sys.stderr.write(f"slurm_forge: {message}\n")
        return None
    late = None
    if script:
        import threading

        took = f"importing {MODULES[name]} took {_IMPORT_WITHIN_S:.0f} seconds"
        reason = f"{took}: is a file system down?"
        late = threading.Timer(_IMPORT_WITHIN_S, _back_to_script, (script, reason))
        late.daemon = True
        late.start()
    gc.disable()  # imports make objects that stay
    try:
        module = import_module(MODULES[name])
    except BaseException:
        if script:
            import traceback

            _back_to_script(script, traceback.format_exc())
        raise
    finally:
        if late is not None:
            late.cancel()
    gc.freeze()
    gc.enable()
    return module


def _unknown(name: str) -> str:
    """In words, with what was probably meant and the next step."""
    from slurm_forge.documents.hints import did_you_mean

    return (
        f"no process is called {name!r} {did_you_mean(name, MODULES)}\n"
        f"  python -m {_MODULE} NAME ARGUMENTS…; a script of a newer version needs that version."
    )


def _back_to_script(script: str, reason: str) -> None:
    """Returns where there is no script to become."""
    if script and os.access(script, os.R_OK):
        os.environ[_REASON] = reason[-_MOST:].replace("\0", "")
        os.execvp("bash", ["bash", script])  # noqa: S606  as the script itself was found


if __name__ == "__main__":
    sys.exit(main())
