"""The job of ``doctor --live``, where scripts of earlier versions start it: see process.py."""

import sys

from slurm_forge.launch.diagnose.live_job import main

if __name__ == "__main__":
    sys.exit(main())
