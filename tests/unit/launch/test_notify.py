"""Messages from runs: what is sent, once, to real servers; what misbehaves holds up nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from slurm_forge.cli.main import application
from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.errors import ConfigError, ForgeError, UnsafeFileError
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import AttemptEnded, AttemptStarted, DecisionTaken
from slurm_forge.journal.line_reader import Piece, read_pieces
from slurm_forge.knobs import Knobs
from slurm_forge.launch.notify.apprise_message import OutgoingMessage
from slurm_forge.launch.notify.delivery import Errors, deliver
from slurm_forge.launch.notify.main import _accompany, _Input
from slurm_forge.launch.notify.send_times import SendTimes
from slurm_forge.launch.notify.sender import RunSender
from slurm_forge.launch.notify.sender_process import notifications
from slurm_forge.launch.notify.targets import Target, read_targets
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run, renew_run
from slurm_forge.launch.watch.run_notifications import RunNotifications
from slurm_forge.recovery.notices import MOST_PER_HOUR
from slurm_forge.recovery.run_watch import FindingKind, WatchFinding
from slurm_forge.report.status.status import take_status
from slurm_forge.run_directory import RunDirectory
from slurm_forge.run_directory.sent_messages import Outcome, read_sent
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.launch.message_servers import (
    PASSWORD,
    hanging,
    mail_server,
    refusing,
    webhook,
)

WITHIN_S = 60.0
REASON = "app_error: KeyError: 'loss' twice in a row; next: fix the key"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's configuration folder."""
    folder = tmp_path / "config" / "slurm_forge"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


def targets(home: Path, **urls: str) -> Path:
    path = home / "notify.yaml"
    path.touch(mode=0o600)
    path.write_text("".join(f'{name}: "{url}"\n' for name, url in urls.items()))
    return path


def new_run(folder: Path, *to: str, **notify: object) -> RunDirectory:
    job = {"name": "tiny", "entry": "train:main", "notify": {"to": list(to), **notify}}
    run, _ = create_run(
        job_from_mapping(job), runs=folder / "runs", site=find_site("generic"),
        submitted_from=folder, python=sys.executable,
    )  # fmt: skip
    return run


def hold(run: RunDirectory, attempt: int = 1, clock: Callable[[], float] = time.time) -> None:
    journal = JournalWriter(run, attempt=attempt, writer="supervisor", launch=1, clock=clock)
    journal.write(AttemptStarted(job="42", restart_count=0, nodes=("n1",), host="n1", via="sbatch"))
    decision = Decision(
        incident_id=f"{attempt}.1", cause=Cause.APP_ERROR, action=Action.HOLD, reason=REASON,
        plan=RecoveryPlan(), rung=0,
    )  # fmt: skip
    journal.write(DecisionTaken(decision=decision))
    journal.write(AttemptEnded(outcome="held"))
    journal.close()


def knobs() -> Knobs:
    return Knobs.from_environ(os.environ)


def for_seconds(seconds: float) -> Callable[[], float]:
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


def anything_with_the_password(folder: Path, *, besides: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path != besides)
    return [path for path in files if PASSWORD.encode() in path.read_bytes()]


# -- real servers ----------------------------------------------------------------------------------


@pytest.fixture
def before() -> Set[int]:
    """Children of earlier tests: a DataLoader that spawns leaves one that ignores SIGTERM."""
    resource_tracker.ensure_running()
    return _children(os.getpid())


