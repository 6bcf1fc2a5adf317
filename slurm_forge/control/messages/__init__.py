"""The messages of the control channel, and their lines."""
