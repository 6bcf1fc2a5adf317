"""One launch: collects what ranks and Slurm report and ends the launch; used by the front ends.

``stop_monitor`` collects who wants the launch to stop: signals, a person, the files STOP and SAVE,
the clock, Slurm's record; Slurm is asked what a signal means, and all ranks are asked to stop.
``hang_watchdog``, ``probe_monitor``, ``network_monitor`` and ``straggler_monitor`` watch
the ranks with the rules of ``recovery.monitor``.  A host is named for silence only after the
kernel's view of its connections was read.

Entry: ``conductor``.
"""
