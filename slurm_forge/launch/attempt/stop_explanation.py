"""What a launch was stopped for, where Slurm had not said so by the time that it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

from slurm_forge.launch.attempt.attempt import Attempt
from slurm_forge.launch.attempt.evidence import (
    tail_of,
    with_accounting,
)
from slurm_forge.launch.render.outputs import Output
from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.recovery.incident.classify import is_unexplained
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.vocabulary.cause import Cause


class StopExplanation:
    """Explains the end of one attempt's last launch by what Slurm says later; for one thread.

    Args:
        slurm: Answers for accounting, where the job's record alone does not tell.
        attempt: Writes a better-informed incident into its journal, and that the run stops where
            somebody has cancelled the job.
        signals: Every signal for the batch step since the launch ended: what Slurm said before
            one explains nothing any more.
        output: Where slurmstepd writes why it ends the job, after the launch, too.
        now: The wall clock.
    """

    def __init__(
        self,
        slurm: Slurm,
        attempt: Attempt,
        signals: Callable[[], tuple[str, ...]] = tuple,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        *,
        output: Output | None = None,
    ) -> None:
        self._slurm = slurm
        self._attempt = attempt
        self._signals = signals
        self._now = now
        self._output = output
        self._explained: tuple[str, ...] = ()
        self._asked_with: tuple[str, ...] = ()
        self._is_explained = False
        self._record: JobRecord | None = None

    def record(self) -> JobRecord | None:
        """The newest record that is known of the job since the stop was asked for."""
        facts = self._attempt.facts
        return self._record or (None if facts is None else facts.job_at_end or facts.job_at_notice)

    def is_needed(self) -> bool:
        """Whether Slurm has to be asked; its next answer explains the signals that came so far."""
        signals = self._signals()
        incident = self._attempt.incident
        open_ = incident is not None and is_unexplained(incident) and not self._is_explained
        self._asked_with = signals
        return open_ or len(signals) > len(self._explained)

    def cause(self, record: JobRecord | None) -> Cause | None:
        """The cause by ``record``, which was asked for after ``is_needed``.

        Without a record, on a node that has no command to ask with: a plain ``scancel`` signals
        the batch step in the same moment, so that a stop which spared it is none; None where the
        batch step was signalled, too.
        """
        attempt = self._attempt
        signals = self._asked_with
        self._record = record or self._record
        count = attempt.claim.restart_count
        facts = attempt.facts or LaunchFacts(now=self._now(), restart_count=count)
        output = self._output
        facts = replace(
            facts,
            now=self._now(),
            job_at_end=record,
            signalled_since=record is None and facts.signalled_since,
            job_rows=(),  # what accounting said before
            batch_text=facts.batch_text
            if output is None
            else tail_of(output.path, since=output.since),
            batch_signals=tuple(dict.fromkeys((*facts.batch_signals, *signals))),
        )
        if record is not None:
            facts = with_accounting(facts, attempt.claim.job, self._slurm)
        incident = classify(facts, attempt.incident_id)
        if record is None and is_unexplained(incident):
            return None if facts.batch_signals else Cause.PREEMPTED
        self._explained, self._is_explained = signals, True
        attempt.learn(incident)
        return incident.cause
