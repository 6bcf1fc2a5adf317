"""What is requested of Slurm after an attempt; called by ``launch.attempt`` and ``reconcile``.

A durable intent, ``scontrol requeue`` with retries, changes on the waiting job (``job_update``),
else a successor by sbatch, else the intent stays open for ``reconcile``.  In a run that is an array
of attempts, ``array_chain`` takes the place of ``requeue``: the next task continues, and waiting
tasks are changed, held or cancelled with the run.

Entry: ``requeue``.
"""
