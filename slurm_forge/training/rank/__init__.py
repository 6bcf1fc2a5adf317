"""The process of one rank, from its start to its exit; forked by the agent.

Signal handlers first, then the control channel, then torch and the process groups, then the user's
function with a ``Run``.

Entry: ``main``.
"""
