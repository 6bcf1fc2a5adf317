"""The JSON Schema of site files, for editors that complete and check YAML."""

from __future__ import annotations

import json
from typing import Any

from slurm_forge.site.model import Site


def site_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a site file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Site.model_json_schema(),
    }


def schema_text() -> str:
    """The same as text, as it lies beside the site files."""
    return json.dumps(site_schema(), indent=1, ensure_ascii=False) + "\n"
