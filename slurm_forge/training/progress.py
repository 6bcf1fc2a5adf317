"""How far a run is: what of a checkpoint is neither a tensor nor the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Progress"]


@dataclass(slots=True)
class Progress:
    """Counts of steps and samples, which phases are done, and the program's own plain values."""

    step: int = 0
    consumed: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    #: The highest loss that was usual, as rank 0 has seen it.
    loss_summit: float | None = None
    phases: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "step": self.step,
            "consumed": self.consumed,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_summit": self.loss_summit,
            "phases": dict(self.phases),
            "extra": dict(self.extra),
        }

    def restore(self, body: Mapping[str, Any]) -> None:
        """In place, because the program may hold a reference."""
        self.step = int(body["step"])
        self.consumed = int(body["consumed"])
        self.skipped = int(body["skipped"])
        self.skipped_in_a_row = int(body["skipped_in_a_row"])
        summit = body.get("loss_summit")  # checkpoints from before have none
        self.loss_summit = None if summit is None else float(summit)
        self.phases = {str(name): int(step) for name, step in body["phases"].items()}
        self.extra.clear()
        self.extra.update(body["extra"])
