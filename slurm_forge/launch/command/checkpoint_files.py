"""The checkpoints that a program keeps itself: which it may resume from, and which are good."""

from __future__ import annotations

import glob
import heapq
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from slurm_forge.recovery.incident.launch_facts import ProgramCheckpoint, ProgramCheckpoints
from slurm_forge.spec.launchers import Convention, ProgramSpec
from slurm_forge.spec.templates import Placeholder, fields_of
from slurm_forge.vocabulary.plan import RecoveryPlan

#: What Lightning saves at its signal, into its default_root_dir (hpc_save_path in its
#: trainer/connectors/checkpoint_connector.py); the number counts saves, not steps.
_LIGHTNING = "hpc_ckpt_*.ckpt"
_NUMBER = re.compile(r"[0-9]{1,18}")
#: Of what kind a file is, which may hold a number too: ``.h5``, ``.pt2``.
_KIND = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,11}\Z")
_MOST = 100_000
#: transformers writes it into a checkpoint that was begun at a SIGTERM and is not whole yet
#: (src/transformers/trainer_jit_checkpoint.py).
_HF_INCOMPLETE = "checkpoint-is-incomplete.txt"


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """A file or folder: ``number`` is the last one in its name, such as the 400 of checkpoint-400.

    That of an ending (``.h5``) counts only where there is no other.  ``changed`` in nanoseconds
    since the epoch.
    """

    path: Path
    number: int | None
    changed: int

    @property
    def order(self) -> tuple[int, int, str]:
        """By number; what has none comes before, by time."""
        return (-1 if self.number is None else self.number, self.changed, str(self.path))


def find_matches(pattern: str, folder: Path) -> tuple[ProgressFile, ...]:
    """What a glob finds, from ``folder`` on.  Nothing in it is a shell's; ``**`` goes deeper."""
    matches: list[ProgressFile] = []
    glob_pattern = str(Path(pattern).expanduser())
    # pathlib's own takes no absolute pattern.
    names = glob.iglob(glob_pattern, root_dir=folder, recursive=True)  # noqa: PTH207
    # Of too many the furthest: each costs a question to the file system.
    for name in heapq.nlargest(_MOST, names, key=_furthest):
        path = folder / name
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            continue  # gone since
        matches.append(ProgressFile(path.absolute(), _number_in(name), changed))
    return tuple(matches)


def _furthest(name: str) -> int:
    number = _number_in(name)
    return -1 if number is None else number


def _number_in(name: str) -> int | None:
    base = PurePath(name).name
    numbers = _NUMBER.findall(_KIND.sub("", base)) or _NUMBER.findall(base)
    return int(numbers[-1]) if numbers else None


def newest(
    matches: Iterable[ProgressFile], *, but: Callable[[Path], bool] = lambda _: False
) -> ProgressFile | None:
    """The one with the highest number in its name, else the one changed last."""
    for match in sorted(matches, key=lambda each: each.order, reverse=True):
        if not but(match.path):
            return match
    return None


def incomplete(convention: Convention) -> Callable[[Path], bool]:
    """Whether a checkpoint says of itself that it is not whole."""
    if convention is Convention.HF:
        return lambda path: (path / _HF_INCOMPLETE).exists()
    return lambda path: False


def resumable(program: ProgramSpec, folder: Path, plan: RecoveryPlan) -> tuple[ProgressFile, ...]:
    """What a start may be told to resume from, the best first.

    Args:
        program: Whose checkpoints they are.
        folder: Where it runs.
        plan: Which of them were left behind by rollbacks.

    Returns:
        Whole checkpoints by the numbers in their names, else by time.  What
        Lightning saves at its signal is among those of the pattern: then the last one written
        comes first.
    """
    if program.checkpoint_glob is None:
        return ()
    is_incomplete = incomplete(program.convention)
    found = list(find_matches(program.checkpoint_glob, folder))
    by_time = program.convention is Convention.LIGHTNING
    if by_time:
        known = {each.path for each in found}
        for place in _roots(program.checkpoint_glob, folder):
            own = find_matches(f"{glob.escape(str(place))}/{_LIGHTNING}", folder)
            found += [each for each in own if each.path not in known]
    usable = [
        each
        for each in found
        if not is_incomplete(each.path)
        and not any(
            left.covers(_number(each, program.convention), each.changed) for left in plan.abandoned
        )
    ]
    return tuple(
        sorted(
            usable,
            key=lambda each: (each.changed, *each.order) if by_time else each.order,
            reverse=True,
        )
    )


