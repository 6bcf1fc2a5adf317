"""What is reported before a job is submitted.  Pure."""
