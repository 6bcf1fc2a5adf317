"""The agent of a rank, where scripts of earlier versions start it: see process.py."""

import sys

from slurm_forge.training.agent.main import main

if __name__ == "__main__":
    sys.exit(main())
