"""Reads a run directory into the facts that reports are made of."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_forge.cli.run_choice import (
    from_here,
    reference,
)
from slurm_forge.errors import ForgeError
from slurm_forge.files import FOLDERS_OWNER, exists
from slurm_forge.journal import Damage, Record
from slurm_forge.journal.events import JobChanged, Resumed
from slurm_forge.journal.logged import LoggedCurve
from slurm_forge.journal.order import in_order
from slurm_forge.journal.tail import JournalTail, without_superseded_records
from slurm_forge.report.purge import PurgeRule, counts_from
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.run_directory import RunDirectory, list_claims
from slurm_forge.run_directory.sent_messages import failure_text, read_sent
from slurm_forge.store.identity import CheckpointName
from slurm_forge.units import parse_duration, parse_memory

_LOG_ENDINGS = (".out", "_log.err", ".out.gz", "_log.err.gz")


class RunReader:
    """A run that is looked at again and again.

    Without ``spec`` run.yaml is read only for what the journal does not say, the last step.  Only
    with ``whole`` the records of attempts that are archived are among those that are read, and
    only with ``curve`` every logged figure is collected there.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        clock: Callable[[], float] = time.time,
        spec: bool = True,
        whole: bool = False,
        curve: LoggedCurve | None = None,
    ) -> None:
        self._run = run
        self._clock = clock
        self._tail = JournalTail(run, whole=whole, curve=curve)
        self._records: list[Record] = []
        self._damage: list[Damage] = []
        self._spec = spec
        self._total: int | None = None
        self._resources: dict[str, Any] = {}
        self._memory: int | None = None
        self._global_batch: int | None = None
        self._resumed: list[Record] = []
        self._purge: PurgeRule | None = None
        self._fallbacks: tuple[Path, ...] = ()
        self._problem = self._read_spec() if spec else None

    @property
    def growing(self) -> tuple[str, ...]:
        """The files of the journal that a running attempt writes to."""
        return self._tail.growing

    @property
    def total_steps(self) -> int | None:
        """The last step: what the program said last, else the job's ``args.max_steps``."""
        return self._total

    def _read_spec(self) -> str | None:
        """``job.args.max_steps`` and the purge rule; what is wrong with the file stops no report.

        Only looked up, not checked: building the whole job would take longer than all the rest.
        """
        from slurm_forge.documents import read

        try:
            body: Any = read(self._run.spec_file, trusted=True, owner=FOLDERS_OWNER).data
            value = body
            for key in ("job", "args", "max_steps"):
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                self._total = value
            self._resources = _resources(body)
            self._memory = _memory(self._resources.get("mem"))
            self._fallbacks = _fallbacks(body)
            after = body.get("purge_after") if isinstance(body, dict) else None
            if after is not None:
                self._purge = PurgeRule(parse_duration(after), str(body.get("purge_basis") or ""))
        except (ForgeError, OSError, ValueError) as error:
            return f"run.yaml can't be read: {error}"
        return None

    def poll(self) -> list[Record]:
        """Read new records; returns them, the earliest first."""
        records, damage = self._tail.poll()
        self._records += records
        self._damage += damage
        # By attempts: the clocks of their nodes differ.
        telling = (r for r in records if isinstance(r.event, Resumed | JobChanged))
        resumed = in_order([*self._resumed, *telling])
        for record in resumed:
            if isinstance(record.event, JobChanged):
                self._total, self._spec = None, False  # the new run.yaml may say
            elif isinstance(record.event, Resumed) and record.event.until is not None:
                self._total = record.event.until
                self._global_batch = record.event.global_batch or self._global_batch
        self._resumed = resumed[-1:]
        return sorted(records, key=lambda record: record.time)

    def forget_superseded(self) -> None:
        """Drop records of progress that later ones supersede: else they pile up for days."""
        self._records = without_superseded_records(self._records)

    def facts(self) -> RunFacts:
        """Everything read so far."""
        if self._total is None and not self._spec:
            self._spec, self._problem = True, self._read_spec()
        run = self._run
        return RunFacts(
            name=run.name,
            path=str(run.path),
            reference=reference(run),
            now=self._clock(),
            records=tuple(self._records),
            earlier=self._tail.earlier,
            damage=tuple(self._damage),
            total_steps=self._total,
            done=run.is_done(),
            stop_asked=run.stop_asked(),
            save_asked=exists(run.save_file),
            problems=(*(() if self._problem is None else (self._problem,)), *_unsent(run)),
            purge=self._purge,
            oldest_file=_oldest_file(run, self._purge),
            memory=self._memory,
            gpus_per_rank=_gpus_per_rank(self._resources),
            nodes_asked=_nodes(self._resources),
            global_batch=self._global_batch,
            on_disk=_on_disk(run, self._fallbacks),
            last_written=self._tail.last_written,
            claimed=_claimed(run),
            asked=self._tail.resume_asked_at,
        )


