"""Plain values into YAML that our own reader, and every other one, reads back the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from slurm_forge.documents.scalars import is_plain_text

__all__ = ["dump", "flow"]


class _Dumper(yaml.SafeDumper):
    """Quotes what some reader of YAML would not take for text; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes write line breaks of other scripts (U+0085, U+2028) so that they come back.
    style = None if text.isprintable() and is_plain_text(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(data: Mapping[str, Any]) -> str:
    """YAML text of plain values, keys in the given order; ``load`` reads back equal values."""
    return str(
        yaml.dump(
            dict(data),
            Dumper=_Dumper,
            sort_keys=False,
            width=100,
            default_flow_style=None,
            allow_unicode=True,
        )
    )


def flow(value: Any) -> str:
    """A value as YAML in one line of printable text; ``load_value`` reads back an equal one."""

    def text(*, allow_unicode: bool) -> str:
        written = yaml.dump(
            [value],
            Dumper=_Dumper,
            sort_keys=False,
            width=float("inf"),
            default_flow_style=True,
            allow_unicode=allow_unicode,
        )
        return str(written).rstrip("\n")[1:-1]

    found = text(allow_unicode=True)
    return found if found.isprintable() else text(allow_unicode=False)
