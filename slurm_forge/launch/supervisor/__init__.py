"""Front end for a job file: the batch step that starts agents and ranks; started by the script.

The script ``exec``s the process ``supervise`` (``main``).  ``srun`` starts the agents, ``job_step``
starts launches on agents that are already running, ``placement`` chooses their nodes.  Where
another launcher (torchrun, a container) stands between Slurm and the ranks, ``signal_shield``
reports the signals and passes on only those that a foreign command needs.  A supervisor that is
killed is replaced: rank 0 becomes the ``deputy``, which has the seconds until Slurm's SIGKILL to
record what happened and to requeue; where the batch node is lost, a rank of another node does it.

Entry: ``main``.
"""