def _resources(body: Any) -> dict[str, Any]:
    """``job.resources``, as far as it is there."""
    for key in ("job", "resources"):
        body = body.get(key) if isinstance(body, dict) else None
    return body if isinstance(body, dict) else {}


def _memory(asked: object) -> int | None:
    """What the job asks for per node, in bytes."""
    return parse_memory(asked) if isinstance(asked, (str, int)) else None


def _nodes(requested: dict[str, Any]) -> int | None:
    nodes = requested.get("nodes", 1)
    return nodes if isinstance(nodes, int) and requested else None


def _gpus_per_rank(requested: dict[str, Any]) -> float | None:
    """GPUs of each rank; None where none are asked for."""
    per_task = _count(requested.get("gpus_per_task"))
    if per_task:
        return float(per_task)
    generic = str(requested.get("gres") or "")
    of_gres = generic if generic.startswith("gpu") else None
    per_node = _count(requested.get("gpus_per_node")) or _count(of_gres)
    tasks = requested.get("tasks_per_node", 1)
    return per_node / tasks if per_node and isinstance(tasks, int) and tasks > 0 else None


def _count(option: object) -> int:
    """``8``, ``a100:8``, ``gpu:a100:4``; a kind alone is one."""
    if option is None or option == "" or isinstance(option, bool):
        return 0
    last = str(option).split(",")[0].split("(")[0].rpartition(":")[2]
    return int(last) if last.isascii() and last.isdigit() and len(last) < 6 else 1


def gather(
    run: RunDirectory,
    *,
    logs: bool = True,
    whole: bool = False,
    curve: LoggedCurve | None = None,
) -> RunFacts:
    """Read everything once; with ``logs`` also look where the output lies.

    With ``whole`` also the records of attempts that are archived, with ``curve`` also every logged
    figure.
    """
    gathering = RunReader(run, whole=whole, curve=curve)
    gathering.poll()
    facts = gathering.facts()
    return replace(facts, logs=written_logs(log_folders(run))) if logs else facts


def log_folders(run: RunDirectory) -> tuple[Path, ...]:
    """Where output lies: in the run's own folder, or in that of a submitit executor."""
    if run.path.parent.name == "runs":  # <folder>/runs/<name>: AutoExecutor(folder)
        return (run.submissions, run.path.parent.parent)
    return (run.submissions,)


def written_logs(folders: Iterable[Path], *, empty: bool = False) -> tuple[str, ...]:
    """Files that hold output, as a person would name them from the current folder.

    With ``empty`` also those that nothing was written to.
    """
    paths = (path for folder in folders for path in _written(folder, empty=empty))
    return tuple(map(from_here, paths))


def _written(folder: Path, *, empty: bool) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if entry.name.endswith(_LOG_ENDINGS) and (empty or entry.stat().st_size)
            )
    except OSError:
        return []


def _fallbacks(body: Any) -> tuple[Path, ...]:
    """Where checkpoints lie that could not be written into the run directory."""
    if not isinstance(body, dict):
        return ()
    name, old = body.get("fallback_name"), body.get("old_fallbacks")
    for key in ("job", "checkpoint", "fallback"):
        body = body.get(key) if isinstance(body, dict) else None
    now = [Path(body) / name] if isinstance(body, str) and isinstance(name, str) else []
    earlier = old if isinstance(old, list) else []
    return (*now, *(Path(each) for each in earlier if isinstance(each, str)))


def _on_disk(run: RunDirectory, fallbacks: Sequence[Path]) -> frozenset[CheckpointName] | None:
    """The published checkpoints, by their names alone; None where a folder can't be listed.

    List it after reading the journal: what the journal mentions has been published by then.
    """
    checkpoints = set()
    entries = []
    for folder in (run.checkpoints, *fallbacks):
        try:
            entries += os.listdir(folder)  # noqa: PTH208  # a Path per entry is not needed
        except FileNotFoundError:
            continue
        except OSError:
            return None
    for entry in entries:
        with contextlib.suppress(ValueError):
            checkpoints.add(CheckpointName.parse(entry))
    return frozenset(checkpoints)


def _unsent(run: RunDirectory) -> tuple[str, ...]:
    """Notifications that could not be sent."""
    with contextlib.suppress(OSError):
        if run.notifications.is_dir():
            return tuple(failure_text(x.target, x.error) for x in read_sent(run).failures())
    return ()


def _claimed(run: RunDirectory) -> float | None:
    """When the newest attempt was claimed, by the clock of its file."""
    with contextlib.suppress(OSError, ValueError):
        return (run.attempts / f"{max(list_claims(run))}.json").stat().st_mtime
    return None


def _oldest_file(run: RunDirectory, rule: PurgeRule | None) -> float | None:
    """Of run.yaml and one file of each checkpoint; the others are as old."""
    if rule is None:
        return None
    times = []
    for path in (run.spec_file, *run.checkpoints.glob("step-*/manifest.json")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            times.append(counts_from(rule.basis, accessed=stat.st_atime, written=stat.st_mtime))
    return min(times, default=None)
