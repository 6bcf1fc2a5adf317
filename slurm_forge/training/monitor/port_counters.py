"""Error counters of network interfaces: read at the start, and again on request.

Reading may wait for a broken adapter's firmware, so a thread does it that nobody waits for.
Sources: ``Documentation/ABI/stable/sysfs-class-infiniband`` and ``…/testing/sysfs-class-net*`` of
Linux.  The Infiniband part is written from there, and has not been tried on such hardware.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys")
#: Each of them is constant on a healthy link, so that any difference is significant.
_INFINIBAND = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_ETHERNET = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")
_MOST_LINES = 16


@dataclass(frozen=True, slots=True)
class PortCount:
    """The answer to a numbered request: ``mlx5_0/1 link_downed +1``, a line per counter."""

    number: int
    lines: tuple[str, ...]


class PortCounters:
    """Counts from now on.  Both methods return at once."""

    def __init__(self, sysfs: Path = _SYSFS) -> None:
        self._sysfs = sysfs
        self._first: dict[str, int] | None = None
        self._counted: PortCount | None = None
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._thread.start()

    def read_again(self, number: int) -> None:
        """Start reading what was counted since; not while the last reading is still running."""
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._compare, args=(number,), daemon=True)
            self._thread.start()

    def counted(self) -> PortCount | None:
        """The answer, once."""
        count, self._counted = self._counted, None
        return count

    def _begin(self) -> None:
        self._first = read_counters(self._sysfs)

    def _compare(self, number: int) -> None:
        lines = differences(self._first or {}, read_counters(self._sysfs))
        self._counted = PortCount(number, lines)


def read_counters(sysfs: Path) -> dict[str, int]:
    """All readable counters, by ``port counter``; virtual interfaces are ignored."""
    counters: dict[str, int] = {}
    for port in sorted((sysfs / "class" / "infiniband").glob("*/ports/*")):
        name = f"{port.parent.parent.name}/{port.name}"
        for counter in _INFINIBAND:
            _add(counters, f"{name} {counter}", port / "counters" / counter)
    for interface in sorted((sysfs / "class" / "net").glob("*")):
        if not (interface / "device").exists():
            continue
        for counter in _ETHERNET:
            _add(counters, f"{interface.name} {counter}", interface / "statistics" / counter)
        _add(counters, f"{interface.name} carrier_changes", interface / "carrier_changes")
    return counters


def differences(before: Mapping[str, int], now: Mapping[str, int]) -> tuple[str, ...]:
    """The increases, largest first; a counter that was reset in between is ignored."""
    grown = {name: count - before[name] for name, count in now.items() if name in before}
    most = sorted((name for name in grown if grown[name] > 0), key=lambda name: -grown[name])
    return tuple(f"{name} +{grown[name]}" for name in most[:_MOST_LINES])


def _add(counters: dict[str, int], name: str, path: Path) -> None:
    try:
        counters[name] = int(path.read_text())
    except (OSError, ValueError):
        return
