"""An incident becomes a decision: rungs, budgets, delays, plans.  Pure."""
