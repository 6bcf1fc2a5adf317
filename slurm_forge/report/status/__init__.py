"""Where a run is now, as values and as text.  Pure; called by ``status`` and ``watch``."""
