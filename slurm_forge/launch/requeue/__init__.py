"""Requests to Slurm after an attempt (requeue, hold, successor); called by ``launch.attempt``.

A durable intent, ``scontrol requeue`` with retries, changes on the waiting job (``job_update``),
else a successor by sbatch, else the intent stays open for ``reconcile``.  In a run that is an array
of attempts, ``array_chain`` takes the place of ``requeue``: the next task continues, and waiting
tasks are changed, held or cancelled with the run.

Entry: ``requeue``.
"""
