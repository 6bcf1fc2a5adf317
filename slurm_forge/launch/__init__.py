"""Starting and restarting runs; called by ``cli`` and by the batch script.  No torch.

Three front ends (``supervisor``, ``command``, ``submitit``) share ``attempt``, ``conductor`` and
``requeue``.  Modules beside the sub-packages forward the names that waiting scripts and pickles
hold.

Entry: ``attach``.
"""
