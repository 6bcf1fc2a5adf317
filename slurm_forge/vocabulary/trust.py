"""How far a checkpoint is trusted: written, verified, good, or suspect."""

from __future__ import annotations

from enum import Enum


class Trust(str, Enum):
    """Earned from the top to GOOD; SUSPECT ones are never resumed from unless a person says so."""

    #: On disk, with the sizes that were meant.
    WRITTEN = "written"
    #: Read back, every block of it with the hash that was meant.
    VERIFIED = "verified"
    #: Training went on from it, healthy, for as many steps as the job asks for.
    GOOD = "good"
    #: Written after the onset of an instability, or with what is not finite in it.
    SUSPECT = "suspect"