def _roots(pattern: str, folder: Path) -> tuple[Path, ...]:
    """Where Lightning's default_root_dir may be: from the folder of the pattern up to ours."""
    parts = Path(pattern).expanduser().parts[:-1]
    plain = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    place = folder / Path(*parts[:plain]) if plain else folder
    above = [each for each in place.parents if each == folder or folder in each.parents]
    return tuple(dict.fromkeys((folder, place, *above)))


def _number(file: ProgressFile, convention: Convention) -> int:
    """By what files are ordered before the time: that of Lightning's may count saves or steps."""
    return -1 if file.number is None or convention is Convention.LIGHTNING else file.number


class CheckpointWatch:
    """Which of a program's checkpoints it has trained past with finite values.

    A checkpoint counts as good once a later figure was fine: it was listed before that was
    printed.  One that is seen only afterwards does where its number is a step in between.  The
    figure of a step is that before its update, which the checkpoint of that step has made.  Output
    may be far behind: one whose number is a step that is not known to be fine is not good.

    Where this start has trained past none, those before the one that it resumed from are good.

    Args:
        program: Whose checkpoints they are.
        folder: Where it runs.
        plan: Which of them were left behind by rollbacks.
    """

    def __init__(self, program: ProgramSpec, folder: Path, plan: RecoveryPlan) -> None:
        self._program = program
        self._folder = folder
        self._plan = plan
        self._listed: Mapping[Path, int] = {}
        self._confirmed: dict[Path, int] = {}
        self._healthy = -1
        self._earlier = self._list()

    def _list(self) -> tuple[ProgressFile, ...]:
        try:
            files = resumable(self._program, self._folder, self._plan)
        except OSError:
            return ()
        self._listed = {each.path: each.changed for each in files}
        return files

    def sample(self, healthy: int | None, furthest: int | None = None) -> tuple[ProgressFile, ...]:
        """Look again; what may be resumed from now.

        Args:
            healthy: The furthest step whose printed values are fine.
            furthest: The furthest step that was printed.
        """
        before, between = dict(self._listed), self._healthy
        files = self._list()
        if healthy is None or healthy <= between:
            return files
        self._healthy = healthy
        is_open = self._open_steps(files, healthy, furthest)
        for each in files:
            number = _number(each, self._program.convention)
            listed = before.get(each.path) == each.changed and not is_open(number)
            covered = between <= number < healthy and number >= 0
            if listed or (covered and each.path not in before):
                self._confirmed[each.path] = each.changed
        return files

    def _open_steps(
        self, files: Iterable[ProgressFile], healthy: int, furthest: int | None
    ) -> Callable[[int], bool]:
        """Tells of a number whether it is a step that is not known to be fine.

        One beyond all output is, if numbers of other checkpoints are steps that are.
        """
        numbers = [_number(each, self._program.convention) for each in files]
        are_steps = any(0 < number <= healthy for number in numbers)
        last = max(healthy, furthest or 0)
        return lambda number: number >= healthy and (number <= last or are_steps)

    def found(self, healthy: int | None, furthest: int | None = None) -> ProgramCheckpoints:
        """What a rollback may choose from.

        Args:
            healthy: The furthest step whose printed values are fine.
            furthest: The furthest step that was printed.
        """
        if self._program.checkpoint_glob is None:
            return ProgramCheckpoints(refusal="--checkpoint-glob does not say what it could go to")
        if Placeholder.LATEST not in fields_of(self._program.resume_arg or ""):
            return ProgramCheckpoints(
                refusal="the program chooses its checkpoint itself (--resume-arg has no {latest})"
            )
        files = self.sample(healthy, furthest)
        is_open = self._open_steps(files, self._healthy, furthest)
        proven = [
            each
            for each in files
            if self._confirmed.get(each.path) == each.changed
            and not is_open(_number(each, self._program.convention))
        ]
        if not proven and self._earlier:
            changed = {each.path: each.changed for each in self._earlier[1:]}
            proven = [each for each in files if changed.get(each.path) == each.changed]
            if not proven:
                name = self._earlier[0].path.name
                return ProgramCheckpoints(
                    refusal=f"it resumed from {name}, which went bad at once, and has no older one"
                )
        good = tuple(
            ProgramCheckpoint(_number(each, self._program.convention), each.changed, each.path.name)
            for each in proven
        )
        return ProgramCheckpoints(good, max((each.changed for each in files), default=0))
