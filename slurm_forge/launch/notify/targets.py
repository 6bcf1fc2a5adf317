"""The user's targets: names, and the URLs behind them, which hold passwords and tokens.

The URLs are in ``notify.yaml`` in the user's configuration folder, and nowhere else: not in a job
file, ``run.yaml``, the journal, an environment or the arguments of a process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, unquote_plus

from slurm_forge.documents import did_you_mean
from slurm_forge.documents.reading import load
from slurm_forge.errors import ConfigError
from slurm_forge.files import open_trusted, refuse_readable
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.run_directory.sent_messages import TARGET_NAME

if TYPE_CHECKING:
    from slurm_forge.spec.notifications import NotifySpec

_LIMIT = 1 << 16
_GUIDE = "docs/how-to/notifications.md"
#: The delimiters between the parts of a URL.
_BETWEEN = re.compile(r"[/:@?&=,;#\s]+")
_HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Target:
    """A target; its URL is never shown."""

    name: str
    url: str = field(repr=False)

    @property
    def service(self) -> str:
        """The service behind it, such as ``mailto`` or ``slack``."""
        return self.url.partition("://")[0]

    def without_secrets(self, text: str) -> str:
        """Foreign text with every part of the URL replaced, however it is encoded."""
        parts = {self.url, *_BETWEEN.split(self.url.partition("://")[2])}
        forms = {form for part in parts for form in (part, unquote(part), unquote_plus(part))}
        for form in sorted(forms, key=len, reverse=True):
            if len(form) > 2:
                text = re.sub("".join(map(_encoded, form)), _HIDDEN, text)
        return text


def _encoded(character: str) -> str:
    """A pattern for a character as it is, and as it may be written in a URL."""
    data = character.encode(errors="surrogatepass")
    percent = "".join(f"%{byte:02x}" for byte in data)
    # The longer first: of %25 nothing must be left.
    return f"(?:(?i:{percent})|{re.escape(character)}{'|[+]' if character == ' ' else ''})"


def read_targets(path: Path) -> dict[str, Target]:
    """The targets in the user's file, by name.

    Raises:
        ConfigError: It is missing, or not a mapping of names to URLs; no message repeats a URL.
        UnsafeFileError: Others can read or write it.
    """
    try:
        descriptor = open_trusted(path)
    except FileNotFoundError:
        raise ConfigError(
            "there is no such file, and the URLs of notification targets belong in it",
            path=path,
            next_step=f"Make it, for you alone (chmod 600), with lines NAME: URL ({_GUIDE}).",
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        refuse_readable(path, os.fstat(file.fileno()))
        data = file.read(_LIMIT)
    try:
        body = load(data.decode("utf-8-sig"), path, may_be_empty=True)
    except (ConfigError, UnicodeDecodeError) as error:
        line = getattr(error, "line", None)
    else:
        return {
            name: Target(name, _url(value, name, path, body.line_of((name,))))
            for name, value in body.data.items()
        }
    # What the reader complains about it also quotes.
    raise ConfigError(
        "this is not YAML with lines NAME: URL",
        path=path,
        line=line,
        next_step='Put URLs with special characters between quotes: me: "mailto://…".',
    )


def _url(value: object, name: str, path: Path, line: int | None) -> str:
    if not TARGET_NAME.fullmatch(name):
        raise ConfigError(
            "a target's name is 1 to 32 letters, digits and underscores",
            path=path,
            line=line,
            next_step="Write each target as NAME: URL.",
        )
    if not isinstance(value, str) or "://" not in value:
        raise ConfigError(
            f"{name}: expected a URL of Apprise as text",
            path=path,
            line=line,
            next_step=f'For example {name}: "mailto://USER:PASSWORD@example.org" ({_GUIDE}).',
        )
    return value


def chosen_targets(names: Iterable[str], targets: Mapping[str, Target], path: Path) -> list[Target]:
    """The targets of those names; ``ConfigError`` for an unknown one."""
    for name in names:
        if name not in targets:
            raise ConfigError(
                f"there is no target {name!r} {did_you_mean(name, targets)}",
                path=path,
                next_step=f'Add a line {name}: "URL" to it, or name another target in notify.to.',
            )
    return [targets[name] for name in dict.fromkeys(names)]


def require_apprise() -> None:
    """``ConfigError`` if Apprise, which sends everything, is not installed."""
    with contextlib.suppress(ImportError, ValueError):
        if find_spec("apprise") is not None:
            return
    raise ConfigError(
        "notify: messages are sent by Apprise, which is not installed",
        next_step="pip install 'slurm_forge[notify]', or leave notify.to empty.",
    )


def refuse_unsendable(spec: NotifySpec, path: Path | None = None) -> None:
    """Refuse a job whose messages could not be sent by this user from here.

    Args:
        spec: What the job says.
        path: The user's file of targets; None is where it usually is.

    Raises:
        ConfigError: Apprise is missing, or a target is not in the file.
        UnsafeFileError: Others can read or write the file.
    """
    if spec.to:
        require_apprise()
        path = path or Knobs.from_environ(process_environ()).targets_file
        chosen_targets(spec.to, read_targets(path), path)
