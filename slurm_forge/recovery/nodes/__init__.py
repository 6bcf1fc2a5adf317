"""Which nodes are excluded, and where ranks are placed.  Pure."""
