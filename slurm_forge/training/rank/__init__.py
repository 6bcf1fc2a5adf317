"""The process of one rank: from its start by the agent to its exit."""