def test_a_held_run_tells_every_target_once_with_reason_next_step_and_report(
    home: Path, tmp_path: Path, before: Set[int]
) -> None:
    with mail_server() as mail, webhook() as hook:
        secret = targets(home, me=mail.url, team=hook.url)
        run = new_run(tmp_path, "me", "team")
        spec = read_run_file(run.spec_file).job.notify
        with notifications(run, spec, end_waits=timedelta(seconds=WITHIN_S)):
            # What holds a run also has Slurm end its job: SIGTERM for every process.
            sender = _ready_sender(before)
            os.kill(sender, signal.SIGTERM)
            process = Path(f"/proc/{sender}")
            own = Path("/proc/self/oom_score_adj").read_text()
            assert (process / "oom_score_adj").read_text() == own, "Slurm would blame the job"
            assert re.search(r"Max data size +536870912 ", (process / "limits").read_text())
            hold(run)
            run.report_file.write_text("<p>what happened</p>")
            os.utime(run.report_file, (time.time(), time.time()))
        (post,) = hook.posts
        (sent,) = mail.mails
        assert post["title"].startswith("tiny: held: app_error: KeyError: 'loss'")
        assert "Next: fix the key; then slurm-forge requeue " in post["message"]
        assert "Job: 42, attempt 1" in post["message"]
        (attached,) = post["attachments"]
        assert attached["filename"] == "report.html"
        assert sent["subject"] == post["title"]
        assert any(part.get_filename() == "report.html" for part in sent.walk())
        # The next attempt and any watcher have nothing to add.
        watcher = RunNotifications(knobs(), ticks=lambda: 0.0)
        watcher.look([run], {})
        assert RunSender(run, knobs()).send(for_seconds(30)) == {}
        assert (len(hook.posts), len(mail.mails)) == (1, 1)
    assert anything_with_the_password(tmp_path, besides=secret) == []


