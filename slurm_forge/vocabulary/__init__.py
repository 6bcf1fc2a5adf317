"""Basic types that every layer shares: cause, incident, decision, plan; used by all packages above.

Values only: nothing here reads a file, a clock or the environment.

Entry: ``cause``.
"""
