"""Evidence of how a launch or an attempt ended becomes one incident; called by ``launch.attempt``.

Evidence is weighed in the order of authority: a person's wish, Slurm's records and messages
(``slurm_evidence``), a rank's own error report, the probe with the heartbeats, and for silent ranks
what srun, the kernel and the fault handler printed (``rank_exits``, ``crash_dumps``).  The rank
that failed first is distinguished from those that only lost it.

Entry: ``classify``.
"""