def _ready_sender(before: Set[int]) -> int:
    """The only child of this process that was not there before, once it ignores SIGTERM."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        assert time.monotonic() < deadline
        for pid in _children(os.getpid()) - before:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            ignored = int(next(x for x in lines if x.startswith("SigIgn")).split()[1], 16)
            if ignored & 1 << (signal.SIGTERM - 1):
                return pid
        time.sleep(0.02)


def test_targets_that_fail_show_in_the_status_without_their_secrets(
    home: Path, tmp_path: Path
) -> None:
    with mail_server(password="another") as mail, webhook() as hook:
        secret = targets(home, wrong=mail.url, good=hook.url, nobody=refusing())
        run = new_run(tmp_path, "nobody", "wrong", "good")
        hold(run)
        errors = RunSender(run, knobs()).send(for_seconds(WITHIN_S))
        assert len(hook.posts) == 1 and not mail.mails
    assert set(errors) == {"nobody", "wrong"}
    assert "refused" in errors["nobody"] and "535" in errors["wrong"]
    assert PASSWORD not in json.dumps(errors)
    status = take_status(gather(run))
    for target in errors:
        (line,) = [each for each in status.warnings if f"notification to {target} " in each]
        assert f"slurm-forge notify --test {target}" in line
    assert not any("notification to good" in each for each in status.warnings)
    assert anything_with_the_password(tmp_path, besides=secret) == []


def test_a_target_that_hangs_holds_up_no_other_and_is_ended(home: Path, before: Set[int]) -> None:
    with hanging() as hangs, webhook() as hook:
        targets(home, hangs=hangs, good=hook.url)
        deadline = time.monotonic() + WITHIN_S
        message = OutgoingMessage(title="x", body="y")
        errors = deliver(
            {"hangs": message, "good": message},
            lambda: 0.0 if hook.posts else deadline - time.monotonic(),
        )
    assert errors["hangs"].startswith("no answer within ")
    assert time.monotonic() < deadline
    assert _shown_of_descendants(before) == []


def test_a_sender_that_cannot_be_started_leaves_no_other_behind(
    home: Path, before: Set[int]
) -> None:
    with hanging() as hangs:
        targets(home, hangs=hangs)
        message = OutgoingMessage(title="x", body="y")
        with pytest.raises(ValueError, match="null byte"):
            deliver({"hangs": message, "\0": message}, for_seconds(WITHIN_S))
        assert _shown_of_descendants(before) == []


def test_the_end_of_an_attempt_waits_for_a_few_seconds_and_nothing_shows_the_url(
    home: Path, tmp_path: Path, before: Set[int]
) -> None:
    with hanging() as hangs:
        targets(home, hangs=hangs)
        run = new_run(tmp_path, "hangs")
        hold(run)
        seen: list[bytes] = []
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.1):
                seen.extend(_shown_of_descendants(before))

        thread = threading.Thread(target=look)
        thread.start()
        began = time.monotonic()
        with notifications(run, read_run_file(run.spec_file).job.notify):
            began = time.monotonic()
        took = time.monotonic() - began
        stop.set()
        thread.join()
    assert took < 8
    assert any(b"send_message" in each for each in seen), "nothing was looked at"
    assert not any(PASSWORD.encode() in each for each in seen)
    (last,) = read_sent(run).tries.values()
    assert last.outcome is not Outcome.SENT, "it is repeated by whoever looks next"


def _children(pid: int) -> Set[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(each) for task in tasks for each in (task / "children").read_text().split()}


def _shown_of_descendants(before: Set[int]) -> list[bytes]:
    """Arguments and environments below this process, but for those of earlier tests."""
    shown: list[bytes] = []
    below = list(_children(os.getpid()) - before)
    for each in below:
        with contextlib.suppress(OSError):
            shown += [Path(f"/proc/{each}/{x}").read_bytes() for x in ("cmdline", "environ")]
            below += _children(each)
    return shown


def test_what_a_killed_batch_step_could_not_send_a_watcher_does(home: Path, tmp_path: Path) -> None:
    with webhook() as hook:
        targets(home, team=hook.url)
        run = new_run(tmp_path, "team")
        hold(run)
        watcher = RunNotifications(knobs(), ticks=lambda: 0.0)
        watcher.look([run], {})
        watcher.finish(timedelta(seconds=WITHIN_S))
        assert len(hook.posts) == 1
        stuck = WatchFinding(
            run="tiny", kind=FindingKind.DEAD, job="42", words="job 42 is not in the queue",
            next="slurm-forge requeue tiny", person=True, key="dead|42|1|",
        )  # fmt: skip
        for _ in range(2):
            watcher.look([run], {str(run.path): [stuck]})
            watcher.finish(timedelta(seconds=WITHIN_S))
        assert [post["title"] for post in hook.posts[1:]] == ["tiny: job 42 is not in the queue"]


def test_a_test_message_is_sent_now_or_says_why_not(home: Path, tmp_path: Path) -> None:
    def notify(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(application("notify"), ["notify", *words])
        return result.exit_code, result.output

    assert notify()[0] == 2, "there is no file of targets"
    with webhook() as hook, webhook(status=401) as other:
        targets(home, team=hook.url, wrong=other.url)
        assert notify() == (0, "team  json\nwrong  json\n")
        assert notify("--test", "team") == (0, "sent to team (json)\n")
        assert "test of the notification target team" in hook.posts[0]["message"]
        code, told = notify("--test", "wrong")
        assert code == 2 and "401" in told and PASSWORD not in told
        code, told = notify("--test", "tame")
        assert code == 2 and 'did you mean "team"' in told


# -- what is refused -------------------------------------------------------------------------------


def test_a_job_whose_messages_could_not_be_sent_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no such file"):
        new_run(tmp_path, "me")
    path = targets(home, me=f"json://user:{PASSWORD}@127.0.0.1")
    with pytest.raises(ConfigError, match=r"no target 'you'"):
        new_run(tmp_path, "you")
    path.chmod(0o640)
    with pytest.raises(UnsafeFileError, match=r"can be read or written by other users \(mode 0640"):
        new_run(tmp_path, "me")
    path.chmod(0o600)
    monkeypatch.setitem(sys.modules, "apprise", None)
    monkeypatch.delitem(sys.modules, "apprise")
    monkeypatch.setattr("slurm_forge.launch.notify.targets.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        new_run(tmp_path, "me")
    assert "pip install 'slurm_forge[notify]'" in str(refused.value)
    assert not (tmp_path / "runs").exists()
    assert new_run(tmp_path).spec_file.is_file(), "a job without targets needs nothing of it"


def test_nobody_is_shown_a_url_that_is_written_in_the_wrong_place(
    home: Path, tmp_path: Path
) -> None:
    url = f"mailto://user:{PASSWORD}@example.org"
    with pytest.raises(ConfigError) as in_job:
        new_run(tmp_path, url)
    assert "notify.yaml" in str(in_job.value) and PASSWORD not in str(in_job.value)
    path = home / "notify.yaml"
    path.touch(mode=0o600)
    for text in (
        f"me: [{url}]",
        f"me {url}",
        f"- {url}",
        f"me: '{url}",
        f"{url}: me",
        f"me: {url}: x",
    ):
        path.write_text(text)
        with pytest.raises(ForgeError) as wrong:
            read_targets(path)
        assert PASSWORD not in str(wrong.value), text
        assert wrong.value.next_step
    assert PASSWORD not in repr(Target("me", url))


@given(
    st.lists(st.text("abcXYZ019._~%-", min_size=3, max_size=12), min_size=1, max_size=5), st.data()
)
def test_nothing_of_a_url_is_left_in_what_a_service_says(
    parts: list[str], data: st.DataObject
) -> None:
    target = Target("me", "slack://" + "/".join(parts))
    said = data.draw(st.lists(st.sampled_from(["error", " ", ":", *parts])))
    cleaned = target.without_secrets("".join(said))
    assert not any(part in cleaned for part in parts)


@given(
    st.text("abZ0 /+%@!:~é", min_size=3, max_size=12),
    st.text("/+@!:~", max_size=4),
    st.sampled_from([quote, quote_plus]),
)
def test_a_secret_is_hidden_however_a_service_encodes_it(
    secret: str, safe: str, encoded: Callable[..., str]
) -> None:
    for written in (quote(secret, safe=""), quote_plus(secret)):
        target = Target("me", f"json://user:{written}@127.0.0.1")
        said = encoded(secret, safe=safe)
        lower = re.sub("%..", lambda each: each[0].lower(), said)
        for each in (secret, said, lower):
            assert target.without_secrets(f"<{each}>") == "<***>"


def test_run_yaml_holds_names_and_a_change_of_targets_is_no_change_of_the_result(
    home: Path, tmp_path: Path
) -> None:
    targets(home, me=f"json://user:{PASSWORD}@127.0.0.1", team="json://127.0.0.1")
    run = new_run(tmp_path, "me")
    assert PASSWORD not in run.spec_file.read_text() and "to: [me]" in run.spec_file.read_text()
    file = read_run_file(run.spec_file)
    now = file.job.model_copy(
        update={"notify": file.job.notify.model_copy(update={"to": ("team",)})}
    )
    assert renew_run(run, file, now, tmp_path / "job.yaml").job.notify.to == ("team",)


# -- once ------------------------------------------------------------------------------------------


class Service:
    """Takes messages as a target would, or fails, or dies with its sender."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.answers = list(answers)
        self.got: list[tuple[str, OutgoingMessage]] = []
        self._lock = threading.Lock()

    def __call__(
        self, messages: Mapping[str, OutgoingMessage], within: Callable[[], float]
    ) -> Errors:
        with self._lock:
            answer = self.answers.pop(0) if self.answers else ""
            self.got += messages.items()
        if isinstance(answer, BaseException):
            raise answer
        return dict.fromkeys(messages, answer)


