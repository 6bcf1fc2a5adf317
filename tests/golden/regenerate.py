"""``python -m tests.golden.regenerate``: write the golden files anew, and show what differs.

Read the difference before it is committed.  A line that is new is a new kind or a new field.  A
line that changed, or went, is something that files, scripts and processes of today no longer
agree on: keep the old one in ``files/earlier/``, where a test sees that it is still read, and say
in CHANGELOG.md what becomes of it.
"""

from __future__ import annotations

import sys
from difflib import unified_diff
from pathlib import Path

from tests.golden.entries import ENTRIES, FILES
from tests.golden.scripts import rendered_files

#: Kept by hand: nobody writes them.
_BY_HAND = frozenset({"earlier", "kept"})


def golden_files() -> dict[Path, bytes]:
    """Every golden file, as today's code writes it."""
    files = {FILES / each.file: each.write(each.value) for each in ENTRIES}
    files |= {FILES / name: text.encode() for name, text in rendered_files().items()}
    return files


def _kept() -> set[Path]:
    found = {path for path in FILES.rglob("*") if path.is_file()}
    return {path for path in found if path.relative_to(FILES).parts[0] not in _BY_HAND}


def differences() -> list[str]:
    """What is not as it is kept, in lines; none where all is."""
    now, kept = golden_files(), _kept()
    told = [f"{path.relative_to(FILES)} belongs to nothing" for path in sorted(kept - set(now))]
    for path, data in now.items():
        old = path.read_bytes() if path in kept else b""
        if old != data:
            name = str(path.relative_to(FILES))
            lines = [each.decode(errors="backslashreplace").splitlines() for each in (old, data)]
            told += unified_diff(*lines, name, f"{name} now", lineterm="", n=1)
    return told


def main() -> None:
    """Write all of them."""
    told = differences()
    now = golden_files()
    for path in _kept() - set(now):
        path.unlink()
    for path, data in now.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    sys.stdout.write("\n".join([*told, f"{len(now)} files in {FILES}"]) + "\n")


if __name__ == "__main__":
    main()
