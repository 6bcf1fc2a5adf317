"""A folder with a project in it, and the command line as a person has it there.

Nothing here, and nothing in the tests beside it, names a module of the package: these tests pass
unchanged whatever is moved or renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PROJECT = Path(__file__).parent / "project"
SLURM_FORGE = (sys.executable, "-m", "slurm_forge")
#: However busy the machine is.
WITHIN_S = 500.0


def until(
    condition: Callable[[], T], what: str, within: float = WITHIN_S, *, every: float = 0.1
) -> T:
    """Wait for what is awaited; commands that are started to see it take longer than files."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(every)
    return found


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All that it said."""
        return self.out + self.err

    @property
    def json(self) -> dict[str, Any]:
        """Its one document."""
        assert self.out.startswith("{"), self.text
        body = json.loads(self.out)
        assert body["schema"] == 1
        return dict(body)


@dataclass
class Project:
    """A person's folder."""

    folder: Path
    #: Beside, or instead of, what this process has.
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shutil.copytree(PROJECT, self.folder, dirs_exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """No Slurm, no settings and no node ledger of whoever runs the tests."""
        mine = {name: value for name, value in os.environ.items() if not _of_others(name)}
        state = str(self.folder / ".state")
        return {
            **mine,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "SLURM_FORGE_NODES": "off",
            "XDG_CONFIG_HOME": state,
            "XDG_STATE_HOME": state,
            "SLURM_CONF": "/dev/null",  # Slurm says at once that there is none
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }

    def write(self, name: str, text: str) -> Path:
        """A file of the person's."""
        path = self.folder / name
        path.write_text(text)
        return path

    def job(self, name: str, **keys: Any) -> str:
        """A job file of ``train.py``; its name."""
        entry = {"entry": "train.py:train"} if "command" not in keys else {}
        every = {"every_steps": 10, "every_minutes": None, "good_after_steps": 5}
        body = {"name": name, **entry, "checkpoint": every, **keys}
        self.write(f"{name}.yaml", json.dumps(body))  # which is YAML, too
        return f"{name}.yaml"

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Any command, with a process group of its own."""
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str) -> Done:
        """Any command, to its end."""
        return finish(self.start(*words))

    def forge(self, *words: str) -> Done:
        """``slurm-forge …``."""
        return self.run(*SLURM_FORGE, *words)

    def status(self, run: str) -> dict[str, Any]:
        """As ``slurm-forge status --json`` has it."""
        return self.forge("status", run, "--json").json

    def explain(self, run: str) -> dict[str, Any]:
        """As ``slurm-forge explain --json`` has it."""
        return self.forge("explain", run, "--json").json

    def report(self, run: str) -> str:
        """The report that a run keeps by itself."""
        return (self.folder / "runs" / run / "report.html").read_text()

    def saved(self, run: str) -> list[Path]:
        """What is published of a run, oldest first; no command is needed to see it."""
        found = (self.folder / "runs" / run / "checkpoints").glob("step-*/manifest.json")
        return sorted(path.parent for path in found)

    def weights(self, run: str, to: str = "weights.pt") -> dict[str, Any]:
        """The newest weights, by ``slurm-forge export``."""
        import torch

        done = self.forge("export", run, "--to", to, "--checkpoint", "latest", "--force")
        assert done.code == 0, done.text
        return dict(torch.load(self.folder / to, weights_only=True))


def finish(process: subprocess.Popen[str]) -> Done:
    """Its end; whatever it has started is gone when a test gives up."""
    try:
        out, err = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{process.args} did not end:\n{out}\n{err}") from None
    return Done(process.returncode, out, err)


def incidents(story: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of all attempts and launches, in order, from what ``explain --json`` says."""
    launches = [launch for attempt in story["attempts"] for launch in attempt["launches"]]
    return [incident for launch in launches for incident in launch["incidents"]]


def causes(story: Mapping[str, Any]) -> list[str]:
    """Their causes."""
    return [each["cause"] for each in incidents(story)]


def _of_others(name: str) -> bool:
    return name.startswith(("SLURM", "SBATCH", "SRUN", "SUBMITIT", "XDG_", "PMI"))