class Killed(BaseException):
    """The sender is gone between the message and the note of it."""


def test_a_report_of_before_the_end_is_not_attached_and_the_right_one_is_waited_for(
    home: Path, tmp_path: Path
) -> None:
    targets(home, me="json://127.0.0.1")
    run = new_run(tmp_path, "me")
    run.report_file.write_text("<p>running</p>")
    now, service = [time.time()], Service()
    os.utime(run.report_file, (now[0] - 5, now[0] - 5))
    hold(run, clock=lambda: now[0])
    RunSender(run, knobs(), deliver=service, clock=lambda: now[0]).send(for_seconds(30))
    ((_, message),) = service.got
    assert message.attachment is None
    assert f"Report: {run.report_file}" in message.body and "attached" not in message.body

    service.got.clear()
    again = new_run(tmp_path / "again", "me")
    again.report_file.write_text("<p>running</p>")
    os.utime(again.report_file, (now[0] - 5, now[0] - 5))
    hold(again, clock=lambda: now[0])
    sender = RunSender(
        again, knobs(), deliver=service, clock=lambda: now[0], report_within=timedelta(seconds=60)
    )
    sender.send(for_seconds(30))
    assert service.got == [] and sender.waits_for_report
    os.utime(again.report_file, (now[0] + 1, now[0] + 1))
    sender.send(for_seconds(30))
    ((_, message),) = service.got
    assert message.attachment == str(again.report_file) and not sender.waits_for_report

    service.got.clear()
    without = new_run(tmp_path / "without", "me")
    hold(without, clock=lambda: now[0])
    sender = RunSender(
        without, knobs(), deliver=service, clock=lambda: now[0], report_within=timedelta(seconds=60)
    )
    sender.send(for_seconds(30))
    assert service.got == []
    now[0] += 61
    sender.send(for_seconds(30))
    assert len(service.got) == 1, "it does not wait for long"


