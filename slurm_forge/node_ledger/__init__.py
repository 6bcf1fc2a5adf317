"""What runs have seen of nodes, as files that all runs of a user, or of a group, share.

``<folder>/<uid>/<cluster>/<host>.jsonl``: every user writes below a folder of their own, and every
host a file of its own, since two hosts appending to one file lose lines on several network file
systems.  Everybody reads all of them.
"""

from __future__ import annotations

from slurm_forge.node_ledger.files import NodeLedger, Reading, merged
from slurm_forge.node_ledger.places import LedgerPlace, ledger_place
from slurm_forge.node_ledger.reading import Part

__all__ = ["LedgerPlace", "NodeLedger", "Part", "Reading", "ledger_place", "merged"]
