"""From the batch script to the supervisor: ``python -m slurm_forge.launch.batch_start MODULE …``.

The script has tried no more than this module: the supervisor's own imports take most of a second
of every start, and are made once.  Where they fail, or come to no end, the process becomes the
script again, which tells what is wrong and has the job wait (``not_started`` in
``sbatch_templates/starting.bash``).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from importlib import import_module

__all__ = ["main"]

#: As long as the script itself waits for an interpreter.
_IMPORT_WITHIN_S = 300.0
#: Set by the script for us, and by us for the script: names that starting.bash knows.
_SCRIPT = "forge_script"
_REASON = "forge_not_started"
_MOST = 4000


def main() -> int:
    """Become ``MODULE``, with the arguments behind it."""
    script = os.environ.pop(_SCRIPT, "")
    module = sys.argv[1]
    late = threading.Timer(
        _IMPORT_WITHIN_S,
        _back_to_script,
        (script, f"importing {module} took {_IMPORT_WITHIN_S:.0f} seconds: is a file system down?"),
    )
    late.daemon = True
    late.start()
    gc.disable()  # imports make objects that stay
    try:
        supervisor = import_module(module)
    except BaseException:
        import traceback

        _back_to_script(script, traceback.format_exc())
        raise
    finally:
        late.cancel()
    gc.freeze()
    gc.enable()
    return int(supervisor.main(sys.argv[2:]))


def _back_to_script(script: str, reason: str) -> None:
    """Returns where there is no script to become."""
    if script and os.access(script, os.R_OK):
        os.environ[_REASON] = reason[-_MOST:].replace("\0", "")
        os.execvp("bash", ["bash", script])  # noqa: S606  as the script itself was found


if __name__ == "__main__":
    sys.exit(main())
