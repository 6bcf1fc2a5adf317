"""``python -m tests.slurm.truth``: the truth table on a real Slurm, by one command."""

from __future__ import annotations

import sys

from tests.slurm.truth.table import main

if __name__ == "__main__":
    sys.exit(main())
