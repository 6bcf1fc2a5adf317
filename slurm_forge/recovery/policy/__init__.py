"""An incident becomes a decision: rungs, budgets, delays, plans; called by attempts and by rank 0.

``decide`` first asks whether continuing would be a loop (``loop_detection``: no checkpoint in three
attempts, the same error twice, launches that never train, a ceiling), then takes a rung of the
cause's ladder.

Entry: ``decide``.
"""
