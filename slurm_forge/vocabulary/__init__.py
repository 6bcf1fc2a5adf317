"""The nouns that every layer shares: cause, evidence, incident, decision, recovery plan, position.

Values only: nothing here reads a file, a clock or the environment.
"""
