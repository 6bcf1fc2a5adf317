"""Where everything of a run lies, and the few marker files a person or a finished run leaves."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import RunDirectoryError
from slurm_forge.files import (
    create_exclusive,
    exists_on_server,
    fsync_directory,
    make_private_directory,
    write_atomic,
)
from slurm_forge.person import user_name

#: How the last line of a note in ``not_started`` begins, where it says what a person does next.
NEXT_STEP = "  next step: "


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The layout of ``runs/<name>/``.  Holds a path and nothing else; every property is cheap."""

    path: Path

    @classmethod
    def at(cls, path: Path | str) -> RunDirectory:
        """Name the run directory at ``path`` (absolute afterwards), existing or not."""
        return cls(Path(path).expanduser().absolute())

    @classmethod
    def existing(cls, path: Path | str) -> RunDirectory:
        """Name a run directory that must hold a run; ``RunDirectoryError`` where it does not."""
        run = cls.at(path)
        if not run.exists():
            raise RunDirectoryError(
                f"{run.path} holds no run (run.yaml is missing)",
                next_step="Check the name; runs are made by slurm-forge submit or slurm-forge run.",
            )
        return run

    def create(self, spec: bytes) -> None:
        """Make the directories (private to the user) and write the resolved spec once."""
        self.make_runs_folder()
        for folder in (self.path, self.journal, self.attempts, self.checkpoints, self.submissions):
            make_private_directory(folder)
        if not create_exclusive(self.spec_file, spec):
            raise RunDirectoryError(
                f"a run already exists in {self.path}",
                next_step=f"Continue it: slurm-forge requeue {self.path.name}; change it: "
                f"slurm-forge change {self.path.name} --set KEY=VALUE; or choose another name.",
            )

    def make_runs_folder(self) -> None:
        """Make the folder of runs if it is missing; git ignores what lies in one made here."""
        folder = self.path.parent
        if not os.path.lexists(folder):
            make_private_directory(folder)
            create_exclusive(folder / ".gitignore", b"*\n")

    @property
    def name(self) -> str:
        """The run's name, which is the folder's."""
        return self.path.name

    @property
    def spec_file(self) -> Path:
        """The resolved spec as submitted."""
        return self.path / "run.yaml"

    @property
    def settings_file(self) -> Path:
        """The user's settings as they were when ``slurm-forge exec`` created the run."""
        return self.path / "settings.yaml"

    def revision(self, number: int) -> Path:
        """The ``run.yaml`` that the change of this number, counted from 1, has replaced."""
        return self.path / "revisions" / f"run-{number}.yaml"

    @property
    def journal(self) -> Path:
        """Append-only events, one file per writer."""
        return self.path / "journal"

    @property
    def attempts(self) -> Path:
        """Claims ``<n>.json`` and one folder ``<n>/`` of evidence per attempt."""
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        """Published checkpoints, and stages that never became one."""
        return self.path / "checkpoints"

    @property
    def code_pool(self) -> Path:
        """Snapshots of source code, one folder per content, of all runs beside this one."""
        return self.path.parent / ".code"

    @property
    def submissions(self) -> Path:
        """Scripts and submitit's own files; must be writable by the user alone."""
        return self.path / "submissions"

    def not_started(self, job: str) -> Path:
        """Why starts of this job came to nothing before an attempt was begun."""
        return self.submissions / f"not-started-{job}.txt"

    @property
    def notifications(self) -> Path:
        """What was sent about the run, a file per try; there only if it has targets."""
        return self.path / "notifications"

    @property
    def stop_file(self) -> Path:
        """Touched by a person: save, stop, and do not come back."""
        return self.path / "STOP"

    @property
    def save_file(self) -> Path:
        """Touched by a person: save now and go on."""
        return self.path / "SAVE"

    @property
    def done_file(self) -> Path:
        """Exists once the run is finished; whoever starts it again exits 0 at once."""
        return self.path / "DONE"

    @property
    def local_lock(self) -> Path:
        """Held by whoever trains the run without Slurm, on the machine that does it."""
        return self.attempts / "local.lock"

    def attempt(self, number: int) -> Path:
        """The folder of one attempt: logs, stacks, last words."""
        return self.attempts / str(number)

    def launch_mark(self, attempt: int, launch: int) -> Path:
        """There once that launch of the attempt has begun: no earlier one publishes any more."""
        return self.attempt(attempt) / f"launch-{launch}"

    def hosts_file(self, attempt: int, launch: int) -> Path:
        """The nodes of a launch, a line for each rank, as srun reads them."""
        return self.attempt(attempt) / f"seats-l{launch}"

    def memory_snapshot(self, attempt: int, launch: int, rank: int) -> Path:
        """The history of a rank's GPU memory when it ran out, for pytorch.org/memory_viz."""
        return self.memory_account(attempt, launch, rank).with_suffix(".pickle")

    def memory_account(self, attempt: int, launch: int, rank: int) -> Path:
        """What a rank that ran out of memory wrote about where it had gone."""
        return self.attempt(attempt) / f"oom-rank{rank}-launch{launch}.txt"

    def last_words(self, attempt: int, launch: int, rank: int) -> Path:
        """What a rank wrote that failed and could not say so over the control channel."""
        return self.attempt(attempt) / f"last-words-l{launch}-r{rank}.json"

    def stacks(self, attempt: int, launch: int) -> Path:
        """The folder of the stacks that were taken when a launch stood still."""
        return self.attempt(attempt) / "stacks" / str(launch)

    def rendezvous(self, key: str) -> Path:
        """Where rank 0 publishes its address when there is no supervisor (stock submitit)."""
        return self.attempts / f"rendezvous-{key}.json"

    def exists(self) -> bool:
        """Whether a run is there; ``OSError`` where the storage can't say."""
        return exists_on_server(self.spec_file)

    @property
    def report_file(self) -> Path:
        """The run as one HTML page, as ``report`` and the batch step leave it here."""
        return self.path / "report.html"

    def is_own(self) -> bool:
        """Whether the run belongs to this user; others may only read it."""
        return self.path.stat().st_uid == os.geteuid()

    def refuse_others(self) -> None:
        """``RunDirectoryError`` for anyone but the owner of the run: others may read it.

        Each of its folders is looked at: one that another user has put there decides nothing.
        """
        folders = (self.path, self.journal, self.attempts, self.checkpoints, self.submissions)
        for folder in folders:
            try:
                owner = os.lstat(folder).st_uid
            except FileNotFoundError:
                continue
            if owner != os.geteuid():
                raise RunDirectoryError(
                    f"{folder} belongs to {user_name(owner)}, and you are "
                    f"{user_name(os.geteuid())}: only its owner starts, stops or changes a run",
                    next_step="Ask them, or read it: slurm-forge status, explain, checkpoints "
                    f"{self.path}",
                )

    def is_done(self) -> bool:
        """Whether the run is finished."""
        return exists_on_server(self.done_file)

    def stop_asked(self) -> bool:
        """Whether a person has asked the run to stop, on whichever node."""
        return exists_on_server(self.stop_file)

    def reopen(self) -> None:
        """Remove the DONE marker durably: the run may be started again."""
        self.done_file.unlink(missing_ok=True)
        fsync_directory(self.path)

    def mark_done(self, step: int, attempt: int) -> None:
        """Write the DONE marker durably; writing it twice is harmless."""
        body = json.dumps({"step": step, "attempt": attempt}, sort_keys=True) + "\n"
        write_atomic(self.done_file, body.encode())
