"""The whole history of a run, as values and as text.  Pure; called by ``explain``."""
