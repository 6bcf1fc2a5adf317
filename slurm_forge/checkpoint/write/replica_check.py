"""Compares ranks in the exchanges of a save; a difference takes a second exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.training_state import Captured
from slurm_forge.checkpoint.write.plan import Plan
from slurm_forge.checkpoint.write.replicas import (
    RankMismatch,
    StateDigest,
    differing,
    differing_parts,
    explained,
    same_state,
)
from slurm_forge.vocabulary.json_value import Json

#: The key under which ``exchange`` returns the buffers that differ between ranks.
OWN_BUFFERS = "own"
_DIGEST, _DETAILS, _FACTS = "digest", "details", "facts"
#: An odd number near 2**16 / golden ratio: successive multiples spread evenly.
_SPREAD = 40503


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank reports besides its state, such as its samples.

    ``judge`` runs on rank 0 with the reports of all ranks, and returns the text of a mismatch or an
    empty text.
    """

    report: Json = None
    judge: Callable[[Sequence[Any]], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison, the same on all ranks.

    ``as_saved``: whether the ranks hold what a checkpoint has, bit by bit; None if that was not
    asked, or is unknown.  ``own`` are the buffers that differ between ranks.
    """

    mismatch: RankMismatch | None
    as_saved: bool | None = None
    own: tuple[str, ...] = ()


@dataclass(slots=True)
class ReplicaCheck:
    """One object per launch and rank; ``host`` is this rank's node."""

    host: str = ""
    #: The step after which all replicas were last equal.
    equal_at: int | None = field(default=None, init=False)
    _turn: int | None = field(default=None, init=False)

    def next_turn(self, step: int) -> int:
        """Return which sample of a large state is next; every rank calls it equally often."""
        # Launches that end after a few saves must not all begin with the same sample.
        self._turn = step * _SPREAD if self._turn is None else self._turn + 1
        return self._turn

    def take(self, captured: Captured, plan: Plan, turn: int) -> StateDigest:
        """Start the digest of this rank's state, which may change once this returns."""
        return StateDigest(captured, plan, turn, self.host)

    def compare(
        self,
        ranks: Ranks,
        captured: Captured,
        plan: Plan,
        facts: RankFacts,
        *,
        step: int,
        saved: SavedStates | None,
    ) -> Comparison:
        """Compare the ranks, and their state with ``saved``.  Collective; waits for the device."""
        digest, error = None, None
        turn = self.next_turn(step) if saved is None else saved.turn
        try:
            digest = self.take(captured, plan, turn)
        except Exception as caught:
            error = caught

        def told(reports: Sequence[Any], *_: object) -> dict[str, Json]:
            return {"as_saved": None if saved is None else saved.are(SavedStates.of(reports))}

        agreed, mismatch = self.exchange(
            ranks, error, {}, digest, facts, told, step=step, doing="Comparing the ranks"
        )
        return Comparison(mismatch, agreed["as_saved"], tuple(agreed[OWN_BUFFERS]))

    def exchange(
        self,
        ranks: Ranks,
        error: Exception | None,
        report: Mapping[str, Json],
        digest: StateDigest | None,
        facts: RankFacts,
        decide: Callable[[Sequence[Any], RankMismatch | None, Sequence[str]], dict[str, Json]],
        *,
        step: int,
        doing: str,
    ) -> tuple[dict[str, Any], RankMismatch | None]:
        """Compare the ranks within ``Ranks.agree``; return what was agreed, and the mismatch.

        ``digest`` is None only if there is an ``error``.  ``decide`` runs once, on rank 0, after
        the comparison, and is given what each rank has of its own, too.
        """
        own: dict[str, Json] = {**report, _FACTS: facts.report}
        if error is None and digest is not None:
            try:
                own[_DIGEST] = digest.report()
            except Exception as caught:
                error = caught

        def conclude(
            reports: Sequence[Any], mismatch: RankMismatch | None, buffers: Sequence[str] = ()
        ) -> dict[str, Json]:
            digests = [each[_DIGEST] for each in reports]
            texts = [
                differing_parts(digests, step=step, equal_at=self.equal_at),
                facts.judge([each[_FACTS] for each in reports]),
            ]
            for text in filter(None, texts):
                mismatch = (
                    RankMismatch(text=text, step=step, equal_at=self.equal_at)
                    if mismatch is None
                    else replace(mismatch, text=f"{mismatch.text}; {text}")
                )
            result: dict[str, Json] = {OWN_BUFFERS: list[Json](buffers)}
            if mismatch is not None:
                result["mismatch"] = mismatch.to_json()
            return {**decide(reports, mismatch, buffers), **result}

        def first(reports: Sequence[Any]) -> dict[str, Json]:
            groups = differing([each[_DIGEST] for each in reports])
            return {"differing": list[Json](groups)} if groups else conclude(reports, None)

        def second(reports: Sequence[Any]) -> dict[str, Json]:
            details = [each[_DETAILS] for each in reports]
            return conclude(reports, *explained(details, step=step, equal_at=self.equal_at))

        agreed: dict[str, Any] = ranks.agree(error, own, first, doing=doing)
        if "differing" in agreed and digest is not None:
            own[_DETAILS] = digest.details(agreed["differing"])
            agreed = ranks.agree(None, own, second, doing=doing)
        if "mismatch" in agreed:
            return agreed, RankMismatch.from_json(agreed["mismatch"])
        self.equal_at = step
        return agreed, None


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The digests of all ranks' states, as a checkpoint stores them."""

    turn: int
    ranks: tuple[str, ...]

    @classmethod
    def of(cls, reports: Sequence[Mapping[str, Any]]) -> SavedStates:
        """Collect them from the reports that ``exchange`` passes to ``decide``."""
        return cls(reports[0][_DIGEST]["turn"], tuple(each[_DIGEST]["state"] for each in reports))

    def to_json(self) -> dict[str, Json]:
        """Encode them for the manifest."""
        return {"turn": self.turn, "ranks": list[Json](self.ranks)}

    @classmethod
    def from_json(cls, body: object) -> SavedStates | None:
        """Decode them; None for anything else, as in older checkpoints."""
        if not isinstance(body, dict):
            return None
        turn, ranks = body.get("turn"), body.get("ranks")
        if type(turn) is not int or not isinstance(ranks, list):
            return None
        return cls(turn, tuple(map(str, ranks)))

    def are(self, other: SavedStates) -> bool | None:
        """Whether the states are equal, bit by bit; None if that is unknown."""
        return same_state(self.ranks, other.ranks)
