"""Starting runs and bringing them back: supervisor, requeue ladder, submission.  No torch."""
