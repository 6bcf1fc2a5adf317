"""Node faults seen by runs, in files shared by all runs of a user or group; used by ``launch``.

``<folder>/<uid>/<cluster>/<host>.jsonl``: every user writes below a folder of their own, and every
host a file of its own, since two hosts appending to one file lose lines on several network file
systems.  In the folder that a site names everybody reads all of them, in any other their own.

Entry: ``ledger``.
"""

from __future__ import annotations

from slurm_forge.node_ledger.ledger import NodeLedger
from slurm_forge.node_ledger.places import LedgerPlace, ledger_place
from slurm_forge.node_ledger.reading import LedgerReading

__all__ = ["LedgerPlace", "LedgerReading", "NodeLedger", "ledger_place"]
