"""What happened in a run, from journal records to values.  Pure; used by status and explain."""
