"""The run directory: the database of a run, on shared storage; used by all packages above.

Entry: ``layout``.
"""

from slurm_forge.run_directory.claims import (
    Claim,
    Fence,
    claim_attempt,
    list_claims,
    mark_launch,
    newest_claim,
)
from slurm_forge.run_directory.layout import RunDirectory

__all__ = [
    "Claim",
    "Fence",
    "RunDirectory",
    "claim_attempt",
    "list_claims",
    "mark_launch",
    "newest_claim",
]
