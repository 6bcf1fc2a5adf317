"""A Slurm that says something in a way that is not known here."""

from __future__ import annotations

import socket

from slurm_forge.journal import read_journal
from slurm_forge.journal.events import Note
from slurm_forge.run_directory import RunDirectory


def strange_task() -> dict[str, str]:
    """The environment of the only task of a step, with a time that is none."""
    return {
        "SLURM_CONF": "/dev/null",  # it is there, and names no controller
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST": socket.gethostname(),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_NNODES": "1",
        "SLURM_JOB_END_TIME": "tomorrow",
    }


def not_understood(run: RunDirectory) -> list[str]:
    """What the journal notes as not understood."""
    records, _ = read_journal(run)
    notes = [record.event.text for record in records if isinstance(record.event, Note)]
    begins = "not understood, ignored: "
    return [text.removeprefix(begins) for text in notes if text.startswith(begins)]
