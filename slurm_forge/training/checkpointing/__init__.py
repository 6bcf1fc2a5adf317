"""What a run saves, keeps, compares and resumes; called by the training loop."""
