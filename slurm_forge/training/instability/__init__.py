"""Skipped steps, loss spikes and their diagnosis; called by the training loop.

``skip_tracker`` reads the guard's verdicts, one step late on a GPU; on the first bad step of a
series ``diagnosis`` computes it again.  Rank 0's ``spike_monitor`` watches losses and norms.  The
result is one value, the same on all ranks, which ``training.loop.instability_handler``
acts on at the next boundary.

Entry: ``skip_tracker``.
"""