def test_a_look_reads_only_what_was_written_since_the_last_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets(home, me="json://127.0.0.1")
    run = new_run(tmp_path, "me")
    hold(run)
    read: list[int] = []

    def noted(path: Path, offset: int) -> Iterator[Piece]:
        read.append(offset)
        return read_pieces(path, offset)

    monkeypatch.setattr("slurm_forge.journal.tail.read_pieces", noted)
    service = Service()
    sender = RunSender(run, knobs(), deliver=service)
    sender.send(for_seconds(30))
    assert read and set(read) == {0}
    read.clear()
    sender.send(for_seconds(30))
    assert read == []
    hold(run, attempt=2)
    sender.send(for_seconds(30))
    assert read == [0], "the file of the second attempt alone"
    assert len(service.got) == 2


def test_of_any_number_of_senders_one_sends(home: Path, tmp_path: Path) -> None:
    targets(home, me="json://127.0.0.1")
    run = new_run(tmp_path, "me")
    hold(run)
    service, gate = Service(), threading.Barrier(8)

    def send() -> None:
        sender = RunSender(run, knobs(), deliver=service)
        gate.wait(WITHIN_S)
        sender.send(for_seconds(30))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [name for name, _ in service.got] == ["me"]


def test_who_dies_while_sending_is_followed_by_another_after_a_while(
    home: Path, tmp_path: Path
) -> None:
    targets(home, me="json://127.0.0.1")
    run = new_run(tmp_path, "me")
    hold(run)
    now = [time.time()]
    service = Service(Killed(), "refused", "")
    sender = RunSender(run, knobs(), deliver=service, clock=lambda: now[0])
    with pytest.raises(Killed):
        sender.send(for_seconds(30))
    assert sender.send(for_seconds(30), at_once=True) == {}, "it may be sending still"
    now[0] += 121
    assert sender.send(for_seconds(30)) == {"me": "refused"}
    assert sender.send(for_seconds(30)) == {}, "it is not tried again at once"
    assert sender.send(for_seconds(30), at_once=True) == {}
    assert [each.number for each in read_sent(run).tries.values()] == [3]
    now[0] += 3600
    assert sender.send(for_seconds(30)) == {}
    assert len(service.got) == 3


def test_a_target_that_never_works_is_given_up(home: Path, tmp_path: Path) -> None:
    targets(home, me="json://127.0.0.1")
    run = new_run(tmp_path, "me")
    hold(run)
    now = [time.time()]
    service = Service(*["down"] * 100)
    sender = RunSender(run, knobs(), deliver=service, clock=lambda: now[0])
    for _ in range(20):
        sender.send(for_seconds(30))
        now[0] += 3600
    assert len(service.got) == 4


def test_what_is_older_than_a_day_or_not_wanted_is_not_sent(home: Path, tmp_path: Path) -> None:
    targets(home, me="json://127.0.0.1")
    run = new_run(tmp_path, "me", events=["finished"])
    hold(run)
    service = Service()
    RunSender(run, knobs(), deliver=service).send(for_seconds(30))
    old = new_run(tmp_path / "old", "me")
    hold(old, clock=lambda: time.time() - 2 * 86400)
    RunSender(old, knobs(), deliver=service).send(for_seconds(30))
    assert service.got == []


