"""Which files hold the output of a run, and the attempts in them according to the journal."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.cli.observe.run_reading import log_folders, written_logs
from slurm_forge.cli.run_choice import from_here, reference
from slurm_forge.errors import ForgeError, RunDirectoryError
from slurm_forge.files import read_bounded
from slurm_forge.journal import RunState, fold, read_to_fold
from slurm_forge.journal.state import AttemptState
from slurm_forge.report.logs.files import outputs_of, rank_of
from slurm_forge.report.logs.lines import AttemptSpan, LaunchSpan, Source
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file

_MOST_SCRIPT = 1 << 20
#: Jobs whose output goes to the terminal of a person: of `exec` and `attach` without Slurm.
_STARTED_BY_HAND = ("exec-", "process-", "torchrun-")
_DIRECTIVE = re.compile(r"^#SBATCH +(?:--(?:output|error)[= ]|-[oe] ?)(?P<file>\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunOutput:
    """The output of a run: ``state`` by its journal, and the files, each with its attempts.

    ``attempts`` has one more where the last job has not begun an attempt: its script may have
    printed why.
    """

    run: RunDirectory
    state: RunState
    attempts: tuple[AttemptSpan, ...]
    sources: tuple[Source, ...]
    folders: tuple[Path, ...]

    def of_attempt(self, number: int, rank: int | None = None) -> tuple[Source, ...]:
        """The files that an attempt, and a rank, may have written to.

        Raises:
            RunDirectoryError: There is no such attempt, none of its files is there any more, or
                none is that rank's.
        """
        attempt = next((each for each in self.attempts if each.number == number), None)
        name = reference(self.run)
        if attempt is None:
            numbers = ", ".join(str(each.number) for each in self.attempts)
            raise RunDirectoryError(
                f"{self.run.name} has no attempt {number}",
                next_step=f"Its attempts: {numbers}."
                if numbers
                else "It has not been started yet.",
            )
        sources = [each for each in self.sources if attempt in each.attempts]
        if not sources and attempt.job.startswith(_STARTED_BY_HAND):
            raise RunDirectoryError(
                f"attempt {number} of {self.run.name} printed to where it was started, to no file",
                next_step="To keep its output: start it with 2>&1 | tee FILE.  What is known: "
                f"slurm-forge explain {name} --attempt {number}",
            )
        if not sources:
            where = " and ".join(from_here(folder) for folder in self.folders)
            raise RunDirectoryError(
                f"there is no output of attempt {number} of {self.run.name} (job {attempt.job}) in "
                f"{where}",
                next_step="Where it was moved: slurm-forge logs "
                f"{name} --attempt {number} --from DIR.  What is known without it: "
                f"slurm-forge explain {name} --attempt {number}",
            )
        if rank is None:
            return tuple(sources)
        chosen = [each for each in sources if each.rank in (None, rank)]
        if not chosen:
            known = sorted({each.rank for each in sources if each.rank is not None})
            ranks = ", ".join(map(str, known))
            raise RunDirectoryError(
                f"there is no output of rank {rank} of attempt {number}",
                next_step=f"There is output of these ranks: {ranks}.",
            )
        return tuple(chosen)


def read_output(run: RunDirectory, moved_to: Path | None) -> RunOutput:
    """The files with the output of a run, in their places or where they were ``moved_to``."""
    state = fold(read_to_fold(run))
    spans = [_span(each) for each in state.attempts]
    if state.job and all(each.job != state.job for each in spans):
        spans.append(AttemptSpan(len(spans) + 1, state.job, started=0.0))
    jobs = tuple(dict.fromkeys(each.job for each in spans))
    folders = log_folders(run) if moved_to is None else (moved_to,)
    logs = written_logs(folders, empty=True)
    files = outputs_of(jobs, logs)
    sources = []
    by_file: dict[str, list[AttemptSpan]] = {}
    for span in spans:
        paths = files[span.job]
        if not paths and moved_to is None:
            paths = tuple(_configured(run, span.job))
        for path in paths:
            by_file.setdefault(path, []).append(span)
    for path, attempts in by_file.items():
        with contextlib.suppress(OSError):
            written = Path(path).stat().st_mtime
            sources.append(Source(path, tuple(attempts), rank=rank_of(path), written=written))
    return RunOutput(run, state, tuple(spans), tuple(sources), folders)


def _span(attempt: AttemptState) -> AttemptSpan:
    launches = (LaunchSpan(each.number, each.started, each.world_size) for each in attempt.launches)
    return AttemptSpan(attempt.number, attempt.job, attempt.started, tuple(launches))


def _configured(run: RunDirectory, job: str) -> Iterator[str]:
    """Files of a job that lie where the script says, or where Slurm puts them by itself."""
    folder = Path()
    with contextlib.suppress(ForgeError, OSError):
        folder = Path(read_run_file(run.spec_file).submitted_from)
    names = ["slurm-%j.out", "slurm-%A_%a.out"]
    with contextlib.suppress(ForgeError, OSError):
        script = read_bounded(run.submissions / "job.sbatch", _MOST_SCRIPT).decode(errors="replace")
        names += [match["file"].strip("'\"") for match in _DIRECTIVE.finditer(script)]
    for name in dict.fromkeys(names):
        pattern = folder / _pattern(name, run.name, job)
        found: Iterable[str] = sorted(glob.glob(str(pattern)))  # noqa: PTH207  # absolute
        yield from (from_here(Path(path)) for path in found if Path(path).stat().st_size)


def _pattern(name: str, run: str, job: str) -> str:
    """``--output`` as a pattern of names: what only Slurm can fill in is anything."""
    array, _, task = job.partition("_")
    values = {"j": job, "J": job, "A": array, "a": task, "x": run, "%": "%"}

    def filled(match: re.Match[str]) -> str:
        return glob.escape(values[match[2]]) if match[2] in values else "*"

    return re.sub(r"%([0-9]*)(.)", filled, glob.escape(name))
