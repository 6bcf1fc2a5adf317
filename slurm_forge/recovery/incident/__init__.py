"""Evidence of how a launch or an attempt ended becomes one incident.  Pure."""
