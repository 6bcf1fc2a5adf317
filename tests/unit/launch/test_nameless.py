"""A user who has no name, as in a container without an entry for whoever runs in it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_forge.journal import read_journal
from slurm_forge.journal.events import UserAsked
from slurm_forge.launch.local import runner as local
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import (
    create_run,
    submit_script,
)
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file


@pytest.fixture(autouse=True)
def nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as it does: KeyError


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    job = job_from_mapping({"name": "run", "entry": "a.b:train"})
    site = find_site("generic")
    return create_run(job, runs=tmp_path / "runs", site=site, submitted_from=tmp_path)[0]


def asked(run: RunDirectory) -> list[tuple[str, str]]:
    events = [record.event for record in read_journal(run)[0]]
    return sorted((event.verb, event.user) for event in events if isinstance(event, UserAsked))


def test_a_number_is_better_than_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert person() == str(os.getuid())
    monkeypatch.setenv("USER", "ada")
    assert person() == "ada"


def test_submitting_works(run: RunDirectory) -> None:
    slurm = SimpleNamespace(submit=lambda script, args: "77")
    assert submit_script(run, read_run_file(run.spec_file), find_site("generic"), slurm) == "77"
    assert asked(run) == [("submit", str(os.getuid()))]


def test_running_here_and_stopping_work(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local._LocalRun, "train", lambda self, ranks: self._stop() or 0)
    assert local.run_locally(run, read_run_file(run.spec_file), 1, lambda: None) == 0
    assert asked(run) == [("run", str(os.getuid())), ("stop", str(os.getuid()))]
