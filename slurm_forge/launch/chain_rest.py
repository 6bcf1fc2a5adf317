"""What becomes of the other tasks of a chain where one of them finds that it has nothing to do."""

from __future__ import annotations

import contextlib

from slurm_forge.errors import ForgeError
from slurm_forge.journal import JournalWriter, fold, newest_attempt_in, read_journal
from slurm_forge.journal.codec import NO_LAUNCH
from slurm_forge.journal.events import Held
from slurm_forge.launch.attempt import Refusal
from slurm_forge.launch.chain import chain_of
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm
from slurm_forge.spec.run_file import read_run_file

__all__ = ["nothing_to_do"]


def nothing_to_do(run: RunDirectory, why: Refusal, job: str, slurm: Slurm) -> None:
    """Keep the tasks that wait from starting only to find out the same; best effort.

    Of a finished run they are cancelled; of one that rests they are held until a person wants it
    to go on.
    """
    with contextlib.suppress(ForgeError, OSError):
        chain = chain_of(job, read_run_file(run.spec_file).job.chain, slurm)
        if chain is None:
            return
        if why is Refusal.DONE:
            chain.cancel_waiting()
            return
        waiting = chain.waiting()
        if not waiting:
            return
        records, _ = read_journal(run, thin=True, fresh=True)
        state = fold(records)
        reason = state.reason or "the run rests"
        if chain.hold(waiting, reason):
            return
        number = newest_attempt_in(records)
        journal = JournalWriter(run, attempt=number, writer="supervisor", launch=NO_LAUNCH)
        journal.follow(records)
        # Whoever releases them wants it to go on: nothing else starts them.
        journal.write(Held(job=chain.array, restart_count=0, reason=reason, confirmed=True))
        journal.close()
