"""For scripts of earlier versions: ``python -m slurm_forge.launch.batch_start MODULE …``.

They are in the queue; today's name a process (``slurm_forge.process``).  The modules that they name
are read here as names, wherever those modules are now.
"""

from __future__ import annotations

import sys

from slurm_forge import process

_NAMES = {
    "slurm_forge.launch.execute": "execute",
    "slurm_forge.launch.supervise": "supervise",
}


def main() -> int:
    """Become ``MODULE``, with the arguments behind it."""
    module, *arguments = sys.argv[1:] or [""]
    return process.main([_NAMES.get(module, module), *arguments])


if __name__ == "__main__":
    sys.exit(main())
