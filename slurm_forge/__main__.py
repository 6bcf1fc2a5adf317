"""``python -m slurm_forge``: the command line, for where ``slurm-forge`` is not on the path."""

from slurm_forge.cli.main import main

if __name__ == "__main__":
    main()
