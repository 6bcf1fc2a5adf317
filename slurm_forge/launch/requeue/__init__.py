"""What is asked of Slurm after an attempt: requeue, hold, job update, reconcile."""