def test_a_target_gets_so_many_messages_an_hour_of_all_runs(home: Path, tmp_path: Path) -> None:
    targets(home, me="json://127.0.0.1")
    now, service = [time.time()], Service()
    for _ in range(MOST_PER_HOUR - 1):
        SendTimes(knobs().state_folder / "notify").add(["me"], now[0])
    runs = [new_run(tmp_path / str(number), "me") for number in range(3)]

    def send() -> list[str]:
        service.got.clear()
        for run in runs:
            RunSender(run, knobs(), deliver=service, clock=lambda: now[0]).send(for_seconds(30))
        return [message.body for _, message in service.got]

    for run in runs:
        hold(run)
    (only,) = send()
    assert "many messages within an hour" in only
    now[0] += 3601
    waited = send()
    assert len(waited) == 2, "those that waited, and no other again"
    assert not any("many messages" in each for each in waited), "the others are of an hour ago"


# -- what looking costs ----------------------------------------------------------------------------


def test_looks_at_a_long_journal_take_a_small_share_of_the_time(tmp_path: Path) -> None:
    run, spent, pauses = new_run(tmp_path), [0.0], list[float]()
    takes = [0.1, 2.5, 2.5]

    class Looks(RunSender):
        def send(self, *_: object, **__: object) -> Errors:
            spent[0] += takes.pop(0)
            return {}

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            hold(run)  # rank 0 has written
            pauses.append(timeout or 0.0)
            return not takes

    class Given(_Input):
        def __init__(self) -> None:
            self.ended = Ended()
            self._deadline = float("inf")

    _accompany(run, Looks(run, knobs()), Given(), lambda: spent[0])
    assert pauses == pytest.approx([5.0, 5.0, 50.0, 50.0])


def test_a_watcher_reads_live_runs_for_a_small_share_of_the_time(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets(home, me="json://127.0.0.1")
    run, ticks, looks = new_run(tmp_path, "me"), [0.0], list[float]()

    def due(*_: object) -> tuple[()]:
        looks.append(ticks[0])
        ticks[0] += 2.5
        return ()

    monkeypatch.setattr(RunSender, "due", due)
    watcher = RunNotifications(knobs(), ticks=lambda: ticks[0])
    for _ in range(12):
        hold(run)
        watcher.look([run], {})
        ticks[0] += 5
    assert looks == [0.0, 52.5]


# -- from the batch step ---------------------------------------------------------------------------


#: ``slurm-forge`` whose attempts wait longer for the last message, since this machine may be busy,
#: and not for Slurm, which is none, to end the job.
PATIENT = """
from datetime import timedelta
from functools import partial
from slurm_forge.cli.main import main
from slurm_forge.launch.attempt import job_attempt
from slurm_forge.launch.command import main as command
command._ENDED_WITHIN = timedelta(0)
job_attempt.notifications = partial(job_attempt.notifications, end_waits=timedelta(seconds=60))
main()
"""


def test_the_batch_step_of_a_run_that_is_held_sends(home: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("scontrol", "squeue", "sacct", "scancel", "sbatch"):
        (programs / name).write_text(f"#!/bin/sh\necho {name} $* >> {tmp_path}/asked\n")
        (programs / name).chmod(0o700)
    (tmp_path / "job.yaml").write_text(
        "name: x\nnotify: {to: [team], events: [held]}\nreport: false\n"
        "recovery: {crash: [{do: hold}]}\n"
    )
    with webhook() as hook:
        targets(home, team=hook.url)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        done = subprocess.run(
            [sys.executable, "-c", PATIENT, "exec", "--job", "job.yaml", "--",
             "bash", "-c", "echo KeyError: 3 >&2; exit 7"],
            check=False,
            cwd=tmp_path,
            env={
                **environment,
                "PATH": f"{programs}:{environment['PATH']}",
                "SLURM_FORGE_NODES": "off",
                "SLURM_JOB_ID": "5",
                "SLURM_STEP_ID": "-5",
                "SLURM_CONF": "/dev/null",
            },
            capture_output=True,
            text=True,
            timeout=3 * WITHIN_S,
        )  # fmt: skip
        assert "held" in done.stderr, done.stderr
        (post,) = hook.posts
    assert "held: crash" in post["title"]
    assert "Job: 5" in post["message"]
    assert "scontrol requeuehold 5" in (tmp_path / "asked").read_text()
