"""What a run printed: whose each line is, when, and which errors are in it; called by ``logs``.

Entry: ``lines``.
"""
