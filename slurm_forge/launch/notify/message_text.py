"""What a message says: plain text, for a telephone."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_forge.launch.notify.apprise_message import OutgoingMessage
from slurm_forge.recovery.notices import EventNotice

_LONGEST_TITLE = 120
_LONGEST_LINE = 500
#: Nobody reads more than that in one message.
_MOST_NOTICES = 20


def message_of(
    notices: Sequence[EventNotice],
    *,
    run: str,
    path: str,
    job: str,
    attempt: int | None,
    report: str | None,
    attached: bool,
    last_for_now: bool = False,
) -> OutgoingMessage:
    """One message about all notices, what a run ended with first.

    Args:
        notices: At least one.
        run: The name of the run.
        path: Its folder.
        job: Its job; empty if it has none.
        attempt: Its newest attempt.
        report: The path of its report, if there is one.
        attached: Whether the report is attached to the message.
        last_for_now: Whether the target gets no more messages for a while.
    """
    ordered = sorted(notices, key=lambda each: (not each.event.is_last, -each.time))
    lines: list[str] = []
    for each in ordered[:_MOST_NOTICES]:
        lines += [_line(each.words), f"Next: {_line(each.next)}", ""]
    if len(ordered) > _MOST_NOTICES:
        lines += [f"and {len(ordered) - _MOST_NOTICES} more events", ""]
    of_attempt = "" if attempt is None else f", attempt {attempt}"
    lines.append(f"Run: {_line(path)}")
    if job:
        lines.append(f"Job: {_line(job)}{of_attempt}")
    if report is not None:
        lines.append(f"Report: {_line(report)}{' (attached)' if attached else ''}")
    if last_for_now:
        lines.append("This target received many messages within an hour; further ones are delayed.")
    return OutgoingMessage(
        title=_cut(_line(f"{run}: {ordered[0].words}"), _LONGEST_TITLE),
        body="\n".join(lines),
        attachment=report if attached else None,
    )


def test_message(target: str, host: str) -> OutgoingMessage:
    """What ``slurm-forge notify --test`` sends."""
    return OutgoingMessage(
        title="slurm_forge: test message",
        body=f"This is a test of the notification target {target}, sent from {_line(host)}.\n"
        "Next: nothing to do.",
    )


def _line(text: str) -> str:
    """Foreign text on one line, so that it can't begin another header."""
    one_line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return _cut(one_line, _LONGEST_LINE)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
