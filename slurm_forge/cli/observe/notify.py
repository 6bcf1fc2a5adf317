"""``notify``: the targets of messages, and a test of one."""

from __future__ import annotations

from typing import Annotated

import typer

#: As long as a message of a watcher may take.
_LONGEST_S = 30.0


def notify(
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="TARGET", help="Send this target a test message now."),
    ] = None,
) -> None:
    """List your notification targets, or test one.

    Their URLs are in notify.yaml in your configuration folder, which only you can read; a job
    file names the targets (notify: {to: [me]}).

    \b
    Examples:
      slurm-forge notify
      slurm-forge notify --test me
    """
    import socket
    import time

    from slurm_forge.errors import ConfigError
    from slurm_forge.knobs import Knobs, process_environ
    from slurm_forge.launch.notify.delivery import deliver
    from slurm_forge.launch.notify.message_text import test_message
    from slurm_forge.launch.notify.targets import chosen_targets, read_targets, require_apprise

    path = Knobs.from_environ(process_environ()).targets_file
    targets = read_targets(path)
    if test is None:
        for name, target in targets.items():
            typer.echo(f"{name}  {target.service}")
        return
    require_apprise()
    chosen_targets([test], targets, path)
    deadline = time.monotonic() + _LONGEST_S
    messages = {test: test_message(test, socket.gethostname())}
    error = deliver(messages, lambda: deadline - time.monotonic())[test]
    if error:
        raise ConfigError(
            f"{test}: the test message was not sent: {error}",
            path=path,
            next_step="Compare its URL with https://appriseit.com/services, and whether this host "
            "reaches the server.",
        )
    typer.echo(f"sent to {test} ({targets[test].service})")
