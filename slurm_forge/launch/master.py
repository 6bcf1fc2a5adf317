"""What torchrun and the like are told of the first node, by the site's rule."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from slurm_forge.control.interfaces import preferred_address
from slurm_forge.site.parts import MasterAddress
from slurm_forge.spec.run_file import RunFile

__all__ = ["master_address"]


def _address(name: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeError):
        return socket.gethostbyname(name)
    return None


def master_address(
    file: RunFile,
    first_node: str | None,
    *,
    this_node: str | None,
    address: Callable[[str], str | None] = _address,
    through: Callable[[str | None, str | None], str | None] = preferred_address,
) -> str | None:
    """The name or the address of ``first_node``; None where the site says nothing of it.

    The address of an interface can only be asked for on the node itself (``this_node``): of
    another one, and where a name has no address, the name with the site's suffix is told.
    """
    rule = file.master_address
    if first_node is None or (rule is None and file.host_suffix is None):
        return None
    name = first_node + (file.host_suffix or "")
    if rule is MasterAddress.ADDRESS:
        return address(name) or name
    if rule is MasterAddress.INTERFACE and first_node == this_node:
        return through(file.socket_interface, None) or name
    return name
