"""The supervisor, where scripts of earlier versions start it: see process.py."""

import sys

from slurm_forge.launch.supervisor.main import main

if __name__ == "__main__":
    sys.exit(main())
